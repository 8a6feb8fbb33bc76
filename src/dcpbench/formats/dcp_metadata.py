"""Reads DCP's `.metadata` without torch and without running code: it is a pickle, possibly of another user.

The classes of DCP's metadata are replaced by plain records, created for each file. Any other name in the
pickle is refused.
"""

import io
import math
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.formats.audit import Chunk, Entry, Manifest, Span
from dcpbench.records import files

METADATA, DATA_SUFFIX = ".metadata", ".distcp"
"""DCP's name of the metadata file, and the suffix of data files."""
_OF_A_RANK = re.compile(r"__(\d+)\.metadata")
"""Metadata file of one rank, written by a save without collectives, and the rank."""
_FROM_A_RANK = re.compile(r"__(\d+)(?:_\d+\.distcp|\.metadata(?:\.tmp)?)")
"""Any file of such a save, and the rank that wrote it."""
_OF_A_THREAD = re.compile(r"__\d+_\d+\.distcp")

_DTYPE = re.compile(r"bool|(bfloat|bits|complex|float|q?u?int)\d\w*")
DAMAGED = (
    pickle.UnpicklingError,
    *(AttributeError, EOFError, ImportError, LookupError, MemoryError, OverflowError),
    *(RecursionError, TypeError, ValueError),
)
"""Exceptions of unpickling, or using, data that is not metadata."""


class _Record:
    """An object with attributes only; arguments of the constructor are ignored. Files of older torch have no
    transform descriptors, and indices of values no offset."""

    offset = transform_descriptors = None

    def __init__(self, *_: Any) -> None: ...


class _Properties(_Record):
    dtype: str

    def __setstate__(self, state: Any) -> None:
        self.dtype, *_ = state if isinstance(state, tuple) else (state["dtype"],)


_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath")
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    # before torch 2.3
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # of Python 3.13
}
_BUILT_IN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and _DTYPE.fullmatch(name):
            return f"torch.{name}"
        if (module, name) in _BUILT_IN:
            return _BUILT_IN[module, name]
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        # A pickle can set attributes of a class too, so each file gets separate classes.
        kind = _Properties if name == "TensorProperties" else _Record
        return self._made.setdefault(f"{module}.{name}", type(name, (kind,), {}))


def metadata_in(files: Iterable[str]) -> dict[str, int | None]:
    """Return the metadata files that a load reads, each with its rank: the common one, with None, if there is
    one, otherwise one of each rank."""
    if METADATA in (files := list(files)):
        return {METADATA: None}
    of_ranks = sorted((int(match[1]), match[0]) for match in map(_OF_A_RANK.fullmatch, files) if match)
    return {name: rank for rank, name in of_ranks}


def unfinished_rank(files: Iterable[str]) -> str | None:
    """Return why a save without collectives did not finish on one of its ranks; None if it did.

    Ranks are numbered from 0, and each writes its metadata last. Missing ranks above the highest number in
    any file name cannot be detected.
    """
    files = {*files}
    ranks = {int(match[1]) for match in map(_FROM_A_RANK.fullmatch, files) if match}
    for rank in range(max(ranks, default=-1) + 1):
        metadata_of_rank = f"__{rank}{METADATA}"
        if metadata_of_rank not in files:
            return f"no {metadata_of_rank}, which rank {rank} writes last: its save did not finish"
        if f"{metadata_of_rank}.tmp" in files:
            return f"{metadata_of_rank}.tmp was not renamed: the save of rank {rank} did not finish"
    return None


class MetadataError(Exception):
    """A metadata file is invalid. The message is one line."""


def read_metadata(path: Path) -> Any:
    """Return the contents of a metadata file, with the same attributes as torch's class.

    Raises:
        OSError: it cannot be read, is not a regular file, or too large.
        MetadataError: it is not DCP's metadata.
    """
    try:
        metadata = _Reader(io.BytesIO(files.read(path))).load()
    except DAMAGED as error:
        raise MetadataError(f"{type(error).__name__}: {error}") from None
    if not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise MetadataError("it contains no metadata of a checkpoint")
    return metadata


