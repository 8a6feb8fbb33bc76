"""The recording layer: while it is there, every change that this process makes to files below a folder, and
every point at which it waits for other ranks, is a line of a log.

It stands where Python makes its system calls, and not in DCP: below `open` and `pathlib` in the raw file that
their buffers write to, and in the functions of `os`. So what is recorded are the writes that leave the
process, in its order and sizes, and not those that a buffer still holds. What native code writes it does not
see: whoever records holds what the record makes of the files before against the files after
(`disk_states.after`), and the tests hold it against `strace`.
"""

import builtins
import inspect
import io
import multiprocessing.process
import os
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from dcpbench.crash_states.operations import Kind, Record, Step, read_logs, to_line, tree_of

_real_open, _real_os_open = io.open, os.open
_LARGEST_BUFFER = 8 * 2**20


class Recorder:
    """Writes the log of a process below `logs`, of changes below `folder`."""

    def __init__(self, folder: Path, logs: Path, rank: int, role: str = "rank") -> None:
        self.folder, self.logs, self.rank, self.role = folder.resolve(), logs, rank, role
        # A process that was forked would write among what its parent writes: each has a log of its own.
        self._log = _real_open(logs / f"{rank}-{role}-{os.getpid()}.jsonl", "w", buffering=1)
        self._writing = threading.Lock()
        self._counts = Counter[str]()

    def note(self, kind: Kind, **fields: Any) -> None:
        """A step that has just been made."""
        with self._writing:
            self._log.write(to_line(Step(kind, time.monotonic_ns(), **fields)) + "\n")

    def succeeded(self) -> None:
        """The save has reported success to this rank."""
        self.note(Kind.success)

    def below(self, path: Any) -> str | None:
        """The path in the folder, "." for itself; None for one that is elsewhere."""
        if isinstance(path, int):
            return None
        whole = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - links are followed by nobody here
        parent = whole.parent.resolve() / whole.name
        return str(parent.relative_to(self.folder)) if parent.is_relative_to(self.folder) else None

    def count(self, name: str) -> int:
        """How often it was asked about this name before."""
        with self._writing:
            self._counts[name] += 1
            return self._counts[name] - 1

    def close(self) -> None:
        self._log.close()


class _RecordedFile(io.FileIO):
    """The raw file under a buffer, as `open` makes it."""

    def __init__(self, recorder: Recorder, path: Any, mode: str, opener: Any) -> None:
        super().__init__(path, mode, opener=opener)
        self._recorder, self._path = recorder, str(recorder.below(path))
        self._file, self._appends = _key(self.fileno()), "a" in mode
        recorder.note(Kind.open, path=self._path, file=self._file, truncates="w" in mode)

    def write(self, data: Any, /) -> int:
        offset = os.fstat(self.fileno()).st_size if self._appends else self.tell()
        written = super().write(data)
        of_file = {"path": self._path, "file": self._file}
        self._recorder.note(
            Kind.write, **of_file, offset=offset, data=bytes(memoryview(data).cast("B")[:written])
        )
        return written

    def truncate(self, size: int | None = None, /) -> int:
        became = super().truncate(size)
        self._recorder.note(Kind.truncate, path=self._path, file=self._file, size=became)
        return became


@contextmanager
def recording(folder: Path, logs: Path, rank: int) -> Iterator[Recorder]:
    """Meanwhile this process, and processes that it spawns, record what they do to the files below a folder;
    `logs` is a folder elsewhere, for all ranks."""
    recorder = Recorder(folder, logs, rank)
    with ExitStack() as patches:
        for target, name, patched in _patches(recorder):
            patches.enter_context(mock.patch.object(target, name, patched))
        try:
            yield recorder
        finally:
            recorder.close()


def read_record(before: Path, logs: Path, ranks: int) -> Record:
    """What these ranks have recorded, of a folder that was like `before`."""
    of_ranks = (read_logs(sorted(logs.glob(f"{rank}-*.jsonl"))) for rank in range(ranks))
    return Record(tree_of(before), tuple(of_ranks))


