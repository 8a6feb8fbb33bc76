"""Comparison of a checkpoint's files with what was saved, read without the library that wrote them; a file of
`torch.save` is a zip archive of a pickle and of records."""

import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any

import torch

from dcpbench.compare.controls import perturbed_leaves
from dcpbench.compare.leaves import SMALL_BYTES, Comparison, compare
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name
from dcpbench.formats.audit import reach
from dcpbench.state.layout import Extent, whole
from dcpbench.state.snapshot import BLOCK, DigestedLeaf, EmptyShard, Leaf, Leaves, TensorLeaf, snapshot_nested
from dcpbench.torch_private import STORAGE_DTYPE

_LONGEST_ERROR = 200
_LOCATOR, _LOCATOR_TO_END = (b"PK\6\7", struct.Struct("<8xQ4x")), 42
_DIRECTORY = b"PK\6\6", struct.Struct("<32xQ8xQ")
_ENTRY, _ENTRY_SIZE = (b"PK\1\2", struct.Struct("<16x3L3H8xL")), 46
_RECORD, _RECORD_SIZE = (b"PK\3\4", struct.Struct("<26x2H")), 30
_IN_EXTRA = 2**32 - 1
"""Headers of a zip archive, whose directory `torch.save` always writes as zip64; a number that does not fit
32 bits is in an extra field."""


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, at `offsets` and of shape `sizes`; `read` reads it from its file to the CPU."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


Stored = Mapping[str, Sequence[StoredChunk]]
"""The chunks of each tensor in a checkpoint's files, by flattened key."""


def compare_stored(leaves: Mapping[str, Leaf], stored: Stored, device: torch.device) -> Comparison:
    """Compare this rank's parts of what was saved, by flattened key, with the files. Of tensors of which only
    digests were kept (more than 4 MiB), only one block of the smallest is read."""
    expected = {key: leaf for key, leaf in leaves.items() if key in stored}
    large = {key: leaf for key, leaf in expected.items() if isinstance(leaf, DigestedLeaf)}
    smallest = min(large, key=lambda key: large[key].extent.numel, default=None)
    saved = {
        key: _as_read(key, leaf)
        for key, leaf in expected.items()
        if isinstance(leaf, TensorLeaf | DigestedLeaf)
        and leaf.extent.numel
        and key not in large.keys() - {smallest}
    }
    groups: dict[str, list[str]] = {}
    for key, leaf in saved.items():
        is_small = leaf.extent.numel * leaf.dtype.itemsize <= SMALL_BYTES
        groups.setdefault("" if is_small else key, []).append(key)
    mismatches, detected = list[Mismatch](), dict[str, bool]()
    for keys in groups.values():
        wrong, reported = _compare({key: saved[key] for key in keys}, stored, device)
        mismatches += wrong
        detected |= reported
    compared = Compared(mismatches, dict.fromkeys(detected, True), detected)
    return Comparison(leaves, stored, compared, partial(_is_stored, device=device))


def _is_stored(key: str, leaf: Leaf, chunks: Any, device: torch.device) -> bool:
    """Return whether a file has this rank's part of a tensor; of a large one, the block that is read."""
    if not isinstance(leaf, TensorLeaf | DigestedLeaf) or not leaf.extent.numel:
        return False
    return not _compare({key: _as_read(key, leaf)}, {key: chunks}, device)[0]


def _as_read(key: str, leaf: TensorLeaf | DigestedLeaf) -> TensorLeaf | DigestedLeaf:
    return _one_block(key, leaf) if isinstance(leaf, DigestedLeaf) else leaf


def _one_block(key: str, leaf: DigestedLeaf) -> DigestedLeaf:
    """Return one block of a part as a separate part; the key decides which."""
    number = zlib.crc32(key.encode()) % len(leaf.blocks)
    begin = number * BLOCK
    extent = replace(
        leaf.extent, start=leaf.extent.start + begin, numel=min(BLOCK, leaf.extent.numel - begin)
    )
    return replace(leaf, extent=extent, blocks=(leaf.blocks[number],))


def _rows_of(extent: Extent) -> Extent:
    """Return the same part, with the smallest box of complete rows that contains it."""
    complete = extent.numel == math.prod(extent.box)
    if complete or not extent.box or extent.order[:1] not in ((), (0,)):
        return extent
    row = math.prod(extent.box[1:])
    first, last = extent.start // row, -(-(extent.start + extent.numel) // row)
    return replace(
        extent,
        offset=(extent.offset[0] + first, *extent.offset[1:]),
        box=(last - first, *extent.box[1:]),
        start=extent.start - first * row,
    )


