"""The file layer intercepts every operation of this process on files below a folder, and every point at which
the process waits for other ranks.

It patches Python's system calls, not DCP: the raw file below the buffers of `open` and `pathlib`, and the
functions of `os`. So it receives the writes that leave the process, in their order and size, and not those
still in a buffer. It does not detect operations of native code.
"""

import builtins
import inspect
import io
import multiprocessing.process
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from dcpbench.plugins.crash.operations import Kind

real_open = io.open
_LARGEST_BUFFER = 8 * 2**20
_KINDS = {
    "mkdir": Kind.mkdir,
    "unlink": Kind.unlink,
    "remove": Kind.unlink,
    "rmdir": Kind.rmdir,
    "fsync": Kind.fsync,
    "fdatasync": Kind.fsync,
}
_ROOTS = {
    "gather_object": "dst",
    "scatter_object_list": "src",
    "broadcast_object_list": "src",
    "all_gather_object": None,
    "barrier": None,
}


class FileLayer:
    """Receives operations on files below `folder`. This base class changes none of them.

    `role` identifies the process of a rank: the `rank` itself, or a `child` that it has spawned.
    """

    reads = False
    """Whether it receives reads too."""

    def __init__(self, folder: Path, role: str = "rank") -> None:
        self.folder, self.role = folder.resolve(), role
        self._counting = threading.Lock()
        self._counts = Counter[str]()

    def begin(self, kind: Kind, path: str, size: int = 0) -> int:
        """Receive an operation on a path in the folder before it is made. Return how many of the `size` bytes
        to write or read.

        Raises:
            OSError: the operation is to fail.
        """
        return size

    def note(self, kind: Kind, **fields: Any) -> None:
        """Receive a step after it was made, with its fields (`operations.Step`)."""

    def read_from(self, path: Any) -> Any:
        """Return the path of the file to read in place of this one."""
        return path

    def has_read(self, path: str, offset: int, data: memoryview) -> None:
        """Receive the data of a read at an offset; it can be changed in place."""

    def in_child(self) -> tuple[Callable[..., "FileLayer"], tuple[Any, ...]]:
        """Return a function and its arguments, both picklable, that create the layer of a spawned process."""
        return FileLayer, (self.folder, "child")

    def below(self, path: Any) -> str | None:
        """Return a path relative to the folder, "." for the folder itself; None for a path outside."""
        if isinstance(path, int):
            return None
        absolute = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - a link itself must not be followed
        parent = absolute.parent.resolve() / absolute.name
        return str(parent.relative_to(self.folder)) if parent.is_relative_to(self.folder) else None

    def count(self, name: str) -> int:
        """Return the number of earlier calls with this name."""
        with self._counting:
            self._counts[name] += 1
            return self._counts[name] - 1


class _WrittenFile(io.FileIO):
    """The raw file below the buffer of a file opened for writing."""

    def __init__(self, layer: FileLayer, path: Any, mode: str, opener: Any) -> None:
        self._layer, self._path = layer, str(layer.below(path))
        layer.begin(Kind.open, self._path)
        super().__init__(path, mode, opener=opener)
        self._file, self._appends = _key(self.fileno()), "a" in mode
        layer.note(Kind.open, path=self._path, file=self._file, truncates="w" in mode)

    def write(self, data: Any, /) -> int:
        offset = os.fstat(self.fileno()).st_size if self._appends else self.tell()
        given = memoryview(data).cast("B")
        written = super().write(given[: self._layer.begin(Kind.write, self._path, len(given))])
        of_file = {"path": self._path, "file": self._file}
        self._layer.note(Kind.write, **of_file, offset=offset, data=bytes(given[:written]))
        return written

    def truncate(self, size: int | None = None, /) -> int:
        self._layer.begin(Kind.truncate, self._path)
        became = super().truncate(size)
        self._layer.note(Kind.truncate, path=self._path, file=self._file, size=became)
        return became


