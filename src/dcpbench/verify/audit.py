"""What a checkpoint says of itself, against what was to be saved: nothing is loaded for it."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcpbench.verify.compare import Mismatch
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


def audit(metadata: Metadata, lengths: Mapping[str, int], expected: Mapping[str, Expected]) -> list[Mismatch]:
    """Keys in both directions, shapes, dtypes, chunks that tile each tensor exactly once, and files that
    are there with the lengths that `.metadata` names.

    Args:
        metadata: of the checkpoint.
        lengths: the size in bytes of each file of the checkpoint, by its relative path.
        expected: what was to be saved, by key.
    """
    held = metadata.state_dict_metadata
    found = [Mismatch(key, "to be saved, but not in the checkpoint") for key in expected if key not in held]
    found += [Mismatch(key, "in the checkpoint, but not to be saved") for key in held if key not in expected]
    for key, entry in held.items():
        if isinstance(entry, TensorStorageMetadata):
            found += [Mismatch(key, what) for what in _tensor(entry, expected.get(key, Expected()))]
    return found + _files(metadata, lengths)


def _tensor(entry: TensorStorageMetadata, expected: Expected) -> list[str]:
    wrong = []
    size = tuple(entry.size)
    if expected.shape is not None and size != expected.shape:
        wrong.append(f"shape: to be saved {expected.shape}, in the checkpoint {size}")
    if expected.dtype is not None and str(entry.properties.dtype) != expected.dtype:
        wrong.append(f"dtype: to be saved {expected.dtype}, in the checkpoint {entry.properties.dtype}")
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    for offsets, sizes in chunks:
        if any(begin + length > whole for begin, length, whole in zip(offsets, sizes, size, strict=True)):
            wrong.append(f"the chunk at {offsets} of size {sizes} reaches beyond {size}")
    filled = [chunk for chunk in chunks if math.prod(chunk[1])]
    for one, other in itertools.combinations(filled, 2):
        if all(
            max(begin, start) < min(begin + length, start + extent)
            for begin, length, start, extent in zip(*one, *other, strict=True)
        ):
            wrong.append(f"the chunks at {one[0]} and {other[0]} overlap")
    covered = sum(math.prod(sizes) for _, sizes in chunks)
    if covered < math.prod(size):
        wrong.append(f"its chunks hold {covered} of {math.prod(size)} elements")
    return wrong


def _files(metadata: Metadata, lengths: Mapping[str, int]) -> list[Mismatch]:
    stored = metadata.storage_data or {}
    named: dict[str, int] = {}
    for place in stored.values():
        named[place.relative_path] = max(named.get(place.relative_path, 0), place.offset + place.length)
    found = [
        Mismatch(path, f"{length} bytes by .metadata, {lengths.get(path, 'no such file')}")
        for path, length in sorted(named.items())
        if lengths.get(path) != length
    ]
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            places = [MetadataIndex(key)]
        else:
            places = [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
        found += [Mismatch(key, f"nothing is stored for {place}") for place in places if place not in stored]
    return found


def controls(
    metadata: Metadata, lengths: Mapping[str, int], expected: Mapping[str, Expected]
) -> dict[str, bool]:
    """Whether an audit of a copy that is damaged in one way tells of it, for each way there is.

    The copy has one key only: all of a large checkpoint's, ten times, would cost more than the audit.
    """
    key = next(key for key, entry in metadata.state_dict_metadata.items() if _is_matrix(entry))
    one = _only(metadata, key)
    wanted = {key: expected.get(key, Expected())}
    clean = {(found.name, found.what) for found in audit(one, lengths, wanted)}
    fired: dict[str, bool] = {}
    for name, damage in _DAMAGES.items():
        changed, files = copy.deepcopy(one), dict(lengths)
        damage(changed, files, key)
        told = {(found.name, found.what) for found in audit(changed, files, wanted)}
        fired[name] = bool(told - clean)
    return fired


def _only(metadata: Metadata, key: str) -> Metadata:
    """What `.metadata` would be of a checkpoint that holds one key."""
    stored = {place: where for place, where in metadata.storage_data.items() if place.fqn == key}
    return Metadata({key: metadata.state_dict_metadata[key]}, storage_data=stored)


def _is_matrix(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata) and math.prod(entry.size) > 1


def _entry(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _drop(metadata: Metadata, files: dict[str, int], key: str) -> None:
    del metadata.state_dict_metadata[key]


def _add(metadata: Metadata, files: dict[str, int], key: str) -> None:
    metadata.state_dict_metadata["stranger"] = BytesStorageMetadata()


def _reshape(metadata: Metadata, files: dict[str, int], key: str) -> None:
    entry = _entry(metadata, key)
    entry.size = torch.Size([entry.size[0] + 1, *entry.size[1:]])


def _retype(metadata: Metadata, files: dict[str, int], key: str) -> None:
    entry = _entry(metadata, key)
    entry.properties = replace(entry.properties, dtype=torch.complex128)


def _repeat_chunk(metadata: Metadata, files: dict[str, int], key: str) -> None:
    entry = _entry(metadata, key)
    entry.chunks.append(next(chunk for chunk in entry.chunks if math.prod(chunk.sizes)))


def _lose_chunk(metadata: Metadata, files: dict[str, int], key: str) -> None:
    entry = _entry(metadata, key)
    entry.chunks.remove(next(chunk for chunk in entry.chunks if math.prod(chunk.sizes)))


def _move_chunk(metadata: Metadata, files: dict[str, int], key: str) -> None:
    entry = _entry(metadata, key)
    last = entry.chunks.pop()
    entry.chunks.append(ChunkStorageMetadata(torch.Size(entry.size), last.sizes))


def _lose_place(metadata: Metadata, files: dict[str, int], key: str) -> None:
    del metadata.storage_data[next(place for place in metadata.storage_data if place.fqn == key)]


def _shorten_file(metadata: Metadata, files: dict[str, int], key: str) -> None:
    files[next(iter(metadata.storage_data.values())).relative_path] -= 1


def _lose_file(metadata: Metadata, files: dict[str, int], key: str) -> None:
    del files[next(iter(metadata.storage_data.values())).relative_path]


_DAMAGES: dict[str, Callable[[Metadata, dict[str, int], str], None]] = {
    "a key that is missing": _drop,
    "a key that is too many": _add,
    "another shape": _reshape,
    "another dtype": _retype,
    "a chunk that is there twice": _repeat_chunk,
    "a chunk that is missing": _lose_chunk,
    "a chunk beyond its tensor": _move_chunk,
    "a chunk that is stored nowhere": _lose_place,
    "a file that is too short": _shorten_file,
    "a file that is missing": _lose_file,
}
