"""Enumerate the disk states that a crash can leave, by what crashes and what the file system guarantees.

`killed`: the processes die and the kernel continues. Exactly their operations are on the disk.

`journal` and `posix`: the machine dies, and any part of the unsynced data can be on the disk. The file
system determines which parts. How operations are split follows Pillai et al., "All File Systems Are Not
Created Equal" (OSDI 2014), who found by experiment which operations file systems keep atomic and in order.
Enumerating states after each operation follows Mohan et al., "Finding Crash-Consistency Bugs with Bounded
Black-Box Crash Testing" (OSDI 2018; CrashMonkey and ACE).

`journal` is a file system with one ordered journal of metadata, like ext4 with `data=ordered` and XFS:
- Creating, renaming and removing names, and emptying files, keep their order: all before some point are on
  the disk, and none after it. `fsync` of any file forces out all earlier ones.
- A rename is atomic.
- Appended data is written at any later time (delayed allocation), from its start on, and the length never
  covers more than was written. So a file whose name is on the disk can be empty or short.
- Any part of data that overwrites bytes on the disk can be there.

`posix` is the guarantee of the standard alone (fsync(2), and the weakest model of Pillai et al.):
- `fsync` of a file makes its bytes and its length durable, but not its name. `fsync` of a directory makes the
  names in it durable, but not its own.
- All other changes are lost or kept one by one, in any order: each created or removed name, both names of a
  rename, and each write. A length can be durable without the bytes, which are then zeros.

Writes are torn at pages of 4096 bytes, and at sectors of 512 bytes, which a disk writes atomically. There are
too many states to enumerate all. The extreme ones are always included: nothing that was not synced, all names
without bytes, all bytes without names, each change lost or kept separately. The rest are random samples.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import PurePosixPath

from dcpbench.plugins.crash.operations import Kind, Record, Step, Tree
from dcpbench.plugins.crash.ordering import orders
from dcpbench.plugins.crash.torn_files import FileChange, applied, combined, distinct, torn_contents


class Crash(StrEnum):
    """The part that crashes, and the kind of file system."""

    killed = "killed"
    journal = "journal"
    posix = "posix"


@dataclass(frozen=True)
class DiskState:
    """A disk state after a crash.

    Args:
        tree: the files and directories.
        crash: what crashed.
        done: the steps that ranks had made before.
        lost: descriptions of the lost changes.
    """

    tree: Tree
    crash: Crash
    done: tuple[tuple[int, Step], ...]
    lost: tuple[str, ...] = ()

    @cached_property
    def after_success(self) -> bool:
        """Whether the save had reported success to a rank."""
        return any(step.kind is Kind.success for _, step in self.done)

    @property
    def simplicity(self) -> tuple[int, int]:
        """A sort key: the number of losses, then the number of steps."""
        return len(self.lost), len(self.done)


@dataclass(frozen=True)
class _Naming:
    """A path that starts to name a file or directory, or stops if `file` is None. Both changes of one
    operation have the same number."""

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
    """The content of a file before the save, its changes by the save, and how many of them are synced."""

    is_directory: bool
    before: bytes = b""
    changes: list[FileChange] = field(default_factory=list)
    synced: int = 0
    _latest: tuple[int, bytes] = (-1, b"")

    @property
    def latest(self) -> bytes:
        """The content with all changes."""
        if self._latest[0] != len(self.changes):
            self._latest = len(self.changes), applied(self.before, self.changes)
        return self._latest[1]

    @property
    def durable(self) -> bytes:
        return applied(self.before, self.changes[: self.synced])


_Case = tuple[Sequence[int], list[str], dict[int, list[tuple[str, bytes]]]]


class SimulatedDisk:
    """A disk that executes operations and knows which of their effects are durable."""

    def __init__(self, before: Tree) -> None:
        self._files = [_File(content is None, content or b"") for content in before.values()]
        self._before = {path: number for number, path in enumerate(before)}
        self._names = dict(self._before)
        self._opened: dict[str, int] = {}
        self._namings: list[_Naming] = []
        self._lasting: set[int] = set()
        """Indexes of the namings that are synced."""
        self._forced = 0
        """The number of operations that are in a journal on the disk."""
        self._number = 0

    def do(self, step: Step) -> None:
        """Execute the next operation."""
        self._number += 1
        match step.kind:
            case Kind.mkdir:
                self._name(step.path, self._new(is_directory=True))
            case Kind.open:
                if step.path not in self._names:
                    self._name(step.path, self._new(is_directory=False))
                self._opened[step.file] = self._names[step.path]
                if step.truncates and self._of(step.file).latest:
                    self._of(step.file).changes.append(FileChange(self._number, size=0))
            case Kind.write:
                self._of(step.file).changes.append(FileChange(self._number, step.offset, step.data))
            case Kind.truncate:
                self._of(step.file).changes.append(FileChange(self._number, size=step.size))
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
            return  # it no longer has a name
        if path == "." or self._files[self._names[path]].is_directory:
            inside = (number for number, naming in enumerate(self._namings) if naming.folder == path)
            self._lasting.update(inside)
        else:
            file = self._files[self._names[path]]
            file.synced = len(file.changes)

    def everything(self) -> Tree:
        """Return the files after all operations."""
        return self._tree(range(len(self._namings)), {})

    def left(
        self, crash: Crash, drawn: random.Random, samples: int
    ) -> Iterator[tuple[Tree, tuple[str, ...]]]:
        """Yield what a power loss can leave on a file system, and descriptions of what is lost."""
        cases = self._journal() if crash is Crash.journal else self._posix(drawn, samples)
        for number, (namings, lost, torn) in enumerate(cases):
            for contents, of_files in combined(torn, drawn, samples, thorough=number == 0):
                of_names = (
                    f"{torn_part} of {next(self._paths_of(file))}" for file, torn_part in of_files.items()
                )
                yield self._tree(namings, contents), (*lost, *of_names)

    def _journal(self) -> Iterator[_Case]:
        """Yield the namings that a journal can keep, those it loses, and the contents of unsynced files."""
        pending = sorted({change.number for change in self._metadata if change.number > self._forced})
        for end in (self._number + 1, *reversed(pending)):
            namings = [index for index, naming in enumerate(self._namings) if naming.number < end]
            lost = [str(naming) for naming in self._namings if naming.number >= end]
            yield namings, lost, {file: self._torn_in_journal(file, end) for file in self._unsynced}

    def _posix(self, drawn: random.Random, samples: int) -> Iterator[_Case]:
        """Yield the same if only POSIX is guaranteed."""
        pending = [index for index in range(len(self._namings)) if index not in self._lasting]
        torn = {file: self._torn_in_posix(file) for file in self._unsynced}
        some = [{*drawn.sample(pending, drawn.randint(0, len(pending)))} for _ in range(samples)]
        corners = [
            {*pending},
            set[int](),
            *({*pending} - {naming} for naming in pending),
            *({naming} for naming in pending),
        ]
        for kept in (*corners, *some):
            lost = [str(self._namings[index]) for index in pending if index not in kept]
            yield sorted(self._lasting | kept), lost, torn

    @property
    def _metadata(self) -> Iterator[_Naming | FileChange]:
        yield from self._namings
        for file in self._files:
            yield from (change for change in file.changes if change.size is not None)

    @property
    def _unsynced(self) -> list[int]:
        return [number for number, file in enumerate(self._files) if file.synced < len(file.changes)]

    def _paths_of(self, number: int) -> Iterator[str]:
        """Yield the names of a file, the last one first."""
        for naming in reversed(self._namings):
            if naming.file == number:
                yield naming.path
        yield from (path for path, file in self._before.items() if file == number)

    def _torn_in_journal(self, number: int, end: int) -> list[tuple[str, bytes]]:
        """Return possible contents of a file if the journal ends before the operation `end`. If emptying a
        file is lost, so are all later writes to it."""
        file = self._files[number]
        emptied = [
            at for at, change in enumerate(file.changes) if change.size is not None and at >= file.synced
        ]
        if lost := [at for at in emptied if file.changes[at].number >= end]:
            until = applied(file.before, file.changes[: lost[0]])
            return distinct([("the truncation", until), ("all changes", file.durable)])
        begin = max(emptied, default=file.synced - 1) + 1
        base = applied(file.before, file.changes[:begin])
        return distinct(torn_contents(base, file.changes[begin:], in_order=True))

    def _torn_in_posix(self, number: int) -> list[tuple[str, bytes]]:
        file = self._files[number]
        return distinct(torn_contents(file.durable, file.changes[file.synced :], in_order=False))

    def _tree(self, namings: Iterable[int], contents: dict[int, bytes]) -> Tree:
        """Return the files that can be reached by the names before the save and these namings."""
        names: dict[str, int | None] = dict(self._before)
        for index in namings:
            names[self._namings[index].path] = self._namings[index].file
        tree: dict[str, bytes | None] = {}
        for path, number in sorted(names.items()):
            folder = str(PurePosixPath(path).parent)
            if number is None or (folder != "." and folder not in tree):
                continue
            file = self._files[number]
            content = contents.get(number, file.latest)
            tree[path] = None if file.is_directory else content
        return tree


def after(record: Record) -> Tree:
    """Return the files after the save, according to the record."""
    disk = SimulatedDisk(record.before)
    for _, step in next(orders(record, 0, 0)):
        disk.do(step)
    return disk.everything()


def _continues_write(steps: Sequence[Step], made: int) -> bool:
    """Return whether the last of `made` steps is a write and the next one writes to the same file: a power
    loss after the next one can leave the same states."""
    if made == len(steps):
        return False
    last, following = steps[made - 1], steps[made]
    return last.kind is following.kind is Kind.write and last.file == following.file


def disk_states(record: Record, samples: int, seed: int) -> Iterator[DiskState]:
    """Yield the states that a crash can leave at any time during the save, and after it.

    Args:
        samples: number of random states, and of random orders of several ranks, wherever there are too many.
        seed: of the random choices.
    """
    seen: set[tuple[int, ...]] = set()
    drawn = random.Random(seed)
    for order in orders(record, samples, seed):
        disk, progress = SimulatedDisk(record.before), [0] * len(record.ranks)
        for end in range(len(order) + 1):
            if end:
                rank, step = order[end - 1]
                progress[rank] += 1
                disk.do(step)
                if step.kind in (Kind.signal, Kind.wait):
                    continue  # it does not change the disk
            made = tuple(progress)
            if made in seen:
                continue
            seen.add(made)
            done = tuple(order[:end])
            yield DiskState(disk.everything(), Crash.killed, done)
            if end and _continues_write(record.ranks[rank], progress[rank]):
                continue
            for crash in (Crash.journal, Crash.posix):
                for tree, lost in disk.left(crash, drawn, samples):
                    yield DiskState(tree, crash, done, lost)