class _ReadFile(io.FileIO):
    """The raw file below the buffer of a file opened for reading."""

    def __init__(self, layer: FileLayer, path: Any, mode: str, opener: Any) -> None:
        self._layer, self._path = layer, str(layer.below(path))
        layer.begin(Kind.open, self._path)
        super().__init__(layer.read_from(path), mode, opener=opener)

    def readinto(self, buffer: Any, /) -> int:
        into, offset = memoryview(buffer).cast("B"), self.tell()
        count = super().readinto(into[: self._layer.begin(Kind.read, self._path, len(into))]) or 0
        self._layer.has_read(self._path, offset, into[:count])
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        return io.RawIOBase.read(self, -1 if size is None else size) or b""

    def readall(self) -> bytes:
        return io.RawIOBase.readall(self)


@contextmanager
def layered(layer: FileLayer) -> Iterator[None]:
    """Context manager: install a layer in this process and in those that it spawns."""
    with ExitStack() as patches:
        for target, name, patched in _patches(layer):
            patches.enter_context(mock.patch.object(target, name, patched))
        yield


def _patches(layer: FileLayer) -> Iterator[tuple[Any, str, Any]]:
    opened = _opening(layer)
    yield builtins, "open", opened
    yield io, "open", opened
    for name, (wrapped, *options) in _CALLS.items():
        yield os, name, wrapped(layer, getattr(os, name), *options)
    for name, root in _ROOTS.items():
        yield dist, name, _collective(layer, name, root)
    yield multiprocessing.process.BaseProcess, "start", _starting(layer)


