"""The states of a disk that a crash may leave, by what crashes and what the file system promises.

`killed`: the processes die and the kernel goes on. What they have done is there, in their order, and nothing
else is.

`journal` and `posix`: the machine dies, and of what was not synced any part may be there. Which parts,
depends on the file system. How operations fall apart is after Pillai et al., "All File Systems Are Not
Created Equal" (OSDI 2014), who found by experiment what file systems keep together and in order; that a
state is looked for after each operation, with what the file system may have left of it, is after Mohan et
al., "Mismatch Crash-Consistency Bugs with Bounded Black-Box Crash Testing" (OSDI 2018; CrashMonkey and ACE).

`journal` is a file system with one ordered journal of metadata, as ext4 with `data=ordered` and XFS are:
- Names that are made, renamed and removed, and files that are emptied, last in their order: there is a point
  up to which they are on the disk. `fsync` of anything forces out all that came before it.
- A rename is whole or not at all.
- What is appended to a file is written at any time later (delayed allocation), from its begin on, and the
  length never says more than is there. A file whose name is on the disk may so be empty or short.
- What is written over bytes that were on the disk may be there in any part.

`posix` is what the standard promises, and no more (fsync(2), and the weakest model of Pillai et al.):
- `fsync` of a file makes its bytes and its length last, and of a directory the names in it; of a file not
  its name, and of a directory not that of itself.
- All else is lost or kept piece by piece: each name that is made or removed, also the two of a rename, and
  each write, in no order. A length may last without the bytes, which are zeros then.

Writes are torn at sectors of 512 bytes, which a disk writes whole, and at pages of 4096.
What may be there is very much: the corners always are among what is enumerated (nothing of what was not
synced, all names without bytes, all bytes without names, each piece by itself lost, or kept), and of the rest
some are drawn.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import PurePosixPath

from dcpbench.plugins.crash.operations import Kind, Record, Step, Tree
from dcpbench.plugins.crash.ordering import orders
from dcpbench.plugins.crash.torn_files import Change, combined, distinct, torn_contents


class Crash(StrEnum):
    """What crashes, and on which file system."""

    killed = "killed"
    journal = "journal"
    posix = "posix"


@dataclass(frozen=True)
class DiskState:
    """What a crash has left.

    Args:
        tree: the files and directories.
        crash: what crashed.
        done: the steps that ranks had made by then.
        lost: what of that is not there, in words.
        told: whether a rank had been told that the save was complete.
    """

    tree: Tree
    crash: Crash
    done: tuple[tuple[int, Step], ...]
    lost: tuple[str, ...] = ()

    @cached_property
    def told(self) -> bool:
        return any(step.kind is Kind.success for _, step in self.done)

    @property
    def simplicity(self) -> tuple[int, int]:
        """Smaller is simpler: what is lost, then what was done."""
        return len(self.lost), len(self.done)


@dataclass(frozen=True)
class _Naming:
    """A path that begins or ceases (`file` is None) to name a file or directory. Those of one operation have
    the same number."""

    number: int
    path: str
    file: int | None

    @property
    def folder(self) -> str:
        return str(PurePosixPath(self.path).parent)

    def __str__(self) -> str:
        return f"the name {self.path}" if self.file is not None else f"the removal of the name {self.path}"


@dataclass
class _File:
    """What it held before the save, what the save has done to it, and how much of that is synced."""

    is_directory: bool
    held: bytes = b""
    changes: list[Change] = field(default_factory=list)
    synced: int = 0
    _whole: tuple[int, bytes] = (-1, b"")

    @property
    def whole(self) -> bytes:
        """With all changes."""
        if self._whole[0] != len(self.changes):
            self._whole = len(self.changes), self.content(self.changes)
        return self._whole[1]

    def content(self, changes: Iterable[Change]) -> bytes:
        held = self.held
        for change in changes:
            held = change.apply(held)
        return held

    @property
    def durable(self) -> bytes:
        return self.content(self.changes[: self.synced])


class Disk:
    """A disk to which operations are done."""

    def __init__(self, before: Tree) -> None:
        self._files = [_File(held is None, held or b"") for held in before.values()]
        self._before = {path: number for number, path in enumerate(before)}
        self._names = dict(self._before)
        self._opened: dict[str, int] = {}
        self._namings: list[_Naming] = []
        self._lasting: set[int] = set()
        """Of the namings, by index, those that are synced."""
        self._forced = 0
        """The number of operations that a journal has on the disk."""
        self._number = 0

    def do(self, step: Step) -> None:
        """The next operation."""
        self._number += 1
        match step.kind:
            case Kind.mkdir:
                self._name(step.path, self._new(is_directory=True))
            case Kind.open:
                if step.path not in self._names:
                    self._name(step.path, self._new(is_directory=False))
                self._opened[step.file] = self._names[step.path]
                if step.truncates and self._of(step.file).whole:
                    self._of(step.file).changes.append(Change(self._number, size=0))
            case Kind.write:
                self._of(step.file).changes.append(Change(self._number, step.offset, step.data))
            case Kind.truncate:
                self._of(step.file).changes.append(Change(self._number, size=step.size))
            case Kind.rename:
                moved = self._names[step.path]
                self._name(step.path, None)
                self._name(step.to, moved)
            case Kind.unlink | Kind.rmdir:
                self._name(step.path, None)
            case Kind.fsync:
                self._sync(step.path)
            case Kind.sync:
                self._forced = self._number
                self._lasting.update(range(len(self._namings)))
                for file in self._files:
                    file.synced = len(file.changes)

    def _of(self, opened: str) -> _File:
        return self._files[self._opened[opened]]

    def _new(self, is_directory: bool) -> int:
        self._files.append(_File(is_directory))
        return len(self._files) - 1

    def _name(self, path: str, file: int | None) -> None:
        self._namings.append(_Naming(self._number, path, file))
        if file is None:
            del self._names[path]
        else:
            self._names[path] = file

    def _sync(self, path: str) -> None:
        self._forced = self._number
        if path != "." and path not in self._names:
            return  # it has no name any more
        if path == "." or self._files[self._names[path]].is_directory:
            inside = (number for number, one in enumerate(self._namings) if one.folder == path)
            self._lasting.update(inside)
        else:
            file = self._files[self._names[path]]
            file.synced = len(file.changes)

    def everything(self) -> Tree:
        """All that was done."""
        return self._tree(range(len(self._namings)), {})

    def journal(self, drawn: random.Random, samples: int) -> Iterator[tuple[Tree, tuple[str, ...]]]:
        """What a power loss may leave on a journal-like file system, and what of it is lost."""
        pending = sorted({one.number for one in self._metadata if one.number > self._forced})
        ends = [self._number + 1, *reversed(pending)]
        for number, end in enumerate(ends):
            namings = [index for index, one in enumerate(self._namings) if one.number < end]
            lost = [str(one) for one in self._namings if one.number >= end]
            torn = {file: self._torn_in_journal(file, end) for file in self._unsynced}
            for contents, of_files in combined(torn, drawn, samples, thorough=number == 0):
                lost_here = (*lost, *(self._told(file, what) for file, what in of_files.items()))
                yield self._tree(namings, contents), lost_here

    def posix(self, drawn: random.Random, samples: int) -> Iterator[tuple[Tree, tuple[str, ...]]]:
        """What a power loss may leave where only the standard holds, and what of it is lost."""
        pending = [index for index in range(len(self._namings)) if index not in self._lasting]
        torn = {file: self._torn_in_posix(file) for file in self._unsynced}
        some = [{*drawn.sample(pending, drawn.randint(0, len(pending)))} for _ in range(samples)]
        corners = [
            {*pending},
            set[int](),
            *({*pending} - {one} for one in pending),
            *({one} for one in pending),
        ]
        for number, kept in enumerate([*corners, *some]):
            namings = sorted(self._lasting | kept)
            lost = [str(self._namings[index]) for index in pending if index not in kept]
            for contents, of_files in combined(torn, drawn, samples, thorough=number == 0):
                lost_here = (*lost, *(self._told(file, what) for file, what in of_files.items()))
                yield self._tree(namings, contents), lost_here

    @property
    def _metadata(self) -> Iterator[_Naming | Change]:
        yield from self._namings
        for file in self._files:
            yield from (one for one in file.changes if one.size is not None)

    @property
    def _unsynced(self) -> list[int]:
        return [number for number, file in enumerate(self._files) if file.synced < len(file.changes)]

    def _told(self, number: int, what: str) -> str:
        """What is lost of a file, by the last name that it had."""
        return f"{what} of {next(one for one in self._paths_of(number))}"

    def _paths_of(self, number: int) -> Iterator[str]:
        for one in reversed(self._namings):
            if one.file == number:
                yield one.path
        yield from (path for path, file in self._before.items() if file == number)

    def _torn_in_journal(self, number: int, end: int) -> list[tuple[str, bytes]]:
        """What a file may hold if the journal ends before the operation `end`. What was written to a file
        after it was emptied is not there as long as that is not."""
        file = self._files[number]
        emptied = [at for at, one in enumerate(file.changes) if one.size is not None and at >= file.synced]
        if lost := [at for at in emptied if file.changes[at].number >= end]:
            until = file.content(file.changes[: lost[0]])
            return distinct([("the truncation", until), ("all changes", file.durable)])
        begin = max(emptied, default=file.synced - 1) + 1
        return distinct(
            torn_contents(file.content(file.changes[:begin]), file.changes[begin:], in_order=True)
        )

    def _torn_in_posix(self, number: int) -> list[tuple[str, bytes]]:
        file = self._files[number]
        return distinct(torn_contents(file.durable, file.changes[file.synced :], in_order=False))

    def _tree(self, namings: Iterable[int], contents: dict[int, bytes]) -> Tree:
        """What can be reached by names: those of before the save, and these of it."""
        names: dict[str, int | None] = dict(self._before)
        for index in namings:
            names[self._namings[index].path] = self._namings[index].file
        tree: dict[str, bytes | None] = {}
        for path, number in sorted(names.items()):
            folder = str(PurePosixPath(path).parent)
            if number is None or (folder != "." and folder not in tree):
                continue
            file = self._files[number]
            content = contents.get(number, file.whole)
            tree[path] = None if file.is_directory else content
        return tree


def after(record: Record) -> Tree:
    """The files after the save, if the record has all that was done to them."""
    disk = Disk(record.before)
    for _, step in next(orders(record, 0, 0)):
        disk.do(step)
    return disk.everything()


def _goes_on(steps: Sequence[Step], made: int) -> bool:
    """Whether the last of so many steps is a write and the next one writes to the same file: what a power
    loss leaves in between it may leave after that as well."""
    if made == len(steps):
        return False
    last, following = steps[made - 1], steps[made]
    return last.kind is following.kind is Kind.write and last.file == following.file


def disk_states(record: Record, samples: int, seed: int) -> Iterator[DiskState]:
    """What a crash at any time during the save may leave, and after it.

    Args:
        samples: how many states, and how many orders of several ranks, are drawn in each place where there
            are too many.
        seed: of what is drawn.
    """
    seen: set[tuple[int, ...]] = set()
    drawn = random.Random(seed)
    for order in orders(record, samples, seed):
        disk, progress = Disk(record.before), [0] * len(record.ranks)
        for end in range(len(order) + 1):
            if end:
                rank, step = order[end - 1]
                progress[rank] += 1
                disk.do(step)
                if step.kind in (Kind.signal, Kind.wait):
                    continue  # the disk is as it was
            made = tuple(progress)
            if made in seen:
                continue
            seen.add(made)
            done = tuple(order[:end])
            yield DiskState(disk.everything(), Crash.killed, done)
            if end and _goes_on(record.ranks[rank], progress[rank]):
                continue
            for crash, left in ((Crash.journal, disk.journal), (Crash.posix, disk.posix)):
                for tree, lost in left(drawn, samples):
                    yield DiskState(tree, crash, done, lost)