def _patches(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    opened = _opening(recorder)
    yield builtins, "open", opened
    yield io, "open", opened
    yield os, "open", _os_opening(recorder)
    for name, kind in (("mkdir", Kind.mkdir), ("unlink", Kind.unlink), ("remove", Kind.unlink)):
        yield os, name, _of_path(recorder, kind, getattr(os, name))
    yield os, "rmdir", _of_path(recorder, Kind.rmdir, os.rmdir)
    yield os, "truncate", _truncating(recorder, os.truncate)
    for name in ("rename", "replace"):
        yield os, name, _renaming(recorder, getattr(os, name))
    for name in ("fsync", "fdatasync"):
        yield os, name, _syncing(recorder, getattr(os, name))
    yield os, "sync", _syncing_all(recorder, os.sync)
    for name in ("write", "pwrite", "ftruncate"):
        yield os, name, _of_descriptor(recorder, name, getattr(os, name))
    yield os, "sendfile", _sending(recorder, os.sendfile)
    for name in (
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "all_gather_object",
        "barrier",
    ):
        yield dist, name, _meeting(recorder, name, getattr(dist, name))
    yield multiprocessing.process.BaseProcess, "start", _starting(recorder)


def _opening(recorder: Recorder) -> Callable[..., Any]:
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
        if not set(mode) & set("wax+") or recorder.below(file) is None:
            return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _RecordedFile(recorder, os.fspath(file), mode.replace("b", "").replace("t", ""), opener)
        if buffering == 0:
            return raw
        size = _buffer_size(raw) if buffering < 2 else buffering
        buffered = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return opened


def _buffer_size(raw: Any) -> int:
    """What `io.open` takes."""
    if sys.version_info >= (3, 14):
        return max(min(int(raw._blksize), _LARGEST_BUFFER), io.DEFAULT_BUFFER_SIZE)
    return int(raw._blksize) if raw._blksize > 1 else io.DEFAULT_BUFFER_SIZE


def _os_opening(recorder: Recorder) -> Callable[..., int]:
    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        number = _real_os_open(path, flags, *args, **kwargs)
        relative = recorder.below(path) if "dir_fd" not in kwargs else None
        if relative is not None and flags & (os.O_WRONLY | os.O_RDWR):
            truncates = bool(flags & os.O_TRUNC)
            recorder.note(Kind.open, path=relative, file=_key(number), truncates=truncates)
        return number

    return opened


def _key(descriptor: int) -> str:
    """Which file a descriptor is open on; the descriptor itself may be used again for another."""
    status = os.fstat(descriptor)
    return f"{status.st_dev}.{status.st_ino}"


def _path_of(recorder: Recorder, descriptor: int) -> str | None:
    """The path in the folder that a descriptor is open on now, under whatever name it was opened."""
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return None
    return recorder.below(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115


def _of_descriptor(recorder: Recorder, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(descriptor: int, given: Any, *place: int) -> Any:
        path = _path_of(recorder, descriptor)
        if path is None:
            return call(descriptor, given, *place)
        offset = place[0] if place else os.lseek(descriptor, 0, os.SEEK_CUR)
        result = call(descriptor, given, *place)
        of_file = {"path": path, "file": _key(descriptor)}
        if name == "ftruncate":
            recorder.note(Kind.truncate, **of_file, size=given)
        else:
            recorder.note(
                Kind.write, **of_file, offset=offset, data=bytes(memoryview(given).cast("B")[:result])
            )
        return result

    return called


def _sending(recorder: Recorder, call: Callable[..., int]) -> Callable[..., int]:
    """What `shutil` copies files with; the kernel knows what it writes."""

    def called(descriptor: int, *args: Any, **kwargs: Any) -> int:
        path = _path_of(recorder, descriptor)
        offset = 0 if path is None else os.lseek(descriptor, 0, os.SEEK_CUR)
        sent = call(descriptor, *args, **kwargs)
        if path is not None and sent:
            with _real_open(recorder.folder / path, "rb") as file:
                file.seek(offset)
                data = file.read(sent)
            recorder.note(Kind.write, path=path, file=_key(descriptor), offset=offset, data=data)
        return sent

    return called


def _of_path(recorder: Recorder, kind: Kind, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(path: Any, *args: Any, **kwargs: Any) -> Any:
        relative = None if kwargs.get("dir_fd") is not None else recorder.below(path)
        result = call(path, *args, **kwargs)
        if relative is not None:
            recorder.note(kind, path=relative)
        return result

    return called


def _truncating(recorder: Recorder, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(file: Any, size: int) -> None:
        call(file, size)
        path = _path_of(recorder, file) if isinstance(file, int) else recorder.below(file)
        if path is not None:
            status = (recorder.folder / path).stat()
            opened = f"{status.st_dev}.{status.st_ino}"
            recorder.note(Kind.open, path=path, file=opened)
            recorder.note(Kind.truncate, path=path, file=opened, size=size)

    return called


def _renaming(recorder: Recorder, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(source: Any, target: Any, **kwargs: Any) -> Any:
        paths = recorder.below(source), recorder.below(target)
        result = call(source, target, **kwargs)
        if None not in paths:
            recorder.note(Kind.rename, path=paths[0], to=paths[1])
        return result

    return called


def _syncing(recorder: Recorder, call: Callable[[int], None]) -> Callable[[Any], None]:
    def called(file: Any) -> None:
        call(file)
        descriptor = file if isinstance(file, int) else file.fileno()
        if (path := _path_of(recorder, descriptor)) is not None:
            recorder.note(Kind.fsync, path=path)

    return called


def _syncing_all(recorder: Recorder, call: Callable[[], None]) -> Callable[[], None]:
    def called() -> None:
        call()
        recorder.note(Kind.sync)

    return called


def _meeting(recorder: Recorder, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A collective as what it orders: whoever gives has come before whoever receives goes on. Groups have a
    name that is the same on all ranks."""
    signature = inspect.signature(call)

    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group: Any = given.get("group") or dist.group.WORLD
        ranks, mine = dist.get_process_group_ranks(group), dist.get_rank()
        meeting = f"{recorder.role}/{group.group_name}/{name}"
        meeting = f"{meeting}/{recorder.count(meeting)}"
        root: Any = {
            "gather_object": "dst",
            "scatter_object_list": "src",
            "broadcast_object_list": "src",
        }.get(name)
        if root:
            of_group = given.get(f"group_{root}")
            root_rank = ranks[of_group] if of_group is not None else given.get(root) or 0
        gives = root != "src" or mine == root_rank
        waits_for = ranks if root is None or (root == "dst" and mine == root_rank) else []
        if root == "src" and mine != root_rank:
            waits_for = [root_rank]
        if gives:
            recorder.note(Kind.signal, tokens=(f"{meeting}/{mine}",))
        result = call(*args, **kwargs)
        if waits_for:
            recorder.note(Kind.wait, tokens=tuple(f"{meeting}/{rank}" for rank in waits_for))
        return result

    return called


class _InChild:
    """Starts to record in the process in which it is unpickled."""

    def __init__(self, recorder: Recorder) -> None:
        self._given = recorder.folder, recorder.logs, recorder.rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _record_in_child, self._given


def _record_in_child(folder: Path, logs: Path, rank: int) -> None:
    recorder = Recorder(folder, logs, rank, role="child")
    for target, name, patched in _patches(recorder):
        setattr(target, name, patched)


def _starting(recorder: Recorder) -> Callable[[Any], None]:
    start = multiprocessing.process.BaseProcess.start

    def started(process: Any) -> None:
        process.recorder = _InChild(recorder)  # it is pickled with the process
        try:
            start(process)
        finally:
            del process.recorder

    return started