def _opening(layer: FileLayer) -> Callable[..., Any]:
    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        writes = bool(set(mode) & set("wax+"))
        if not (writes or layer.reads) or layer.below(file) is None:
            return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        of_layer = _WrittenFile if writes else _ReadFile
        raw = of_layer(layer, os.fspath(file), mode.replace("b", "").replace("t", ""), opener)
        if buffering == 0:
            return raw
        size = _buffer_size(raw) if buffering < 2 else buffering
        buffer = io.BufferedRandom if "+" in mode else io.BufferedWriter if writes else io.BufferedReader
        buffered: Any = buffer(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return opened


def _buffer_size(raw: Any) -> int:
    """Return the buffer size that `io.open` uses."""
    if sys.version_info >= (3, 14):
        return max(min(int(raw._blksize), _LARGEST_BUFFER), io.DEFAULT_BUFFER_SIZE)
    return int(raw._blksize) if raw._blksize > 1 else io.DEFAULT_BUFFER_SIZE


def _os_opening(layer: FileLayer, call: Callable[..., int]) -> Callable[..., int]:
    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        relative = layer.below(path) if writes and "dir_fd" not in kwargs else None
        if relative is not None:
            layer.begin(Kind.open, relative)
        number = call(path, flags, *args, **kwargs)
        if relative is not None:
            truncates = bool(flags & os.O_TRUNC)
            layer.note(Kind.open, path=relative, file=_key(number), truncates=truncates)
        return number

    return opened


def _key(file: Any) -> str:
    """Identify a file by its path or descriptor; the descriptor itself can be reused for another file."""
    status = os.stat(file)  # noqa: PTH116
    return f"{status.st_dev}.{status.st_ino}"


def _path_of(layer: FileLayer, file: Any) -> str | None:
    """Return the current path of a file in the folder; that of an open file even if it was renamed."""
    if hasattr(file, "fileno"):
        file = file.fileno()
    if not isinstance(file, int):
        return layer.below(file)
    status = os.fstat(file)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return None
    return layer.below(os.readlink(f"/proc/self/fd/{file}"))  # noqa: PTH115


def _writing(layer: FileLayer, call: Callable[..., int]) -> Callable[..., int]:
    def called(descriptor: int, given: Any, *place: int) -> int:
        path = _path_of(layer, descriptor)
        if path is None:
            return call(descriptor, given, *place)
        offset = place[0] if place else os.lseek(descriptor, 0, os.SEEK_CUR)
        data = memoryview(given).cast("B")
        written = call(descriptor, data[: layer.begin(Kind.write, path, len(data))], *place)
        layer.note(Kind.write, path=path, file=_key(descriptor), offset=offset, data=bytes(data[:written]))
        return written

    return called


def _sending(layer: FileLayer, call: Callable[..., int]) -> Callable[..., int]:
    """Wrap `sendfile`, with which `shutil` copies files; the written data is read back from the file."""

    def called(descriptor: int, *args: Any, **kwargs: Any) -> int:
        path = _path_of(layer, descriptor)
        if path is None:
            return call(descriptor, *args, **kwargs)
        layer.begin(Kind.write, path)
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        sent = call(descriptor, *args, **kwargs)
        if sent:
            with real_open(layer.folder / path, "rb") as file:
                file.seek(offset)
                data = file.read(sent)
            layer.note(Kind.write, path=path, file=_key(descriptor), offset=offset, data=data)
        return sent

    return called


def _changing(layer: FileLayer, call: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """Wrap a call that changes or syncs one file, given by path, descriptor or object."""

    def called(file: Any, *args: Any, **kwargs: Any) -> Any:
        path = _path_of(layer, file) if kwargs.get("dir_fd") is None else None
        if path is not None:
            layer.begin(kind, path)
        result = call(file, *args, **kwargs)
        if path is not None:
            layer.note(kind, path=path)
        return result

    return called


def _truncating(layer: FileLayer, call: Callable[..., None]) -> Callable[..., None]:
    def called(file: Any, size: int) -> None:
        path = _path_of(layer, file)
        if path is not None:
            layer.begin(Kind.truncate, path)
        call(file, size)
        if path is not None:
            if not isinstance(file, int):
                layer.note(Kind.open, path=path, file=_key(file))
            layer.note(Kind.truncate, path=path, file=_key(file), size=size)

    return called


def _renaming(layer: FileLayer, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(source: Any, target: Any, **kwargs: Any) -> Any:
        paths = layer.below(source), layer.below(target)
        if paths[0] is not None:
            layer.begin(Kind.rename, paths[0])
        result = call(source, target, **kwargs)
        if None not in paths:
            layer.note(Kind.rename, path=paths[0], to=paths[1])
        return result

    return called


def _syncing_all(layer: FileLayer, call: Callable[[], None]) -> Callable[[], None]:
    def called() -> None:
        call()
        layer.note(Kind.sync)

    return called


_CALLS: dict[str, tuple[Any, ...]] = {
    "open": (_os_opening,),
    **{name: (_changing, kind) for name, kind in _KINDS.items()},
    **dict.fromkeys(("truncate", "ftruncate"), (_truncating,)),
    **dict.fromkeys(("rename", "replace"), (_renaming,)),
    **dict.fromkeys(("write", "pwrite"), (_writing,)),
    "sync": (_syncing_all,),
    "sendfile": (_sending,),
}
"""The patched functions of `os`: what wraps each, and with which further arguments."""


def _collective(layer: FileLayer, name: str, root: str | None) -> Callable[..., Any]:
    """Record the order that a collective determines: ranks that receive continue after ranks that send. A
    group has the same name on all ranks. `root` is the parameter for the only rank that sends or receives."""
    call = getattr(dist, name)
    signature = inspect.signature(call)

    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group: Any = given.get("group") or dist.group.WORLD
        ranks, own_rank = dist.get_process_group_ranks(group), dist.get_rank()
        collective = f"{layer.role}/{group.group_name}/{name}"
        collective = f"{collective}/{layer.count(collective)}"
        senders = receivers = ranks
        if root:
            of_group = given.get(f"group_{root}")
            root_rank = ranks[of_group] if of_group is not None else given.get(root) or 0
            others = [rank for rank in ranks if rank != root_rank]
            senders, receivers = ([root_rank], others) if root == "src" else (ranks, [root_rank])
        if own_rank in senders:
            layer.note(Kind.signal, tokens=(f"{collective}/{own_rank}",))
        result = call(*args, **kwargs)
        if own_rank in receivers:
            layer.note(Kind.wait, tokens=tuple(f"{collective}/{rank}" for rank in senders))
        return result

    return called


class _InChild:
    """Installs a layer in the process in which it is unpickled."""

    def __init__(self, layer: FileLayer) -> None:
        self._layer = layer

    def __reduce__(self) -> tuple[Any, ...]:
        make, given = self._layer.in_child()
        return _layer_in_child, (make, given)


def _layer_in_child(make: Callable[..., FileLayer], given: tuple[Any, ...]) -> None:
    for target, name, patched in _patches(make(*given)):
        setattr(target, name, patched)


def _starting(layer: FileLayer) -> Callable[[Any], None]:
    start = multiprocessing.process.BaseProcess.start

    def started(process: Any) -> None:
        process.layer = _InChild(layer)  # pickled with the process
        try:
            start(process)
        finally:
            del process.layer

    return started
