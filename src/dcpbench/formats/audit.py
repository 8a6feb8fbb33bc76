"""Audit of a checkpoint: its manifest is compared with what was to be saved. Nothing is loaded."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.formats.files import compare_synced

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor that is stored in one place. `file` is a path in the checkpoint; None if the box is
    not stored."""

    offsets: Shape
    sizes: Shape
    file: str | None


def reach(boxes: Iterable[Any]) -> Shape:
    """Return the smallest shape that contains all boxes, each with `offsets` and `sizes`."""
    ends = [map(sum, zip(box.offsets, box.sizes, strict=True)) for box in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


@dataclass(frozen=True)
class Entry:
    """The stored value of one key, or, without chunks, the value that is to be saved. For a value that is not
    a tensor, `shape` and `dtype` are None, and its single chunk has no dimensions."""

    shape: Shape | None = None
    dtype: str | None = None
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, order=True)
class Span:
    """The bytes of a file that belong to an entry: from `begin` up to, but not including, `end`.
    `transformed` if an extension of the writer changed them, as by compression."""

    begin: int
    end: int
    name: str
    transformed: bool = False


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        entries: by flattened key (`model.net1.weight`).
        named: the length of each file according to the checkpoint, by path.
        found: the actual length of each file.
        own: further files that belong to the format.
        unclaimed: names of stored data that no entry refers to.
        spans: the entries' bytes in each file, if the format specifies them.
        found_wrong: contradictions that were found while reading it.
    """

    entries: Mapping[str, Entry]
    named: Mapping[str, int]
    found: Mapping[str, int]
    own: frozenset[str] = frozenset()
    unclaimed: tuple[str, ...] = ()
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    found_wrong: tuple[Mismatch, ...] = ()


_VALUE = "a value"
"""Key of a value in the manifest that is audited as a control."""


def audit(manifest: Manifest, expected: Mapping[str, Entry]) -> list[Mismatch]:
    """Return every mismatch: missing and extra keys, values stored as tensors or vice versa, wrong shapes and
    dtypes, chunks that overlap, are not stored or leave gaps, files with a wrong length, bytes of a file that
    belong to two entries, and files that no entry names."""
    entries = manifest.entries
    mismatches = [*manifest.found_wrong]
    mismatches += [Mismatch(key, Problem.not_stored) for key in expected if key not in entries]
    mismatches += [Mismatch(key, Problem.not_asked_for) for key in entries if key not in expected]
    mismatches += [Mismatch(name, Problem.unclaimed) for name in manifest.unclaimed]
    for key, entry in entries.items():
        wanted = expected.get(key, entry)
        if wanted.shape is not None and entry.shape is None:
            mismatches.append(_unlike(key, Problem.dtype, wanted.dtype, "no tensor"))
        if wanted.shape is None and entry.shape and entry.dtype != "torch.uint8":  # the bytes of a stream
            mismatches.append(_unlike(key, Problem.dtype, "a value", entry.dtype))
        if entry.shape is not None:
            mismatches += _tensor(key, entry, entry.shape, expected.get(key, Entry()))
        nowhere = [chunk.offsets for chunk in entry.chunks if chunk.file is None]
        mismatches += [Mismatch(key, Problem.chunks, facts={"nowhere": offsets}) for offsets in nowhere]
    for path, named in sorted(manifest.named.items()):
        if manifest.found.get(path) != named:
            length = manifest.found.get(path)
            seen = {"found": "no such file"} if length is None else {"length": length}
            mismatches.append(Mismatch(path, Problem.files, facts={"named": named, **seen}))
    for path, spans in manifest.spans.items():
        mismatches += [Mismatch(path, Problem.ranges, facts=facts) for facts in _overlapping(spans)]
    unnamed = sorted(manifest.found.keys() - manifest.named.keys() - manifest.own)
    return mismatches + [
        Mismatch(path, Problem.stray, facts={"found": manifest.found[path]}) for path in unnamed
    ]


def _overlapping(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield the bytes that two entries share, comparing each entry with the one before it that reaches
    furthest."""
    before = Span(0, 0, "")
    for span in sorted(span for span in spans if span.begin < span.end):
        if span.begin < before.end:
            shared = {"begin": span.begin, "end": min(span.end, before.end)}
            yield {**shared, "one": before.name, "other": span.name}
        before = span if span.end > before.end else before


def _unlike(key: str, problem: Problem, expected: Any, actual: Any) -> Mismatch:
    facts = {"expected": expected, "actual": actual}
    return Mismatch(key, problem, facts=facts, sides=("to be saved {}", "stored {}"))