def manifest_of(metadata: Any, lengths: Mapping[str, int], metadata_file: str = METADATA) -> Manifest:
    """Return the manifest of a checkpoint from its metadata, read here or by torch, and its files'
    lengths."""
    stored = {
        (index.fqn, _shape(index.offset)): place for index, place in (metadata.storage_data or {}).items()
    }
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for index, place in stored.items():
        transformed = bool(getattr(place, "transform_descriptors", None))
        span = Span(place.offset, place.offset + place.length, place_name(*index), transformed)
        spans[place.relative_path].append(span)
    named = {path: max(span.end for span in spans) for path, spans in spans.items()}
    path_of = {index: place.relative_path for index, place in stored.items()}
    entries: dict[str, Entry] = {}
    claimed: set[tuple[str, tuple[int, ...] | None]] = set()
    empty: list[Mismatch] = []
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            places = [(key, _shape(chunk.offsets)) for chunk in entry.chunks]
            chunks = [
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), path_of.get(place))
                for chunk, place in zip(entry.chunks, places, strict=True)
            ]
            claimed.update(places)
            dtype = str(entry.properties.dtype)
            entries[key] = Entry(tuple(entry.size), dtype, tuple(chunks))
            for chunk, place in zip(chunks, places, strict=True):
                if place in stored and not stored[place].length and (elements := math.prod(chunk.sizes)):
                    facts = {"bytes": 0, "file": chunk.file, "elements": elements, "dtype": dtype}
                    empty.append(Mismatch(key, Problem.ranges, facts=facts))
        else:
            entries[key] = Entry(None, None, (Chunk((), (), path_of.get((key, None))),))
            claimed.add((key, None))
    unclaimed = tuple(place_name(*index) for index in stored if index not in claimed)
    # A writer's thread without data leaves an empty file.
    idle = [name for name, length in lengths.items() if not length and _OF_A_THREAD.fullmatch(name)]
    return Manifest(
        entries, named, lengths, frozenset([metadata_file, *idle]), unclaimed, spans, tuple(empty)
    )


def merged_manifest(manifests: Sequence[Manifest], lengths: Mapping[str, int]) -> Manifest:
    """Merge the manifests of a checkpoint's metadata files. A chunk that several ranks wrote, because it is
    replicated, is taken from the first."""
    if len(manifests) == 1:
        return manifests[0]
    entries: dict[str, Entry] = {}
    for manifest in manifests:
        for key, entry in manifest.entries.items():
            known = entries.setdefault(key, replace(entry, chunks=()))
            boxes = {(chunk.offsets, chunk.sizes) for chunk in known.chunks}
            more = tuple(
                chunk
                for chunk in entry.chunks
                if (chunk.offsets, chunk.sizes) not in boxes or chunk.file is None
            )
            entries[key] = replace(known, chunks=known.chunks + more)
    return Manifest(
        entries,
        {path: end for manifest in manifests for path, end in manifest.named.items()},
        lengths,
        frozenset(name for manifest in manifests for name in manifest.own),
        tuple(name for manifest in manifests for name in manifest.unclaimed),
        {path: spans for manifest in manifests for path, spans in manifest.spans.items()},
        tuple(mismatch for manifest in manifests for mismatch in manifest.found_wrong),
    )


def foreign_manifest(folder: Path, lengths: Mapping[str, int], metadata_file: str = METADATA) -> Manifest:
    """Return the manifest of an untrusted folder, whose files have these lengths.

    Raises:
        OSError, MetadataError: see `read_metadata`.
    """
    try:
        manifest = manifest_of(
            read_metadata(Path(os.path.realpath(folder / metadata_file))), lengths, metadata_file
        )
        for key, entry in manifest.entries.items():
            check_shapes(key, entry)
        for path, spans in manifest.spans.items():
            numbers = {type(number) for span in spans for number in (span.begin, span.end)}
            if not isinstance(path, str) or numbers != {int}:
                raise MetadataError(f"a file is named {path!r}, with {manifest.named[path]!r} bytes")
            if any(span.begin < 0 or span.end < span.begin for span in spans):
                raise MetadataError(f"an entry in {path} begins before byte 0, or ends before it begins")
    except DAMAGED as error:
        raise MetadataError(f"{type(error).__name__}: {error}") from None
    return manifest


def check_shapes(key: object, entry: Entry) -> None:
    """Raise a MetadataError unless shapes consist of numbers and chunks have the same number of
    dimensions."""
    shapes = [numbers for chunk in entry.chunks for numbers in (chunk.offsets, chunk.sizes)]
    whole = entry.shape or ()
    numbers = all(
        type(size) is int and 0 <= size < 2**63
        for shape_or_part in (whole, *shapes)
        for size in shape_or_part
    )
    if (
        not isinstance(key, str)
        or not numbers
        or any(len(shape_or_part) != len(whole) for shape_or_part in shapes)
    ):
        raise MetadataError(f"{key!r} has invalid shapes")


def place_name(fqn: str, offset: tuple[int, ...] | None) -> str:
    """Return the name of stored data: its key, and its offset in the tensor."""
    return f"{fqn} at {[*(offset or ())]}"


def _shape(offset: Any) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)
