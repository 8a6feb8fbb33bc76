"""`dcpbench audit CHECKPOINT...`: whether a checkpoint of DCP, or of safetensors, is whole."""

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dcpbench.checkpointers.data_records import damaged_records
from dcpbench.checkpointers.dcp_metadata import (
    METADATA,
    MetadataError,
    foreign_manifest,
    joined,
    metadata_in,
)
from dcpbench.checkpointers.safetensors_headers import SUFFIX, names_in, safetensors_manifest
from dcpbench.config.text import counted
from dcpbench.records.findings import Finding, Problem
from dcpbench.records.sentences import finding_sentence
from dcpbench.records.store import ResultsError
from dcpbench.report.styles import complain, print_table, standard_output, style_of, text_of
from dcpbench.verify.audit import Entry, Manifest, audit

_UNFINISHED = re.compile(r".*\.distcp|(__\d+)?\.metadata\.tmp")
"""What a save that was broken off leaves."""
_MOST_SHOWN = 20
_STATUS = {"whole": 0, "damaged": 1, "torn": 1, "none": 2}


@dataclass
class Audited:
    """What a folder is: `whole`, `damaged`, `torn` (its save never ended) or `none` (no checkpoint), and why.
    `beside` are files that no entry names; a checkpoint is whole with them."""

    folder: Path
    state: str
    because: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(self.files.values()) - sum(self.beside.values())


def main(
    checkpoints: Sequence[Path],
    newest: bool = False,
    data: bool = False,
    beside: Sequence[str] = (),
    all: bool = False,
    as_json: bool = False,
) -> int:
    """Look at checkpoints: 0 if all are whole, 1 if one is not, 2 if one is none. With `newest`, print the
    newest whole one below these folders instead: 1 if none is whole, 2 if there is none. `data` reads those
    too; files `beside` have to be there as well."""
    look = partial(audited, data=data, beside=beside)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may be anything
    if newest:
        return _print_newest(checkpoints, look)
    seen = [look(folder) for folder in checkpoints]
    with standard_output():
        if as_json:
            print(json.dumps([_plain(one) for one in seen], indent=1))
        else:
            for one in seen:
                _show(one, all)
                if all or len(seen) == 1:  # of several the question is which are whole
                    _show_keys(one, all)
    return max(_STATUS[one.state] for one in seen)


def audited(folder: Path, data: bool = False, beside: Sequence[str] = ()) -> Audited:
    """What a folder is: by its metadata, by its `data` where that is asked for, and whether there are those
    files `beside` it."""
    try:
        files = lengths(folder)
    except OSError as error:
        return Audited(folder, "none", f"cannot be looked into: {error.strerror}")
    own = [METADATA] if os.path.lexists(folder / METADATA) else [*metadata_in(files)]
    if not own and any(map(_UNFINISHED.fullmatch, files)):
        because = f"no {METADATA}, which is written last: its save did not end"
        return Audited(folder, "torn", because, files=files)
    if not own and not names_in(files):
        because = f"holds no checkpoint of torch.distributed.checkpoint (no {METADATA}), nor safetensors"
        return Audited(folder, "none", because)
    name = SUFFIX
    try:
        if own:
            manifest = joined([foreign_manifest(folder, files, name := each) for each in own], files)
        else:
            manifest = safetensors_manifest(folder, files)
    except OSError as error:
        place = Path(error.filename or name).name
        return Audited(folder, "damaged", f"{place}: cannot be read: {error.strerror}", files=files)
    except MetadataError as error:
        because = f"{name}: is not what DCP writes: {error}" if own else str(error)
        return Audited(folder, "damaged", because, files=files)
    told = [one for one in audit(manifest, manifest.entries) if one.problem is not Problem.stray]
    closed = (path for path in manifest.named if path in files and not _may_be_read(folder / path))
    told += [Finding(path, Problem.files, facts={"error": "it may not be read"}) for path in closed]
    missing = (name for name in beside if name not in files)
    told += [Finding(name, Problem.files, facts={"error": "no such file beside it"}) for name in missing]
    if data and own:
        told += _damaged_data(folder, manifest)
    found = Audited(folder, "whole", "", {**manifest.entries}, told, files)
    found.beside = {
        path: size for path, size in files.items() if path not in {*own, *manifest.named, *manifest.own}
    }
    found.state = "damaged" if found.findings else "whole"
    return found


def _may_be_read(path: Path) -> bool:
    return os.access(path, os.R_OK, effective_ids=True)


def _damaged_data(folder: Path, manifest: Manifest) -> list[Finding]:
    try:
        return [*damaged_records(folder, manifest)]
    except OSError as error:
        name = Path(error.filename or "").name
        return [Finding(name, Problem.files, facts={"error": f"it cannot be read: {error.strerror}"})]


