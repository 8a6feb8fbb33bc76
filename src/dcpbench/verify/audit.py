"""What a checkpoint says of itself, against what was to be saved: nothing is loaded for it."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dcpbench.records.findings import Finding, Problem
from dcpbench.verify.manifest import Chunk, Entry, Manifest
from dcpbench.verify.retain import DigestedLeaf
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf


@dataclass(frozen=True)
class Expected:
    """What there is to know of one key beforehand: the shape and dtype of a tensor, if it is one.

    A state dict may hold as a tensor what a snapshot looks at as a number.
    """

    shape: tuple[int, ...] | None = None
    dtype: str | None = None


def expected_of(leaves: Leaves, prefix: str = "") -> dict[str, Expected]:
    """What a rank's snapshot promises of a checkpoint's keys."""
    promised: dict[str, Expected] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, TensorLeaf | DigestedLeaf):
            promised[f"{prefix}{name}"] = Expected(leaf.extent.shape, str(leaf.dtype))
        elif not isinstance(leaf, Idle):
            promised[f"{prefix}{name}"] = Expected()
    return promised


def audit(manifest: Manifest, expected: Mapping[str, Expected]) -> list[Finding]:
    """Keys in both directions, shapes, dtypes, chunks that tile each tensor exactly once and are stored,
    and files that are there with the lengths that the checkpoint names.

    Args:
        manifest: of the checkpoint.
        expected: what was to be saved, by key.
    """
    entries = manifest.entries
    found = [Finding(key, Problem.not_stored) for key in expected if key not in entries]
    found += [Finding(key, Problem.not_asked_for) for key in entries if key not in expected]
    for key, entry in entries.items():
        if entry.shape is not None:
            found += _tensor(key, entry, entry.shape, expected.get(key, Expected()))
    for path, named in sorted(manifest.named.items()):
        if manifest.found.get(path) != named:
            facts = {"named": named, "found": manifest.found.get(path, "no such file")}
            found.append(Finding(path, Problem.files, facts=facts))
    for key, entry in entries.items():
        nowhere = [chunk for chunk in entry.chunks if chunk.file is None]
        found += [Finding(key, Problem.chunks, facts={"nowhere": chunk.offsets}) for chunk in nowhere]
    return found


def _tensor(key: str, entry: Entry, shape: tuple[int, ...], expected: Expected) -> list[Finding]:
    wrong = []
    if expected.shape is not None and shape != expected.shape:
        facts = {"expected": expected.shape, "stored": shape}
        wrong.append(Finding(key, Problem.shape, facts=facts))
    if expected.dtype is not None and entry.dtype != expected.dtype:
        types = {"expected": expected.dtype, "stored": entry.dtype}
        wrong.append(Finding(key, Problem.dtype, facts=types))
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(begin + length > whole for begin, length, whole in ends):
            beyond = {"offsets": chunk.offsets, "sizes": chunk.sizes, "shape": shape}
            wrong.append(Finding(key, Problem.chunks, facts=beyond))
    filled = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
    for one, other in itertools.combinations(filled, 2):
        boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        if all(max(begin, start) < min(begin + length, start + size) for begin, length, start, size in boxes):
            wrong.append(Finding(key, Problem.chunks, facts={"one": one.offsets, "other": other.offsets}))
    stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if stored < math.prod(shape):
        counts = {"stored": stored, "elements": math.prod(shape)}
        wrong.append(Finding(key, Problem.uncovered, facts=counts))
    return wrong


def controls(manifest: Manifest, expected: Mapping[str, Expected]) -> dict[str, bool]:
    """Whether an audit of a copy that is damaged in one way reports it, for each way there is.

    The copy has one key only: all of a large checkpoint's, ten times, would cost more than the audit.
    """
    key, entry = next((key, entry) for key, entry in manifest.entries.items() if _is_matrix(entry))
    one = replace(manifest, entries={key: entry})
    wanted = {key: expected.get(key, Expected())}
    clean = audit(one, wanted)
    return {
        name: any(found not in clean for found in audit(damage(one, key, entry), wanted))
        for name, damage in _DAMAGES.items()
    }


def _is_matrix(entry: Entry) -> bool:
    return entry.shape is not None and math.prod(entry.shape) > 1


def _with(one: Manifest, key: str, entry: Entry) -> Manifest:
    return replace(one, entries={**one.entries, key: entry})


def _without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def _with_chunks(one: Manifest, key: str, entry: Entry, *chunks: Chunk) -> Manifest:
    return _with(one, key, replace(entry, chunks=chunks))


def _filled(entry: Entry) -> Chunk:
    return next(chunk for chunk in entry.chunks if math.prod(chunk.sizes))


def _reshape(one: Manifest, key: str, entry: Entry) -> Manifest:
    assert entry.shape
    shape = (entry.shape[0] + 1, *entry.shape[1:])
    return _with(one, key, replace(entry, shape=shape))


def _lose_chunk(one: Manifest, key: str, entry: Entry) -> Manifest:
    lost = _filled(entry)
    return _with_chunks(one, key, entry, *(chunk for chunk in entry.chunks if chunk is not lost))


def _move_chunk(one: Manifest, key: str, entry: Entry) -> Manifest:
    *others, last = entry.chunks
    return _with_chunks(one, key, entry, *others, replace(last, offsets=entry.shape or ()))


def _lose_place(one: Manifest, key: str, entry: Entry) -> Manifest:
    *others, last = entry.chunks
    return _with_chunks(one, key, entry, *others, replace(last, file=None))


def _shorten_file(one: Manifest, key: str, entry: Entry) -> Manifest:
    path = next(iter(one.named))
    return replace(one, found={**one.found, path: one.found.get(path, 0) - 1})


def _lose_file(one: Manifest, key: str, entry: Entry) -> Manifest:
    path = next(iter(one.named))
    return replace(one, found=_without(one.found, path))


_DAMAGES: dict[str, Callable[[Manifest, str, Entry], Manifest]] = {
    "a key that is missing": lambda one, key, entry: replace(one, entries=_without(one.entries, key)),
    "a key that is too many": lambda one, key, entry: _with(one, "stranger", Entry(None, None, ())),
    "another shape": _reshape,
    "another dtype": lambda one, key, entry: _with(one, key, replace(entry, dtype="torch.complex128")),
    "a chunk that is there twice": lambda one, key, entry: _with_chunks(
        one, key, entry, *entry.chunks, _filled(entry)
    ),
    "a chunk that is missing": _lose_chunk,
    "a chunk beyond its tensor": _move_chunk,
    "a chunk that is stored nowhere": _lose_place,
    "a file that is too short": _shorten_file,
    "a file that is missing": _lose_file,
}