def _tensor(key: str, entry: Entry, shape: Shape, expected: Entry) -> list[Mismatch]:
    mismatches: list[Mismatch] = []
    wrong: list[tuple[Problem, dict[str, Any]]] = []
    if expected.shape not in (None, shape):
        mismatches.append(_unlike(key, Problem.shape, expected.shape, shape))
    if expected.dtype not in (None, entry.dtype):
        mismatches.append(_unlike(key, Problem.dtype, expected.dtype, entry.dtype))
    if len(entry.chunks) == 1 and entry.chunks[0].sizes == shape and not any(entry.chunks[0].offsets):
        return mismatches
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(begin + length > whole for begin, length, whole in ends):
            facts = {"offsets": chunk.offsets, "sizes": chunk.sizes, "shape": shape}
            wrong.append((Problem.chunks, facts))
    filled = sorted(
        (chunk for chunk in entry.chunks if math.prod(chunk.sizes)), key=lambda chunk: chunk.offsets
    )
    for number, earlier in enumerate(filled):
        for after in range(number + 1, len(filled)):
            later = filled[after]
            boxes = [*zip(earlier.offsets, earlier.sizes, later.offsets, later.sizes, strict=True)]
            if boxes and boxes[0][0] + boxes[0][1] <= boxes[0][2]:
                break  # the following ones begin no earlier
            rest = boxes[1:]
            if all(
                max(begin, start) < min(begin + length, start + size) for begin, length, start, size in rest
            ):
                wrong.append((Problem.chunks, {"one": earlier.offsets, "other": later.offsets}))
    stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if stored < math.prod(shape):
        wrong.append((Problem.uncovered, {"stored": stored, "elements": math.prod(shape)}))
    return mismatches + [Mismatch(key, problem, facts=facts) for problem, facts in wrong]


def compare_manifest(
    manifest: Manifest,
    expected: Mapping[str, Entry],
    files: Collection[str] = (),
    synced: Collection[str] | None = None,
) -> Compared:
    """Audit a manifest; the controls audit damaged copies of it. If `synced` is known, it has to include all
    of `files`."""
    control = controls(manifest, expected)
    compared = Compared(audit(manifest, expected), dict.fromkeys(control, True), control)
    return compared + compare_synced(files, synced) if files and synced is not None else compared


def controls(manifest: Manifest, expected: Mapping[str, Entry]) -> dict[str, bool]:
    """Return, for each kind of damage, whether the audit of a damaged copy reports it.

    The copy has only one tensor and one value, to be cheaper than the audit itself. Without a stored tensor
    of several elements there is no control.
    """
    tensors = (key for key, entry in manifest.entries.items() if math.prod(entry.shape or ()) > 1)
    stored = (key for key in tensors if all(chunk.file for chunk in manifest.entries[key].chunks))
    if not (key := next(stored, "")):
        return {}
    entry = manifest.entries[key]
    spans = {path: spans[:1] for path, spans in [*manifest.spans.items()][:1]}
    reduced = replace(manifest, entries={key: entry, _VALUE: Entry()}, spans=spans)
    wanted = {key: expected.get(key, entry), _VALUE: Entry()}
    clean = audit(reduced, wanted)
    return {
        damage: any(mismatch not in clean for mismatch in audit(copy, wanted))
        for damage, copy in damaged_copies(reduced, key).items()
    }


def damaged_copies(manifest: Manifest, key: str) -> dict[str, Manifest]:
    """Return a damaged copy for each kind of damage; `key` is the key of a tensor."""
    entry = manifest.entries[key]
    shape = entry.shape or ()
    filled = next(chunk for chunk in entry.chunks if math.prod(chunk.sizes))
    others = [chunk for chunk in entry.chunks if chunk is not filled]  # a rank may have no elements
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
            "a key too many": with_entries({"sentinel": Entry()}),
            "another shape": with_entries({key: replace(entry, shape=(shape[0] + 1, *shape[1:]))}),
            "another dtype": with_entries({key: replace(entry, dtype="torch.complex128")}),
            "a chunk that is there twice": with_chunks(*entry.chunks, filled),
            "a chunk that is missing": with_chunks(*others),
            "a chunk beyond its tensor": with_chunks(*others, replace(filled, offsets=shape)),
            "a chunk that is stored nowhere": with_chunks(*others, replace(filled, file=None)),
            "a file that is too short": replace(
                manifest, found={**manifest.found, path: manifest.found.get(path, 0) - 1}
            ),
            "an entry that has no key": replace(manifest, unclaimed=(*manifest.unclaimed, "sentinel")),
            "a file that no entry names": replace(manifest, found={**manifest.found, "sentinel": 1}),
            "a file that is missing": replace(manifest, found=_without(manifest.found, path)),
        }
    )


def _without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: content for name, content in mapping.items() if name != key}
