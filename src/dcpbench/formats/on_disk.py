"""Classifies folders on a disk: complete, damaged or torn checkpoints of DCP or of safetensors, or none, and
finds the newest. Nothing is loaded."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.sentences import mismatch_sentence
from dcpbench.formats.audit import Entry, Manifest, audit
from dcpbench.formats.data_records import damaged_records
from dcpbench.formats.dcp_metadata import (
    METADATA,
    MetadataError,
    foreign_manifest,
    merged_manifest,
    metadata_in,
    unfinished_rank,
)
from dcpbench.formats.safetensors_headers import SUFFIX, names_in, safetensors_manifest
from dcpbench.records.files import file_lengths, walk
from dcpbench.records.store import ENVIRONMENT_JSON, SWEEP_JSON

_UNFINISHED = re.compile(r".*\.distcp|(__\d+)?\.metadata\.tmp")
"""Files that an interrupted save leaves."""


class FolderState(StrEnum):
    """The class of a folder."""

    complete = "complete"
    damaged = "damaged"
    torn = "torn"  # its save did not finish, on all ranks or on one
    none = "none"  # not a checkpoint


@dataclass
class Audited:
    """The state of a folder, and the reason. A checkpoint with further files (`beside`) is complete."""

    folder: Path
    state: FolderState
    because: str = ""
    entries: dict[str, Entry] = field(default_factory=dict, repr=False)
    findings: list[Mismatch] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict, repr=False)
    beside: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Size of its files in bytes."""
        return sum(self.files.values()) - sum(self.beside.values())

    @property
    def why(self) -> str:
        """The reason why it is not complete, on one line."""
        if self.because:
            return self.because
        more = f" (and {len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
        return f"{mismatch_sentence(self.findings[0])}{more}" if self.findings else ""


def audited(folder: Path, data: bool = False, required: Sequence[str] = ()) -> Audited:
    """Classify a folder by its metadata, optionally also by the checksums of its `data`, and by whether it
    has the `required` files."""
    if folder.is_file():
        because = "a file; audit reads checkpoint folders that DCP or safetensors wrote"
        if _written_by_save([folder.name]):
            because = "a file of a checkpoint; audit the folder that contains it"
        return Audited(folder, FolderState.none, because)
    try:
        files = file_lengths(folder, strict=True)
    except FileNotFoundError:
        return Audited(folder, FolderState.none, "no such folder")
    except OSError as error:
        return Audited(folder, FolderState.none, f"cannot be listed: {error.strerror}")
    metadata_files = [METADATA] if os.path.lexists(folder / METADATA) else [*metadata_in(files)]
    if not metadata_files and any(name.endswith(f"/{SWEEP_JSON}") for name in files):
        return Audited(folder, FolderState.none, "only sweeps of dcpbench; name one to audit it")
    if not metadata_files and any(map(_UNFINISHED.fullmatch, files)):
        because = f"no {METADATA}, which is written last: its save did not finish"
        return Audited(folder, FolderState.torn, because, files=files)
    if metadata_files and METADATA not in metadata_files and (unfinished := unfinished_rank(files)):
        return Audited(folder, FolderState.torn, unfinished, files=files)
    if not metadata_files and not names_in(files):
        because = "no DCP or safetensors checkpoint here or in a folder below"
        return Audited(folder, FolderState.none, because)
    name = SUFFIX
    try:
        if metadata_files:
            manifest = merged_manifest(
                [foreign_manifest(folder, files, name := metadata_file) for metadata_file in metadata_files],
                files,
            )
        else:
            manifest = safetensors_manifest(folder, files)
    except OSError as error:
        place = Path(error.filename or name).name
        because = f"{place}: cannot be read: {error.strerror}"
        return Audited(folder, FolderState.damaged, because, files=files)
    except MetadataError as error:
        because = f"{name}: not written by DCP: {error}" if metadata_files else str(error)
        return Audited(folder, FolderState.damaged, because, files=files)
    findings = [
        mismatch for mismatch in audit(manifest, manifest.entries) if mismatch.problem is not Problem.stray
    ]
    for path in manifest.named:
        if path in files and not os.access(folder / path, os.R_OK, effective_ids=True):
            findings.append(Mismatch(path, Problem.files, facts={"error": "no permission to read it"}))
    for name in required:
        if name not in files:
            findings.append(Mismatch(name, Problem.files, facts={"error": "no such file"}))
    if data and metadata_files:
        findings += _damaged_data(folder, manifest)
    state = FolderState.damaged if findings else FolderState.complete
    if (
        findings
        and metadata_files
        and METADATA not in metadata_files
        and {mismatch.problem for mismatch in findings} == {Problem.uncovered}
    ):
        state = FolderState.torn  # the ranks with the highest numbers wrote nothing
    named = {*metadata_files, *manifest.named, *manifest.own}
    beside = {path: size for path, size in files.items() if path not in named}
    return Audited(folder, state, "", {**manifest.entries}, findings, files, beside)


def _damaged_data(folder: Path, manifest: Manifest) -> list[Mismatch]:
    try:
        return [*damaged_records(folder, manifest)]
    except OSError as error:
        name = Path(error.filename or "").name
        return [Mismatch(name, Problem.files, facts={"error": f"it cannot be read: {error.strerror}"})]


def newest_first(folders: Iterable[Path], look: Callable[[Path], Audited] = audited) -> Iterator[Audited]:
    """Classify the checkpoints below these folders, the newest first: by the numbers in their paths if the
    paths differ in nothing else, otherwise by the time at which they were written."""
    places = dict(place for folder in folders for place in _checkpoints_below(folder))
    numbered = len({re.sub(r"\d+", "0", str(place)) for place in places}) == 1
    order = _numbers if numbered else places.__getitem__
    return map(look, sorted(places, key=order, reverse=True))


def _numbers(place: Path) -> list[int]:
    """Return the numbers in a path, such as step-900 or epoch=1-step=20.ckpt: times change in a copy."""
    return [int(number) for number in re.findall(r"\d+", str(place))]


def _checkpoints_below(folder: Path) -> Iterator[tuple[Path, float]]:
    """Yield the folders that are checkpoints, or were left by an interrupted save, and the times at which
    they were written. Folders in a checkpoint are part of it, and sweeps below the folder are left out."""
    for place, below, names in walk(folder):
        if place != folder and {SWEEP_JSON, ENVIRONMENT_JSON} <= {*names}:
            below.clear()
        elif written := _written_by_save(names):
            below.clear()
            yield place, max((place / name).lstat().st_mtime for name in written)


def _written_by_save(names: Iterable[str]) -> list[str]:
    """Return the names of metadata; if there are none, those of files that DCP or safetensors write."""
    names = [*names]
    return [*metadata_in(names)] or [
        name for name in names if _UNFINISHED.fullmatch(name) or name.endswith(SUFFIX)
    ]
