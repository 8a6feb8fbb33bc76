"""Open the files of a sweep's folder, and walk through folders and remove them. The folder can come from
another user.

No link is followed, only regular files are opened, and none that is larger than a sweep's. A file is written
under a temporary name that cannot be guessed, where no link can have been put, and then renamed. Folders can
be nested deeper than Python's stack, and than the longest path.
"""

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

MOST_BYTES = 2**36
"""The largest file of rows: hundreds of thousands of cells, `details` included, need less."""
LONGEST_LINE = 2**26
MOST_JSON_BYTES = 2**26
"""The largest description of a sweep or of its machine."""

_TEMPORARY = re.compile(r"\.dcpbench-[0-9a-f]{32}\.tmp")


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 if the process was started without them, before another file, such as a
    pipe to a rank, gets one of these numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


class SafeStream:
    """A text stream to which writes never fail, even if it is full, closed or broken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_regular(path: Path, most_bytes: int = MOST_BYTES) -> BinaryIO:
    """Open a file to read, without blocking.

    Raises:
        OSError: it cannot be opened, is not a regular file, or has more than `most_bytes`.
    """
    descriptor = _regular(path, os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    if size > most_bytes:
        os.close(descriptor)
        raise OSError(errno.EFBIG, f"{size:,} bytes are more than the {most_bytes:,} allowed", str(path))
    return os.fdopen(descriptor, "rb")


def read(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Return the content of a file; raises what `open_regular` does."""
    with open_regular(path, most_bytes) as file:
        return file.read(most_bytes)


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. One that is too long is cut at `LONGEST_LINE` bytes, and is the last.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line
            if len(line) == LONGEST_LINE:
                return


def open_to_append(path: Path) -> BinaryIO:
    """Open a file, or make it, to append without a buffer.

    Raises:
        OSError: it cannot be opened, is not a regular file, or has a second name.
    """
    descriptor = _regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    if os.fstat(descriptor).st_nlink != 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "it has a second name (hard link), which would change too", str(path))
    return os.fdopen(descriptor, "ab", buffering=0)


def replace(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file atomically; a link is replaced, not followed.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(temporary_name())
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with os.fdopen(descriptor, "wb") as out:
        try:
            out.writelines(parts)
            out.flush()
            os.fsync(out.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def temporary_name() -> str:
    """Return a name for a file that is not complete yet."""
    return f".dcpbench-{secrets.token_hex(16)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether `temporary_name` can have made a name."""
    return bool(_TEMPORARY.fullmatch(name))


def remove_temporary(folder: Path) -> None:
    """Remove the incomplete files of a process that was killed, and no other files."""
    for item in folder.iterdir():
        if is_temporary(item.name) and (item.is_symlink() or item.is_file()):
            item.unlink()


def walk(folder: Path, strict: bool = False) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder from this one down, with the names of its subfolders and of everything else in it,
    including links. A caller can remove subfolders from the list.

    Args:
        strict: raise if a folder is missing or must not be read, instead of skipping it.

    Raises:
        OSError: a folder cannot be read.
    """
    inside = [folder]
    while inside:
        place = inside.pop()
        try:
            with os.scandir(place) as items:
                found = [(item.name, item.is_dir(follow_symlinks=False)) for item in items]
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            if strict:
                raise
            continue
        folders = [name for name, is_folder in found if is_folder]
        yield place, folders, [name for name, is_folder in found if not is_folder]
        inside += [place / name for name in folders]


def everything_below(folder: Path, strict: bool = False) -> list[Path]:
    """Return all files, links and folders below a folder, sorted; raises what `walk` does."""
    found = walk(folder, strict)
    return sorted(place / name for place, folders, names in found for name in (*folders, *names))


def files_below(folder: Path, strict: bool = False) -> dict[Path, os.stat_result]:
    """Return the stat of each file below a folder by its path, sorted. Links to files are followed, links to
    folders are not. Raises what `walk` does."""
    paths = (place / name for place, _, names in walk(folder, strict) for name in names)
    return {path: path.stat() for path in sorted(filter(Path.is_file, paths))}


def remove(folder: Path, within: Path) -> str | None:
    """Remove a folder that is in another one, even if parts of it are read-only; return a sentence if that
    failed.

    No link is followed: a link in place of the folder is removed, and the folder that it points to stays.
    """
    around = folder.parent.resolve()
    if folder.name in ("", "..") or not around.is_relative_to(within.resolve()):
        return f"{folder} was not removed: it is not in {within}"
    try:
        if folder.is_symlink():
            folder.unlink()
            return None
        remove_tree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{folder} could not be removed: {error}"
    return None


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it, even in parts that are read-only. No link is followed, and all
    that can be removed is.

    Raises:
        OSError: the first error, after everything else was removed.
    """
    at = os.open(folder.parent, os.O_PATH | os.O_DIRECTORY)
    left = [folder.name]
    outside: list[tuple[str, tuple[int, int], list[str]]] = []
    failed: list[OSError] = []
    try:
        while left or outside:
            try:
                if left:
                    name = left.pop()
                    inner = _unlocked(name, at)
                    outside.append((name, _identity(at), left))
                    os.close(at)
                    at, left = inner, _emptied(inner, failed)
                else:
                    name, identity, left = outside.pop()
                    outer = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=at)
                    os.close(at)
                    at = outer
                    if _identity(at) != identity:
                        raise OSError(errno.ESTALE, "moved while it was removed", str(folder))
                    os.rmdir(name, dir_fd=at)
            except OSError as error:
                failed.append(error)
                if error.errno == errno.ESTALE:
                    break
    finally:
        os.close(at)
    if failed:
        raise failed[0]


def _unlocked(name: str, within: int) -> int:
    """Return the descriptor of a folder, with the permissions to empty it."""
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
    itself = f"/proc/self/fd/{folder}"  # another folder can have its name by now
    try:
        with suppress(OSError):
            Path(itself).chmod(0o700)
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(folder)


def _emptied(folder: int, failed: list[OSError]) -> list[str]:
    """Remove all but the subfolders of a folder, and return their names."""
    with os.scandir(folder) as items:
        found = [(item.name, item.is_dir(follow_symlinks=False)) for item in items]
    for name, is_folder in found:
        if not is_folder:
            try:
                os.unlink(name, dir_fd=folder)
            except OSError as error:
                failed.append(error)
    return [name for name, is_folder in found if is_folder]


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _regular(path: Path, flags: int) -> int:
    """Open a regular file, without waiting for a writer if it is a pipe; return its descriptor."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "Is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"
        raise OSError(errno.EINVAL, what, str(path))
    return descriptor
