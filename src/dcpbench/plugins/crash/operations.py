"""What ranks do to files, as values: the operations of a save, what orders them, and the trees of files that
they change. A log is a file of JSON lines, one for each step of a process."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from dcpbench.records.files import everything_below

Tree = Mapping[str, bytes | None]
"""The bytes of each file by its path below a folder; None for a directory."""


class Kind(StrEnum):
    """What a step is: a file operation, or one of the last three, which order operations of ranks."""

    mkdir = "mkdir"
    open = "open"  # for writing; the file is created if there is none
    write = "write"
    truncate = "truncate"
    fsync = "fsync"  # of a file or of a directory
    sync = "sync"  # of everything
    rename = "rename"  # replaces what is there
    unlink = "unlink"
    rmdir = "rmdir"
    read = "read"  # no record has it
    signal = "signal"
    wait = "wait"  # for signals of other ranks
    success = "success"  # the save has told this rank that it is complete


ORDERING = frozenset({Kind.signal, Kind.wait, Kind.success})


@dataclass(frozen=True)
class Step:
    """One step of a rank; paths are relative to the recorded folder.

    Args:
        kind: what it does.
        at_ns: when it had been done (`time.monotonic_ns`, which all processes of a host share).
        path: of the file or directory.
        to: the new path, of a rename.
        file: which file it opens, writes to, or truncates, whatever its name is by then; a number may be used
            again for another file once that is opened.
        offset: in bytes, of a write.
        data: what is written.
        size: in bytes, of a truncate.
        truncates: whether an opening empties the file.
        tokens: of a signal its own, of a wait those that it waits for.
    """

    kind: Kind
    at_ns: int = 0
    path: str = ""
    to: str = ""
    file: str = ""
    offset: int = 0
    data: bytes = b""
    size: int = 0
    truncates: bool = False
    tokens: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind is Kind.write:
            return f"write {len(self.data)} bytes at {self.offset} of {self.path}"
        if self.kind is Kind.rename:
            return f"rename {self.path} to {self.to}"
        if self.kind is Kind.truncate:
            return f"truncate {self.path} to {self.size} bytes"
        emptied = ", emptied" if self.truncates else ""
        return f"{self.kind} {self.path}{emptied}".rstrip()

    @property
    def changes(self) -> bool:
        """Whether it is a file operation."""
        return self.kind not in ORDERING


@dataclass(frozen=True)
class Record:
    """The steps of a save by rank, each rank's in the order in which it made them, and the files before."""

    before: Tree
    ranks: tuple[tuple[Step, ...], ...]


def to_line(step: Step) -> str:
    """A line of a log."""
    fields = {**asdict(step), "data": step.data.decode("latin-1")}
    return json.dumps(fields)


def read_logs(logs: Iterable[Path]) -> tuple[Step, ...]:
    """The steps of the processes of one rank, in the order of time."""
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return tuple(sorted(map(_of_line, lines), key=lambda step: step.at_ns))


def _of_line(line: str) -> Step:
    fields = json.loads(line)
    fields |= {
        "kind": Kind(fields["kind"]),
        "data": fields["data"].encode("latin-1"),
        "tokens": tuple(fields["tokens"]),
    }
    return Step(**fields)


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """The files and directories below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in everything_below(folder)
    }