def _compare(
    saved: Mapping[str, TensorLeaf | DigestedLeaf], stored: Stored, device: torch.device
) -> tuple[list[Mismatch], dict[str, bool]]:
    """Compare parts with what is stored; also whether the control of each detected."""
    wrong, read = dict[str, Mismatch](), Leaves()
    for key, leaf in saved.items():
        try:
            stored_part = read_part(leaf.extent, stored[key])
        except Exception as error:  # noqa: BLE001 - decoding damaged bytes can raise anything
            facts = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]}
            wrong[key], read[key,] = Mismatch(key, Problem.unreadable, leaf.kind, facts=facts), leaf
        else:
            to = device
            if isinstance(leaf, TensorLeaf):
                stored_part, to = stored_part.reshape(leaf.local.shape), leaf.local.device
            read[key,] = TensorLeaf(stored_part.to(to), leaf.extent, leaf.placements, leaf.kind)
    expected: Leaves = {(key,): leaf for key, leaf in saved.items()}
    wrong |= {mismatch.name: mismatch for mismatch in compare(expected, read)}
    reported = {mismatch.name for mismatch in compare(perturbed_leaves(expected), read, closely=False)}
    return [wrong[key] for key in saved if key in wrong], {key: key in reported for key in saved}


def read_whole(chunks: Sequence[StoredChunk]) -> torch.Tensor:
    """Assemble a tensor, on the CPU, from its chunks. Its shape is as large as they reach.

    Raises:
        ValueError: the chunks have no element, or one has a different shape than its `sizes`.
    """
    full = whole(torch.empty(reach(chunks), device="meta"))
    return read_part(full, chunks).reshape(full.shape)


def read_part(extent: Extent, chunks: Iterable[StoredChunk]) -> torch.Tensor:
    """Assemble a rank's part of a tensor, shape (numel,), on the CPU, from the chunks that overlap it; zeros
    where there is no chunk.

    Raises:
        ValueError: no chunk overlaps it, or one has a different shape than its `sizes`.
    """
    box: torch.Tensor | None = None
    extent = _rows_of(extent)
    for chunk in chunks:
        ends = zip(extent.offset, extent.box, chunk.offsets, chunk.sizes, strict=True)
        common = [(max(b, o), min(b + n, o + s)) for b, n, o, s in ends]
        if any(first >= last for first, last in common):
            continue
        stored = chunk.read()
        if tuple(stored.shape) != chunk.sizes:
            raise ValueError(f"a chunk has shape {tuple(stored.shape)} instead of {chunk.sizes}")
        box = stored.new_zeros(extent.box) if box is None else box
        into = tuple(slice(a - b, z - b) for (a, z), b in zip(common, extent.offset, strict=True))
        out_of = tuple(slice(a - o, z - o) for (a, z), o in zip(common, chunk.offsets, strict=True))
        box[into] = stored[out_of]
    if box is None:
        raise ValueError("no chunk has any of it")
    return extent.take_of_box(box)


def leaves_like(expected: Leaves, keys: Mapping[Name, str], values: Mapping[str, Any]) -> Leaves:
    """Return leaves of the full values of a checkpoint, by flattened key, for the names of an expected state;
    `keys` are the flattened keys by name."""
    restored: Leaves = {}
    for name, leaf in expected.items():
        if keys[name] in values and not isinstance(leaf, EmptyShard):
            stored_value = values[keys[name]]
            is_tensor = isinstance(leaf, TensorLeaf | DigestedLeaf)
            restored |= snapshot_nested(
                {name[-1]: stored_value if is_tensor else _plain(stored_value)}, name[:-1]
            )
    return restored


def _plain(value: Any) -> Any:
    """Return a saved value that was not a tensor: the number for a tensor without dimensions, and the object
    for a stream of bytes."""
    if isinstance(value, torch.Tensor) and value.dim():
        value = io.BytesIO(value.numpy().tobytes())
    if isinstance(value, io.BytesIO):
        value.seek(0)
        return torch.load(value, weights_only=True)
    return value.item() if isinstance(value, torch.Tensor) else value


