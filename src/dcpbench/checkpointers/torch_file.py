"""Reads files of `torch.save` without torch's reader: zip archives of a pickle and of records."""

import io
import pickle
import struct
import zipfile
from functools import partial
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any

import torch

from dcpbench.records.files import FilePart
from dcpbench.verify.plain_read import StoredChunk

_NAME_AND_EXTRA_AT, _LOCAL_HEADER = 26, 30
"""Offset of the lengths of name and extra field in the header of a record, and length of that header."""


def stored_in(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """Return the object in a file, or in a range of its bytes, without anything but plain values. Tensors are
    chunks that read only the elements that are used."""
    end = path.stat().st_size if length is None else offset + length
    with path.open("rb") as file, zipfile.ZipFile(part := FilePart(file, offset, end)) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        places = {one.filename: (offset + _begin_of(one, part), one.file_size) for one in archive.infolist()}
        return _Records(io.BytesIO(archive.read(pickled)), pickled.split("/")[0], path, places).load()


def _begin_of(info: zipfile.ZipInfo, part: FilePart) -> int:
    """Return the offset of a record's data, which is never compressed."""
    part.seek(info.header_offset + _NAME_AND_EXTRA_AT)
    lengths = struct.unpack("<HH", part.read(4) or b"")
    return info.header_offset + _LOCAL_HEADER + int(sum(lengths))


class _Other:
    """A placeholder for an object that is not used."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Records(pickle.Unpickler):
    def __init__(
        self, pickled: io.BytesIO, root: str, path: Path, places: dict[str, tuple[int, int]]
    ) -> None:
        super().__init__(pickled)
        self._root, self._path, self._places = root, path, places

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str]:
        _, storage, name, *_ = pid
        return getattr(storage, "_dtype", torch.uint8), f"{self._root}/data/{name}"

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
        dtypes = (other for other in others if isinstance(other, torch.dtype))
        read = partial(self._read, next(dtypes, storage[0]), storage[1], tuple(sizes), strides, offset)
        return StoredChunk((0,) * len(sizes), tuple(sizes), read)

    def _read(self, dtype: torch.dtype, name: str, *place: Any) -> torch.Tensor:
        offset, length = self._places[name]
        before = offset % ALLOCATIONGRANULARITY
        with self._path.open("rb") as file:
            mapped = mmap(file.fileno(), before + length, access=ACCESS_COPY, offset=offset - before)
        return torch.frombuffer(memoryview(mapped)[before:], dtype=dtype).as_strided(*place)
