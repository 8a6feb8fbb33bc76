"""File operations of ranks as values, the steps that order them, and the trees of files that they change."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dcpbench.records.files import everything_below

Tree = Mapping[str, bytes | None]
"""The bytes of each file, by path below a folder; None for a directory."""


class Kind(StrEnum):
    """The kind of a step: a file operation, or one of the last three, which order operations of ranks."""

    mkdir = "mkdir"
    open = "open"  # for writing; creates the file if it does not exist
    write = "write"
    truncate = "truncate"
    fsync = "fsync"  # of a file or of a directory
    sync = "sync"  # of everything
    rename = "rename"  # replaces an existing file
    unlink = "unlink"
    rmdir = "rmdir"
    read = "read"  # never recorded
    signal = "signal"
    wait = "wait"  # for signals of other ranks
    success = "success"  # the save has reported to this rank that it is complete


@dataclass(frozen=True)
class Step:
    """One step of a rank; paths are relative to the recorded folder.

    Args:
        kind: of the operation.
        at_ns: time when it was done (`time.monotonic_ns`, which all processes of a host share).
        path: of the file or directory.
        to: new path of a rename.
        file: identifies the file that is opened, written to or truncated, even if it was renamed. It can be
            reused for another file when that is opened.
        offset: of a write, in bytes.
        data: of a write.
        size: of a truncation, in bytes.
        truncates: whether an open empties the file.
        tokens: of a signal, its name; of a wait, the signals that it waits for.
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
        return self.kind not in (Kind.signal, Kind.wait, Kind.success)


@dataclass(frozen=True)
class Record:
    """The steps of a save by rank, in the order in which each rank made them, and the files before."""

    before: Tree
    ranks: tuple[tuple[Step, ...], ...]


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """Return the files and directories below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in everything_below(folder)
    }
