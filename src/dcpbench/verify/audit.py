"""What a checkpoint says of itself, against what was to be saved: nothing is loaded for it."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.verify.files import compare_synced

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor that is stored in one place: `file` is a path in the checkpoint, None nowhere."""

    offsets: Shape
    sizes: Shape
    file: str | None


@dataclass(frozen=True)
class Entry:
    """What is stored under one key, or is to be, when no chunks are known. Of what is no tensor, `shape` and
    `dtype` are None and its one chunk has no dimensions."""

    shape: Shape | None = None
    dtype: str | None = None
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, order=True)
class Span:
    """The bytes of a file that are an entry's: from `begin` until before `end`; `transformed` by an extension
    of the writer, as by compression, or as they are."""

    begin: int
    end: int
    name: str
    transformed: bool = False


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's entries by their flattened keys (`model.net1.weight`), and its files by their paths.

    `named` has the bytes of each file by what the checkpoint says, `found` by what is there. `own` are the
    files that the format has beside those, `unclaimed` names what is stored though no entry has it. `spans`
    are what is stored in each file, where the format says it. `found_wrong` is what was seen not to fit
    together when it was read.
    """

    entries: Mapping[str, Entry]
    named: Mapping[str, int]
    found: Mapping[str, int]
    own: frozenset[str] = frozenset()
    unclaimed: tuple[str, ...] = ()
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    found_wrong: tuple[Mismatch, ...] = ()


_VALUE = "a value"
"""The key of a value in what is audited as a control."""


def audit(manifest: Manifest, expected: Mapping[str, Entry]) -> list[Mismatch]:
    """Keys in both directions, tensors stored as such, shapes, dtypes, chunks that tile each tensor exactly
    once and are stored, and files that are there with the lengths that the checkpoint names, no byte of them
    of two entries; nothing beside all that."""
    entries = manifest.entries
    found = [*manifest.found_wrong]
    found += [Mismatch(key, Problem.not_stored) for key in expected if key not in entries]
    found += [Mismatch(key, Problem.not_asked_for) for key in entries if key not in expected]
    found += [Mismatch(name, Problem.unclaimed) for name in manifest.unclaimed]
    for key, entry in entries.items():
        wanted = expected.get(key, entry)
        if wanted.shape is not None and entry.shape is None:
            found.append(
                Mismatch(key, Problem.dtype, facts={"expected": wanted.dtype, "stored": "no tensor"})
            )
        if wanted.shape is None and entry.shape and entry.dtype != "torch.uint8":  # the bytes of a stream
            found.append(Mismatch(key, Problem.dtype, facts={"expected": "a value", "stored": entry.dtype}))
        if entry.shape is not None:
            found += _tensor(key, entry, entry.shape, expected.get(key, Entry()))
        nowhere = [chunk.offsets for chunk in entry.chunks if chunk.file is None]
        found += [Mismatch(key, Problem.chunks, facts={"nowhere": offsets}) for offsets in nowhere]
    for path, named in sorted(manifest.named.items()):
        if manifest.found.get(path) != named:
            facts = {"named": named, "found": manifest.found.get(path, "no such file")}
            found.append(Mismatch(path, Problem.files, facts=facts))
    for path, spans in manifest.spans.items():
        found += [Mismatch(path, Problem.ranges, facts=facts) for facts in _overlapping(spans)]
    unnamed = sorted(manifest.found.keys() - manifest.named.keys() - manifest.own)
    return found + [Mismatch(path, Problem.stray, facts={"found": manifest.found[path]}) for path in unnamed]


def _overlapping(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """What two entries share of one file, each entry with the one that reaches the furthest before it."""
    before = Span(0, 0, "")
    for span in sorted(span for span in spans if span.begin < span.end):
        if span.begin < before.end:
            shared = {"begin": span.begin, "end": min(span.end, before.end)}
            yield {**shared, "one": before.name, "other": span.name}
        before = max(before, span, key=lambda one: one.end)


def _tensor(key: str, entry: Entry, shape: Shape, expected: Entry) -> list[Mismatch]:
    wrong: list[tuple[Problem, dict[str, Any]]] = []
    if expected.shape not in (None, shape):
        wrong.append((Problem.shape, {"expected": expected.shape, "stored": shape}))
    if expected.dtype not in (None, entry.dtype):
        wrong.append((Problem.dtype, {"expected": expected.dtype, "stored": entry.dtype}))
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(begin + length > whole for begin, length, whole in ends):
            facts = {"offsets": chunk.offsets, "sizes": chunk.sizes, "shape": shape}
            wrong.append((Problem.chunks, facts))
    filled = sorted((chunk for chunk in entry.chunks if math.prod(chunk.sizes)), key=lambda one: one.offsets)
    for number, one in enumerate(filled):
        for after in range(number + 1, len(filled)):
            other = filled[after]
            boxes = [*zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)]
            if boxes and boxes[0][0] + boxes[0][1] <= boxes[0][2]:
                break  # those after it begin no earlier
            rest = boxes[1:]
            if all(
                max(begin, start) < min(begin + length, start + size) for begin, length, start, size in rest
            ):
                wrong.append((Problem.chunks, {"one": one.offsets, "other": other.offsets}))
    stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if stored < math.prod(shape):
        wrong.append((Problem.uncovered, {"stored": stored, "elements": math.prod(shape)}))
    return [Mismatch(key, problem, facts=facts) for problem, facts in wrong]


def compare_manifest(
    manifest: Manifest,
    expected: Mapping[str, Entry],
    files: Collection[str] = (),
    synced: Collection[str] | None = None,
) -> Compared:
    """Audit a manifest; the control audits copies of it that are damaged. All of `files` have to be `synced`,
    if it is known which are."""
    control = controls(manifest, expected)
    compared = Compared(audit(manifest, expected), dict.fromkeys(control, True), control)
    return compared + compare_synced(files, synced) if files and synced is not None else compared


def controls(manifest: Manifest, expected: Mapping[str, Entry]) -> dict[str, bool]:
    """Whether an audit of a copy that is damaged in one way reports it, for each way there is. The copy has
    one tensor and one value only: of all of a large checkpoint's keys it would cost more than the audit.
    There is none of a checkpoint without a tensor of several elements that is stored."""
    tensors = (key for key, entry in manifest.entries.items() if math.prod(entry.shape or ()) > 1)
    stored = (key for key in tensors if all(chunk.file for chunk in manifest.entries[key].chunks))
    if not (key := next(stored, "")):
        return {}
    entry = manifest.entries[key]
    spans = {path: spans[:1] for path, spans in [*manifest.spans.items()][:1]}
    one = replace(manifest, entries={key: entry, _VALUE: Entry()}, spans=spans)
    wanted = {key: expected.get(key, entry), _VALUE: Entry()}
    clean = audit(one, wanted)
    return {
        damage: any(found not in clean for found in audit(copy, wanted))
        for damage, copy in damaged_copies(one, key).items()
    }


def damaged_copies(manifest: Manifest, key: str) -> dict[str, Manifest]:
    """A copy for each way in which a checkpoint may be damaged; `key` is that of a tensor."""
    entry = manifest.entries[key]
    shape = entry.shape or ()
    filled = next(chunk for chunk in entry.chunks if math.prod(chunk.sizes))
    *others, last = entry.chunks
    path = next(iter(manifest.named))

    def with_entries(changed: dict[str, Entry]) -> Manifest:
        return replace(manifest, entries={**manifest.entries, **changed})

    def with_chunks(*chunks: Chunk) -> Manifest:
        return with_entries({key: replace(entry, chunks=chunks)})

    shared = {path: [*spans, replace(spans[0], name="sentinel")] for path, spans in manifest.spans.items()}
    where_known = {"bytes of two entries": replace(manifest, spans=shared)} if shared else {}
    return (
        where_known
        | {
            "a tensor that is stored as bytes": with_entries({key: Entry(None, None, entry.chunks[:1])}),
            "a value that is stored as a tensor": with_entries(
                {_VALUE: replace(entry, dtype="torch.complex128")}  # not the one of streams
            ),
            "a key that is missing": replace(manifest, entries=_without(manifest.entries, key)),
            "a key that is too many": with_entries({"sentinel": Entry()}),
            "another shape": with_entries({key: replace(entry, shape=(shape[0] + 1, *shape[1:]))}),
            "another dtype": with_entries({key: replace(entry, dtype="torch.complex128")}),
            "a chunk that is there twice": with_chunks(*entry.chunks, filled),
            "a chunk that is missing": with_chunks(*(chunk for chunk in entry.chunks if chunk is not filled)),
            "a chunk beyond its tensor": with_chunks(*others, replace(last, offsets=shape)),
            "a chunk that is stored nowhere": with_chunks(*others, replace(last, file=None)),
            "a file that is too short": replace(
                manifest, found={**manifest.found, path: manifest.found.get(path, 0) - 1}
            ),
            "an entry that has no key": replace(manifest, unclaimed=(*manifest.unclaimed, "sentinel")),
            "a file that no entry names": replace(manifest, found={**manifest.found, "sentinel": 1}),
            "a file that is missing": replace(manifest, found=_without(manifest.found, path)),
        }
    )


def _without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}
