"""`dcpbench audit CHECKPOINT...`: check whether a checkpoint of DCP or of safetensors is complete."""

import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dcpbench.checkpointers.on_disk import Audited, FolderState, audited, newest_first
from dcpbench.config.text import counted
from dcpbench.core.sentences import mismatch_sentence
from dcpbench.records.store import ResultsError
from dcpbench.report.styles import complain, print_table, standard_output, style_of, text_of

_MOST_SHOWN = 20
_STATUS = {FolderState.whole: 0, FolderState.damaged: 1, FolderState.torn: 1, FolderState.none: 2}


def main(
    checkpoints: Sequence[Path],
    newest: bool = False,
    data: bool = False,
    beside: Sequence[str] = (),
    all: bool = False,
    as_json: bool = False,
) -> int:
    """Audit checkpoints, or all checkpoints in folders. Return 0 if all are complete, 1 if one is not, 2 if a
    folder has none. With `newest`, print the newest complete one below these folders instead; return 1 if
    none is complete, 2 if none exists. `data` reads the data too; files `beside` have to exist as well."""
    look = partial(audited, data=data, required=beside)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names can contain any character
    if newest:
        return _print_newest(checkpoints, look)
    checked = [one for folder in checkpoints for one in [*newest_first([folder], look)] or [look(folder)]]
    with standard_output():
        if as_json:
            print(json.dumps([_plain(one) for one in checked], indent=1))
        else:
            for one in checked:
                _show(one, all)
                if all or len(checked) == 1:  # with several, only their states matter
                    _show_keys(one, all)
    return max(_STATUS[one.state] for one in checked)


def checkpoints_in(folder: Path, data: bool = False) -> list[Audited]:
    """Audit a checkpoint, or every checkpoint below a folder, the newest first. `data` reads tensors too.

    Raises:
        ResultsError: there is no checkpoint.
    """
    found = [*newest_first([folder], partial(audited, data=data))]
    if not found:
        raise ResultsError(f"{folder}: no checkpoint here, nor in a folder below")
    return found


def _print_newest(folders: Iterable[Path], look: Callable[[Path], Audited]) -> int:
    folders, one = list(folders), None
    for one in newest_first(folders, look):
        if one.state is FolderState.whole:
            with standard_output():
                print(one.folder)
            return 0
        complain(f"{one.folder}: {one.state}: {one.why}")
    if one is None:
        raise ResultsError(f"{', '.join(map(str, folders))}: no checkpoint here, nor in a folder below")
    return 1


def _show(one: Audited, all_keys: bool) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty())
    style = style_of("pass" if one.state is FolderState.whole else "fail")
    state = "no checkpoint" if one.state is FolderState.none else one.state
    console.print(text_of(f"{one.folder}: {state}{f': {one.because}' if one.because else ''}", style))
    if one.entries:
        tensors = [entry for entry in one.entries.values() if entry.shape is not None]
        elements = sum(math.prod(entry.shape or ()) for entry in tensors)
        files, values = len(one.files) - len(one.beside), len(one.entries) - len(tensors)
        content = f"{counted(len(tensors), 'tensor')} with {elements:,} elements, {counted(values, 'value')}"
        console.print(f"  {decimal(one.size)} in {counted(files, 'file')}; {content}")
    for finding in one.findings[: None if all_keys else _MOST_SHOWN]:
        console.print(text_of(f"  {mismatch_sentence(finding)}"))
    if not all_keys and len(one.findings) > _MOST_SHOWN:
        console.print(f"  and {len(one.findings) - _MOST_SHOWN} more: --all shows them")
    if one.beside:
        names = ", ".join([*one.beside][:3]) + (", ..." if len(one.beside) > 3 else "")
        console.print(
            text_of(f"  {decimal(sum(one.beside.values()))} in other files, to which no key refers: {names}")
        )


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
    """Return an audit as JSON values."""
    return {
        "checkpoint": str(one.folder),
        "state": one.state,
        "because": one.why or None,
        "bytes": one.size,
        "files": one.files,
        "beside": [*one.beside],
        "findings": [{**finding.plain(), "text": mismatch_sentence(finding)} for finding in one.findings],
        "keys": {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "chunks": [{"offsets": c.offsets, "sizes": c.sizes, "file": c.file} for c in entry.chunks],
            }
            for key, entry in one.entries.items()
        },
    }
