"""Kill processes inside a save, at a point that their file operations identify.

A process that reaches the point creates a mark, waits until all processes to be killed have arrived, and is
killed by SIGKILL, without flushing or closing files. Only one rank publishes the metadata, and kills the
others.
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

from dcpbench.formats.dcp_metadata import DATA_SUFFIX, METADATA
from dcpbench.formats.files import FileDigests
from dcpbench.plugins.crash.file_layer import FileLayer, layered
from dcpbench.plugins.crash.operations import Kind

_UNPUBLISHED = f"{METADATA}.tmp"
PUBLISHER = 0
"""The rank that publishes the metadata: DCP's coordinator."""
_MEET_S = 20.0
"""Seconds that a rank waits at the point for others to be killed; those missing by then are reported."""


class At(StrEnum):
    """The point of a save at which a process is killed."""

    before_data = "before_data"  # before it opens a data file
    in_data = "in_data"  # after half of its first write to a data file
    before_metadata = "before_metadata"  # its data is written, and not yet reported to other ranks
    in_publication = "in_publication"  # the metadata is written, and its file not yet renamed


@dataclass(frozen=True)
class Killing:
    """The processes to be killed, and the point at which they are.

    Args:
        folder: contains the checkpoint.
        marks: a folder outside of it, shared by all ranks.
        at: the point.
        ranks: those to be killed.
        uploader: whether only the uploading process of each is killed, not both.
    """

    folder: Path
    marks: Path
    at: At
    ranks: tuple[int, ...]
    uploader: bool = False

    @property
    def arrived(self) -> tuple[int, ...]:
        """The ranks that have reached the point."""
        return tuple(sorted(int(mark.stem) for mark in self.marks.glob("*.arrived")))

    @property
    def expected(self) -> tuple[int, ...]:
        """The ranks that have to reach it."""
        return (PUBLISHER,) if self.at is At.in_publication else self.ranks

    def processes_of(self, ranks: Iterable[int]) -> Iterator[int]:
        """Yield the ids of the processes of these ranks to be killed."""
        for rank in ranks:
            for mark in self.marks.glob(f"{rank}-{'child' if self.uploader else '*'}.pid"):
                yield int(mark.read_text())

    def watching(self, rank: int) -> AbstractContextManager[None]:
        """Return a context for the saves of this rank; a save that begins after `arm` can kill it."""
        return layered(_Killer(self, rank))

    def arm(self) -> None:
        """Kill ranks and the processes that they have spawned from now on."""
        (self.marks / "armed").touch()

    @property
    def armed(self) -> bool:
        """Whether ranks are killed from now on."""
        return (self.marks / "armed").exists()


class _Killer(FileLayer):
    """The file layer of one process of a rank."""

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
        # The first collective after its data reports the written data to other ranks.
        if kind is Kind.signal and self._has_data and self._killing.at is At.before_metadata:
            self._arrive()

    def _arrive(self) -> None:
        """Stop and kill this process at the point, if it is to be killed there."""
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
    """Return each contradiction between the files in the checkpoint's folder and ranks killed at a point.

    Args:
        usual: the files of a complete checkpoint of these ranks.
        before: the files when the save began.
        after: the files now.
    """
    wrong: list[str] = []
    for rank in killing.ranks if at is not At.in_publication else ():
        names = [name for name in usual if name.startswith(f"__{rank}_") and _bytes(usual[name])]
        changed = [name for name in names if after.get(name) != before.get(name)]
        short = [name for name in changed if _bytes(after.get(name, "0 ")) < _bytes(usual[name])]
        is_there = {
            At.before_data: not changed,
            At.in_data: bool(short),
            At.before_metadata: changed == names and not short,
        }
        if not is_there[at]:
            wrong.append(f"rank {rank} has changed {changed} of {names}; {short} are short")
    published = after.get(METADATA) not in (None, before.get(METADATA))
    expected = at is At.in_publication and PUBLISHER not in killing.ranks
    unpublished = at is At.in_publication and not expected
    if published != expected:
        wrong.append(f"new metadata is {'' if published else 'not '}published")
    if (_UNPUBLISHED in after) != unpublished or (unpublished and METADATA in after):
        wrong.append(f"files of metadata: {[name for name in after if name.startswith(METADATA)]}")
    return wrong


def _bytes(digest: str) -> int:
    """Return the length of a file, with which its digest begins."""
    return int(digest.split()[0])