def lengths(folder: Path) -> dict[str, int]:
    """The bytes of each regular file below a folder by its relative path; links to files are followed, those
    to folders are not.

    Raises:
        OSError: the folder is none, or cannot be looked into.
    """
    found: dict[str, int] = {}
    for item in sorted(folder.iterdir()):
        if item.is_dir() and not item.is_symlink():
            found |= {f"{item.name}/{name}": size for name, size in lengths(item).items()}
        elif item.is_file():
            found[item.name] = item.stat().st_size
    return found


def _print_newest(folders: Iterable[Path], look: Callable[[Path], Audited]) -> int:
    places = dict(place for folder in folders for place in _checkpoints_below(folder))
    if not places:
        raise ResultsError(f"{', '.join(map(str, folders))}: no checkpoint here, nor in a folder below")
    numbered = len({re.sub(r"\d+", "0", str(place)) for place in places}) == 1
    order = _numbers if numbered else places.__getitem__
    for place in sorted(places, key=order, reverse=True):
        one = look(place)
        if one.state == "whole":
            with standard_output():
                print(place)
            return 0
        complain(f"{place}: {one.state}: {_why(one)}")
    return 1


def _numbers(place: Path) -> list[int]:
    """What tells step-900 and step-1000 apart, or epoch=1-step=20.ckpt: a copy has other times."""
    return [int(number) for number in re.findall(r"\d+", str(place))]


def _checkpoints_below(folder: Path) -> Iterator[tuple[Path, float]]:
    """The folders below one that are checkpoints, or what a broken save leaves, and when they were written;
    what lies within a checkpoint is part of it."""
    for place, below, names in os.walk(folder):
        written = [*metadata_in(names)]
        written = written or [name for name in names if _UNFINISHED.fullmatch(name) or name.endswith(SUFFIX)]
        if written:
            below.clear()
            yield Path(place), max((Path(place) / name).lstat().st_mtime for name in written)


def _why(one: Audited) -> str:
    if one.because:
        return one.because
    more = f" (and {len(one.findings) - 1} more)" if len(one.findings) > 1 else ""
    return f"{finding_sentence(one.findings[0])}{more}" if one.findings else ""


def _show(one: Audited, all_keys: bool) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty())
    style = style_of("pass" if one.state == "whole" else "fail")
    told = {"none": "no checkpoint"}.get(one.state, one.state)
    console.print(text_of(f"{one.folder}: {told}{f': {one.because}' if one.because else ''}", style))
    if one.entries:
        tensors = [entry for entry in one.entries.values() if entry.shape is not None]
        elements = sum(math.prod(entry.shape or ()) for entry in tensors)
        files, values = len(one.files) - len(one.beside), len(one.entries) - len(tensors)
        held = f"{counted(len(tensors), 'tensor')} with {elements:,} elements, {counted(values, 'value')}"
        console.print(f"  {decimal(one.size)} in {counted(files, 'file')}; {held}")
    for finding in one.findings[: None if all_keys else _MOST_SHOWN]:
        console.print(text_of(f"  {finding_sentence(finding)}"))
    if not all_keys and len(one.findings) > _MOST_SHOWN:
        console.print(f"  and {len(one.findings) - _MOST_SHOWN} more: --all shows them")
    if one.beside:
        names = ", ".join([*one.beside][:3]) + (", ..." if len(one.beside) > 3 else "")
        console.print(text_of(f"  beside it {decimal(sum(one.beside.values()))} that no key names: {names}"))


def _show_keys(one: Audited, all_keys: bool) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("  key", "dtype", "shape", "chunks"):
        table.add_column(column, justify="right" if column == "chunks" else "left")
    for key, entry in [*one.entries.items()][: None if all_keys else _MOST_SHOWN]:
        shape = "" if entry.shape is None else str([*entry.shape])
        dtype = (entry.dtype or "value").removeprefix("torch.")
        table.add_row(text_of(f"  {key}"), text_of(dtype), shape, str(len(entry.chunks)))
    if one.entries:
        print_table(table)
    if not all_keys and len(one.entries) > _MOST_SHOWN:
        print(f"  and {len(one.entries) - _MOST_SHOWN} more: --all shows them")


def _plain(one: Audited) -> dict[str, Any]:
    """For JSON."""
    return {
        "checkpoint": str(one.folder),
        "state": one.state,
        "because": _why(one) or None,
        "bytes": one.size,
        "files": one.files,
        "beside": [*one.beside],
        "findings": [{**finding.plain(), "text": finding_sentence(finding)} for finding in one.findings],
        "keys": {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "chunks": [{"offsets": c.offsets, "sizes": c.sizes, "file": c.file} for c in entry.chunks],
            }
            for key, entry in one.entries.items()
        },
    }