def stored_in(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """Return the object in a file, or in a range of its bytes, without anything but plain values. Tensors are
    chunks that read only the elements that are used.

    Raises:
        ValueError, struct.error: these bytes are not an archive of `torch.save`.
    """
    with _content(path, offset, length) as archive:  # the unpickler would keep the file open
        return _Records(archive, path, offset).load()


def _content(path: Path, offset: int, length: int | None) -> memoryview:
    """Return a range of a file, by default to its end; a large one is mapped, and read when it is used."""
    before = offset % ALLOCATIONGRANULARITY
    size = 0 if length is None else before + length
    with path.open("rb", buffering=0) as file:
        if length is not None and length <= SMALL_BYTES:
            file.seek(offset)
            return memoryview(bytearray(file.read(length)))
        mapped = mmap(file.fileno(), size, access=ACCESS_COPY, offset=offset - before)
    return memoryview(mapped)[before:]


def _elements(
    path: Path, begin: int, size: int, dtype: torch.dtype, sizes: Any, strides: Any, offset: int
) -> torch.Tensor:
    """Return the tensor in a record of a file."""
    return torch.frombuffer(_content(path, begin, size), dtype=dtype).as_strided(sizes, strides, offset)


def _header(kind: tuple[bytes, struct.Struct], archive: memoryview, at: int) -> tuple[int, ...]:
    signature, layout = kind
    if archive[at : at + 4] != signature:
        raise ValueError(f"byte {at} of the archive does not begin with {signature!r}")
    return layout.unpack_from(archive, at)


def _places(archive: memoryview) -> dict[str, tuple[int, int, int]]:
    """Return CRC, length and offset of each record of an archive by name. `zipfile` takes six times as many
    calls, and DCP writes an archive for each chunk."""
    (directory,) = _header(_LOCATOR, archive, len(archive) - _LOCATOR_TO_END)
    count, at = _header(_DIRECTORY, archive, directory)
    places: dict[str, tuple[int, int, int]] = {}
    for _ in range(count):
        crc, packed, size, name, extra, comment, begin = _header(_ENTRY, archive, at)
        begins, ends = at + _ENTRY_SIZE, at + _ENTRY_SIZE + name
        at = ends + extra + comment
        if _IN_EXTRA in (packed, size, begin):  # after the type and the length of that field
            wide = (number for (number,) in struct.iter_unpack("<Q", archive[ends + 4 : ends + extra]))
            packed, size, begin = (
                next(wide) if number == _IN_EXTRA else number for number in (packed, size, begin)
            )
        places[str(archive[begins:ends], "utf-8")] = crc, size, begin
    return places


class _Other:
    """A placeholder for an object that is not used."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Records(pickle.Unpickler):
    def __init__(self, archive: memoryview, path: Path, offset: int) -> None:
        self._archive, self._path, self._offset = archive, path, offset
        self._places = _places(archive)
        (pickled,) = (name for name in self._places if name[-9:] == "/data.pkl")
        self._root, (begin, size) = pickled[:-9], self._place_of(pickled)
        content = bytes(archive[begin : begin + size])
        if zlib.crc32(content) != self._places[pickled][0]:
            raise ValueError(f"{pickled!r} has another CRC than its archive says")
        super().__init__(io.BytesIO(content))

    def _place_of(self, name: str) -> tuple[int, int]:
        """Return offset and length of the bytes of a record, which is never compressed."""
        _, size, begin = self._places[name]
        return begin + _RECORD_SIZE + sum(_header(_RECORD, self._archive, begin)), size

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str]:
        _, storage, name, *_ = pid
        return getattr(storage, STORAGE_DTYPE.name, torch.uint8), f"{self._root}/data/{name}"

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._chunk
        if module == "torch" and (name.endswith("Storage") or isinstance(getattr(torch, name), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return _Other

    def _chunk(
        self,
        storage: tuple[torch.dtype, str],
        offset: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        *others: Any,
    ) -> StoredChunk:
        """Return the chunk of a tensor; its dtype is in `others` if its storage has none."""
        dtypes = (argument for argument in others if isinstance(argument, torch.dtype))
        begin, size = self._place_of(storage[1])
        place = self._path, self._offset + begin, size, next(dtypes, storage[0])
        read = partial(_elements, *place, tuple(sizes), strides, offset)
        return StoredChunk((0,) * len(sizes), tuple(sizes), read)
