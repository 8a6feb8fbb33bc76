"""Processes that are killed inside a save, at a point of it that the file operations tell.

Who gets to the point leaves a mark, waits until all that are to die have come, and is killed by SIGKILL, with
nothing flushed and nothing closed. The file of metadata is published by one rank, which kills the others.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from dcpbench.checkpointers.dcp_metadata import DATA_SUFFIX, METADATA
from dcpbench.plugins.crash.file_layer import FileLayer, layered
from dcpbench.plugins.crash.operations import Kind
from dcpbench.verify.files import FileDigests

_UNPUBLISHED = f"{METADATA}.tmp"
PUBLISHER = 0
"""The rank that publishes the metadata: DCP's coordinator."""
_MEET_S = 20.0
"""So long a rank waits at the point for the others that are to die; whoever has not come then is told."""


class At(StrEnum):
    """Where in a save a process is killed."""

    before_data = "before_data"  # before it has opened a file of data
    in_data = "in_data"  # half of what it first writes to a file of data is there
    before_metadata = "before_metadata"  # its data are written, and it has told nobody
    in_publication = "in_publication"  # the metadata are written, and not yet renamed to their name


@dataclass(frozen=True)
class Killing:
    """Which processes die, where.

    Args:
        folder: below which the checkpoint is saved.
        marks: a folder elsewhere, for all ranks.
        at: the point.
        ranks: those that die.
        uploader: of each of them only the process that uploads dies, else both.
    """

    folder: Path
    marks: Path
    at: At
    ranks: tuple[int, ...]
    uploader: bool = False

    @property
    def arrived(self) -> tuple[int, ...]:
        """The ranks that have come to the point."""
        return tuple(sorted(int(mark.stem) for mark in self.marks.glob("*.arrived")))

    @property
    def expected(self) -> tuple[int, ...]:
        """The ranks that have to come to it."""
        return (PUBLISHER,) if self.at is At.in_publication else self.ranks

    def processes_of(self, ranks: Iterable[int]) -> Iterator[int]:
        """The processes of these ranks that die."""
        for rank in ranks:
            for mark in self.marks.glob(f"{rank}-{'child' if self.uploader else '*'}.pid"):
                yield int(mark.read_text())

    def watching(self, rank: int) -> AbstractContextManager[None]:
        """A context in which this rank makes saves, of which it may not survive one that begins `arm`ed."""
        return layered(_Killer(self, rank))

    def arm(self) -> None:
        """From now on ranks die, and the processes that they have spawned."""
        (self.marks / "armed").touch()

    @property
    def armed(self) -> bool:
        """Whether ranks die from now on."""
        return (self.marks / "armed").exists()


class _Killer(FileLayer):
    """The layer of one process of a rank."""

    def __init__(self, killing: Killing, rank: int, role: str = "rank") -> None:
        super().__init__(killing.folder, role)
        self._killing, self._rank = killing, rank
        self._dies_here = rank in killing.expected
        self._has_data = self._is_torn = False
        (killing.marks / f"{rank}-{role}.pid").write_text(str(os.getpid()))

    def in_child(self) -> tuple[Callable[..., FileLayer], tuple[Any, ...]]:
        return _Killer, (self._killing, self._rank, "child")

    def begin(self, kind: Kind, path: str, size: int = 0) -> int:
        at, name = self._killing.at, PurePath(path).name
        if not self._killing.armed:
            return size
        if kind is Kind.open and name.endswith(DATA_SUFFIX) and at is At.before_data:
            self._arrive()
        if kind is Kind.write and name.endswith(DATA_SUFFIX) and at is At.in_data and self._dies_here:
            self._is_torn = True
            return size // 2
        if kind is Kind.open and name == _UNPUBLISHED and at is At.before_metadata:
            self._arrive()
        if kind is Kind.rename and name == _UNPUBLISHED and at is At.in_publication:
            self._arrive()
        return size

    def note(self, kind: Kind, **fields: Any) -> None:
        if self._is_torn:
            self._arrive()
        if kind is Kind.write and fields["path"].endswith(DATA_SUFFIX) and self._killing.armed:
            self._has_data = True
        # What comes after its data is the collective in which it tells what it has written.
        if kind is Kind.signal and self._has_data and self._killing.at is At.before_metadata:
            self._arrive()

    def _arrive(self) -> None:
        """This process has come to the point, and does not go beyond it, if it is to die there."""
        if not self._dies_here:
            return
        killing = self._killing
        (killing.marks / f"{self._rank}.arrived").touch()
        until = time.monotonic() + _MEET_S
        while not {*killing.expected} <= {*killing.arrived} and time.monotonic() < until:
            time.sleep(0.01)
        dying = {self._rank} if killing.at is not At.in_publication else {*killing.ranks}
        for process in {*killing.processes_of(dying)} - {os.getpid()}:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._rank in killing.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def misplaced(
    at: At, killing: Killing, usual: FileDigests, before: FileDigests, after: FileDigests
) -> list[str]:
    """What of the files in the checkpoint's folder does not tell that ranks were killed at a point.

    Args:
        usual: the files of a complete checkpoint of these ranks.
        before: the files that were there when the save began.
        after: those that are there now.
    """
    wrong: list[str] = []
    for rank in killing.ranks if at is not At.in_publication else ():
        names = [name for name in usual if name.startswith(f"__{rank}_") and _bytes(usual[name])]
        changed = [name for name in names if after.get(name) != before.get(name)]
        short = [name for name in changed if _bytes(after.get(name, "0 ")) < _bytes(usual[name])]
        held = {
            At.before_data: not changed,
            At.in_data: bool(short),
            At.before_metadata: changed == names and not short,
        }
        if not held[at]:
            wrong.append(f"rank {rank} has changed {changed} of {names}, of which {short} are short")
    published = after.get(METADATA) not in (None, before.get(METADATA))
    whole = at is At.in_publication and PUBLISHER not in killing.ranks
    left = at is At.in_publication and not whole
    if published != whole:
        wrong.append(f"new metadata are {'' if published else 'not '}published")
    if (_UNPUBLISHED in after) != left or (left and METADATA in after):
        wrong.append(f"of metadata there are {[name for name in after if name.startswith(METADATA)]}")
    return wrong


def _bytes(digest: str) -> int:
    """The length of a file that a digest of it begins with."""
    return int(digest.split()[0])
