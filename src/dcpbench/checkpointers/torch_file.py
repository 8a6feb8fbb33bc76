"""What a `torch.save` has written, read without torch's reader: a zip archive of a pickle and of records."""

import io
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dcpbench.verify.plain_read import StoredChunk


def stored_in(archive: zipfile.ZipFile, record: Callable[[str], bytes]) -> Any:
    """The object that an archive holds, with tensors as chunks that `record` reads by a name in the archive,
    and without whatever else is no plain value."""
    (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    return _Records(io.BytesIO(archive.read(pickled)), pickled.split("/")[0], record).load()


class _Other:
    """Stands for an object of which nothing is looked at."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Records(pickle.Unpickler):
    def __init__(self, pickled: io.BytesIO, root: str, record: Callable[[str], bytes]) -> None:
        super().__init__(pickled)
        self._root, self._record = root, record

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
        return torch.frombuffer(bytearray(self._record(name)), dtype=dtype).as_strided(*place)
