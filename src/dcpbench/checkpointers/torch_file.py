"""What a `torch.save` has written, read without torch's reader: a zip archive of a pickle and of records."""

import io
import pickle
import struct
import zipfile
from functools import partial
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any

import torch

from dcpbench.verify.plain_read import StoredChunk

_NAME_AND_EXTRA_AT, _LOCAL_HEADER = 26, 30
"""In the header before a record: where the lengths of its name and its extra field stand, and its own."""


def stored_in(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """The object in a file, or in so many bytes of it, and without whatever is no plain value. Tensors
    are chunks that are read when they are asked for, of a large one no more than is looked at."""
    mapped = _mapped(path, offset, length)
    with zipfile.ZipFile(_View(mapped)) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        places = {
            one.filename: (offset + _begin_of(one, mapped), one.file_size) for one in archive.infolist()
        }
        return _Records(io.BytesIO(archive.read(pickled)), pickled.split("/")[0], path, places).load()


def _mapped(path: Path, offset: int, length: int | None) -> memoryview:
    """So many bytes of a file from there on, or all of them, of which no more is read than is looked at."""
    before = offset % ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        size = 0 if length is None else before + length
        return memoryview(mmap(file.fileno(), size, access=ACCESS_COPY, offset=offset - before))[before:]


class _View(io.RawIOBase):
    """Bytes as a file; `io.BytesIO` would copy them."""

    def __init__(self, held: memoryview) -> None:
        self._held, self._at = held, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = (0, self._at, len(self._held))[whence] + offset
        if at < 0:
            raise OSError(f"{-at} bytes before the first one")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        piece = self._held[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _begin_of(info: zipfile.ZipInfo, mapped: memoryview) -> int:
    """Where the bytes of a record begin; it is never compressed."""
    lengths = struct.unpack_from("<HH", mapped, info.header_offset + _NAME_AND_EXTRA_AT)
    return info.header_offset + _LOCAL_HEADER + int(sum(lengths))


class _Other:
    """Stands for an object of which nothing is looked at."""

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
        """Of what has a storage without a dtype, `others` have it."""
        dtypes = (other for other in others if isinstance(other, torch.dtype))
        read = partial(self._read, next(dtypes, storage[0]), storage[1], tuple(sizes), strides, offset)
        return StoredChunk((0,) * len(sizes), tuple(sizes), read)

    def _read(self, dtype: torch.dtype, name: str, *place: Any) -> torch.Tensor:
        mapped = _mapped(self._path, *self._places[name])
        return torch.frombuffer(mapped, dtype=dtype).as_strided(*place)
