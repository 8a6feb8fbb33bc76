"""Folders removed so that a crash in the middle leaves none half there, and what that frees.

What goes is renamed into a folder for rubbish beside it first, whole, and emptied from there; what a
crash leaves in that folder goes with the next removal.
"""

import fcntl
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dcpbench.records.store import ResultsError

RUBBISH = ".thinned"
_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own is: see stat(2)."""


@dataclass
class DiskSpace:
    """Counts bytes as `du` does: blocks that are really taken up, holes are none. A file with several names
    is counted with the last of them, since its space is not free before that."""

    _names_seen: Counter[tuple[int, int]] = field(default_factory=Counter)

    def freed_by(self, folders: Iterable[Path]) -> int:
        """Bytes that are free once these folders are gone, and those of earlier calls; links are not
        followed.

        Raises:
            OSError: one of them cannot be looked into.
        """
        return sum(self._freed(item) for folder in folders for item in _everything_in(folder))

    def _freed(self, item: os.stat_result) -> int:
        name = (item.st_dev, item.st_ino)
        self._names_seen[name] += 1
        # A folder's other names are its own `.` and its children's `..`, which go with it.
        last = stat.S_ISDIR(item.st_mode) or self._names_seen[name] == item.st_nlink
        return item.st_blocks * _BLOCK_BYTES if last else 0


def discard(folders: Iterable[Path], within: Path) -> None:
    """Remove folders that lie right in `within`, and what an earlier removal there left.

    Raises:
        OSError: something cannot be removed.
    """
    rubbish = within / RUBBISH
    _empty(rubbish)
    rubbish.mkdir()
    for folder in folders:
        if folder.parent != within or folder.is_symlink():
            raise OSError(f"{folder}: does not lie right in {within}")
        folder.rename(rubbish / folder.name)
    _empty(rubbish)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Be the only process that removes things from a folder; leaves nothing there.

    Raises:
        ResultsError: it cannot be opened, or another process does.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be looked into: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ResultsError(f"{folder}: is being thinned by another process") from None
    finally:
        os.close(descriptor)


def _empty(rubbish: Path) -> None:
    if rubbish.is_symlink():
        raise OSError(f"{rubbish}: is a link, and is not followed")
    if rubbish.exists():
        shutil.rmtree(rubbish)


def _everything_in(folder: Path) -> Iterator[os.stat_result]:
    yield folder.lstat()
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                yield from _everything_in(Path(item.path))
            else:
                yield item.stat(follow_symlinks=False)
