"""Open the files of a sweep's folder, and walk through folders and remove them. The folder can come from
another user.

No link is followed, only regular files are opened, and a line and a document have a largest size. A file is
written under a temporary name that cannot be guessed, where no link can have been put, and then renamed.
"""

import errno
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_LINE = 2**26
"""The longest line of a file of rows."""
MOST_BYTES = 2**30
"""The largest document; the metadata of a checkpoint of ten thousand ranks is smaller."""

_TOO_DEEP = errno.ENAMETOOLONG, "its folders are nested too deeply"
_TEMPORARY = re.compile(r"\.dcpbench-[0-9a-f]{32}\.tmp")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return open(path, "rb", opener=_open)


def read(path: Path) -> bytes:
    """Return the content of a document.

    Raises:
        OSError: as `open_regular`, or it has more than `MOST_BYTES`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"{size:,} bytes are more than the {MOST_BYTES:,} allowed", str(path))
        return file.read()


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
    file = open(path, "ab", buffering=0, opener=_open)  # noqa: SIM115 - the caller closes it
    if os.fstat(file.fileno()).st_nlink != 1:
        file.close()
        raise OSError(errno.EMLINK, "it has a second name (hard link), which would change too", str(path))
    return file


def _open(path: str, flags: int) -> int:
    """Open a regular file, the only kind that has a size; do not wait for the writer of a pipe."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
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
    for path in folder.iterdir():
        if is_temporary(path.name) and (path.is_symlink() or path.is_file()):
            path.unlink()


def walk(folder: Path, strict: bool = False) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder from this one down, with the names of its subfolders and of its files, as `os.walk`.
    Links to folders are not followed. A caller can remove subfolders from the list.

    Args:
        strict: raise if a folder is missing or must not be read, instead of skipping it.

    Raises:
        OSError: a folder cannot be read.
    """

    def failed(error: OSError) -> None:
        if strict or not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
            raise error

    try:
        for place, folders, names in os.walk(folder, onerror=failed):
            yield Path(place), folders, names
    except RecursionError:
        raise OSError(*_TOO_DEEP, str(folder)) from None


def everything_below(folder: Path) -> list[Path]:
    """Return all files, links and folders below a folder, sorted; raises what `walk` does."""
    return sorted(place / name for place, folders, names in walk(folder) for name in (*folders, *names))


def files_below(folder: Path, strict: bool = False) -> dict[Path, os.stat_result]:
    """Return the stat of each file below a folder by its path, sorted, without files that are removed
    meanwhile. Links to files are followed, links to folders are not. Raises what `walk` does."""
    stats: dict[Path, os.stat_result] = {}
    for path in sorted(place / name for place, _, names in walk(folder, strict) for name in names):
        with suppress(FileNotFoundError, NotADirectoryError):
            if path.is_file():  # no broken link, and no link to itself
                stats[path] = path.stat()
    return stats


def file_lengths(folder: Path | str, strict: bool = False) -> dict[str, int]:
    """Return the length of each of the `files_below` a folder by its relative path."""
    stats = files_below(Path(folder), strict)
    return {str(path.relative_to(folder)): stat.st_size for path, stat in stats.items()}


def remove(folder: Path, within: Path) -> str | None:
    """Remove a folder that is in another one, even if parts of it are read-only; return a sentence if that
    failed.

    No link is followed: a link in place of the folder is removed, and the folder that it points to stays.
    """
    try:
        around = folder.parent.resolve()
        if folder.name in ("", "..") or not around.is_relative_to(within.resolve()):
            return f"{folder} was not removed: it is not in {within}"
        if folder.is_symlink():
            folder.unlink()
            return None
        remove_tree(folder)
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return f"{folder} could not be removed: {error}"
    return None


def remove_tree(folder: Path) -> None:
    """Remove a folder with everything in it, even in parts that are read-only. No link is followed, and all
    that can be removed is.

    Raises:
        OSError: the first error, after everything else was removed.
    """
    failed: list[BaseException] = []
    try:
        _unlock(folder)
        shutil.rmtree(folder, onerror=lambda _, __, raised: failed.append(raised[1]))
    except RecursionError:
        raise OSError(*_TOO_DEEP, str(folder)) from None
    if failed:
        raise failed[0]


def _unlock(folder: Path) -> None:
    """Make a folder and those below it writable, as far as their owner allows it."""
    if folder.is_dir() and not folder.is_symlink():
        with suppress(OSError):
            folder.chmod(0o700)
            for path in folder.iterdir():
                _unlock(path)


class FilePart(io.RawIOBase):
    """The bytes of a file from `begin` up to `end`, as a file."""

    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, end - begin, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = (0, self._at, self._size)[whence] + offset
        if at < 0:
            raise OSError(f"{-at} bytes before the first one")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        count = max(min(len(buffer), self._size - self._at), 0)
        read = self._file.readinto(memoryview(buffer)[:count])  # type: ignore[attr-defined]
        self._at += read
        return int(read)
