"""What folders on a disk are: whole checkpoints of DCP or of safetensors, damaged ones, what a broken save
has left, or none; and which of them is the newest. Nothing is loaded for it."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from dcpbench.checkpointers.data_records import damaged_records
from dcpbench.checkpointers.dcp_metadata import (
    METADATA,
    MetadataError,
    foreign_manifest,
    joined,
    metadata_in,
    unfinished_rank,
)
from dcpbench.checkpointers.safetensors_headers import SUFFIX, names_in, safetensors_manifest
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.sentences import mismatch_sentence
from dcpbench.records.files import files_below, walk
from dcpbench.verify.audit import Entry, Manifest, audit

_UNFINISHED = re.compile(r".*\.distcp|(__\d+)?\.metadata\.tmp")
"""What a save that was broken off leaves."""


class FolderState(StrEnum):
    """What a folder is."""

    whole = "whole"
    damaged = "damaged"
    torn = "torn"  # its save did not end, on all ranks or on one
    none = "none"  # no checkpoint


@dataclass
class Audited:
    """What a folder is, and why. `beside` are files that no entry names; a checkpoint is whole with them."""

    folder: Path
    state: FolderState
    because: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    findings: list[Mismatch] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(self.files.values()) - sum(self.beside.values())

    @property
    def why(self) -> str:
        """Why it is not whole, in one line."""
        if self.because:
            return self.because
        more = f" (and {len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        return f"{mismatch_sentence(self.findings[0])}{more}" if self.findings else ""


def audited(folder: Path, data: bool = False, required: Sequence[str] = ()) -> Audited:
    """What a folder is: by its metadata, by its `data` where that is asked for, and whether it has these
    `required` files too."""
    try:
        files = lengths(folder)
    except OSError as error:
        return Audited(folder, FolderState.none, f"cannot be looked into: {error.strerror}")
    own = [METADATA] if os.path.lexists(folder / METADATA) else [*metadata_in(files)]
    if not own and any(map(_UNFINISHED.fullmatch, files)):
        because = f"no {METADATA}, which is written last: its save did not end"
        return Audited(folder, FolderState.torn, because, files=files)
    if own and METADATA not in own and (unfinished := unfinished_rank(files)):
        return Audited(folder, FolderState.torn, unfinished, files=files)
    if not own and not names_in(files):
        because = f"holds no checkpoint of torch.distributed.checkpoint (no {METADATA}), nor safetensors"
        return Audited(folder, FolderState.none, because)
    name = SUFFIX
    try:
        if own:
            manifest = joined([foreign_manifest(folder, files, name := each) for each in own], files)
        else:
            manifest = safetensors_manifest(folder, files)
    except OSError as error:
        place = Path(error.filename or name).name
        because = f"{place}: cannot be read: {error.strerror}"
        return Audited(folder, FolderState.damaged, because, files=files)
    except MetadataError as error:
        because = f"{name}: is not what DCP writes: {error}" if own else str(error)
        return Audited(folder, FolderState.damaged, because, files=files)
    told = [one for one in audit(manifest, manifest.entries) if one.problem is not Problem.stray]
    closed = (path for path in manifest.named if path in files and not _may_be_read(folder / path))
    told += [Mismatch(path, Problem.files, facts={"error": "it may not be read"}) for path in closed]
    missing = (name for name in required if name not in files)
    told += [Mismatch(name, Problem.files, facts={"error": "no such file beside it"}) for name in missing]
    if data and own:
        told += _damaged_data(folder, manifest)
    state = FolderState.damaged if told else FolderState.whole
    if told and own and METADATA not in own and {one.problem for one in told} == {Problem.uncovered}:
        state = FolderState.torn  # nothing is left of the ranks above those that are there
    named = {*own, *manifest.named, *manifest.own}
    beside = {path: size for path, size in files.items() if path not in named}
    return Audited(folder, state, "", {**manifest.entries}, told, files, beside)


def _may_be_read(path: Path) -> bool:
    return os.access(path, os.R_OK, effective_ids=True)


def _damaged_data(folder: Path, manifest: Manifest) -> list[Mismatch]:
    try:
        return [*damaged_records(folder, manifest)]
    except OSError as error:
        name = Path(error.filename or "").name
        return [Mismatch(name, Problem.files, facts={"error": f"it cannot be read: {error.strerror}"})]


def lengths(folder: Path) -> dict[str, int]:
    """The bytes of each regular file below a folder by its relative path; links to files are followed, those
    to folders are not.

    Raises:
        OSError: the folder is none, or cannot be looked into.
    """
    found = files_below(folder, strict=True)
    return {str(path.relative_to(folder)): stat.st_size for path, stat in found.items()}


def newest_first(folders: Iterable[Path], look: Callable[[Path], Audited] = audited) -> Iterator[Audited]:
    """What the checkpoints below these folders are, the newest first: by the numbers in their paths where
    these are all that differs, else by when they were written."""
    places = dict(place for folder in folders for place in _checkpoints_below(folder))
    numbered = len({re.sub(r"\d+", "0", str(place)) for place in places}) == 1
    order = _numbers if numbered else places.__getitem__
    return map(look, sorted(places, key=order, reverse=True))


def _numbers(place: Path) -> list[int]:
    """What tells step-900 and step-1000 apart, or epoch=1-step=20.ckpt: a copy has other times."""
    return [int(number) for number in re.findall(r"\d+", str(place))]


def _checkpoints_below(folder: Path) -> Iterator[tuple[Path, float]]:
    """The folders below one that are checkpoints, or what a broken save leaves, and when they were written;
    what lies within a checkpoint is part of it."""
    for place, below, names in walk(folder):
        written = [*metadata_in(names)]
        written = written or [name for name in names if _UNFINISHED.fullmatch(name) or name.endswith(SUFFIX)]
        if written:
            below.clear()
            yield place, max((place / name).lstat().st_mtime for name in written)
