"""`dcpbench audit CHECKPOINT...`: check whether a checkpoint of DCP or of safetensors is complete."""

import io
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dcpbench.config.errors import ConfigError
from dcpbench.config.text import counted, size_text
from dcpbench.core.sentences import mismatch_sentence
from dcpbench.formats.on_disk import Audited, FolderState, audited, newest_first
from dcpbench.records.store import ResultsError
from dcpbench.report.styles import print_error, standard_output, style_of, text_of

if TYPE_CHECKING:
    from dcpbench.report.document import Table

_MOST_SHOWN = 20
_EXIT_STATUS = {FolderState.complete: 0, FolderState.damaged: 1, FolderState.torn: 1, FolderState.none: 2}


def main(
    checkpoints: Sequence[Path],
    newest: bool = False,
    bad: bool = False,
    data: bool = False,
    beside: Sequence[str] = (),
    all: bool = False,
    format: str | None = None,
    as_json: bool = False,
) -> int:
    """Audit checkpoints, or all checkpoints in folders. Return 0 if all are complete, 1 if one is not, 2 if a
    folder has none. With `bad`, print only those that are not complete. With `newest`, print the newest
    complete one below these folders instead; return 1 if none is complete, 2 if none exists. `data` reads the
    data too; files `beside` have to exist as well."""
    look = partial(audited, data=data, required=beside)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names can contain any character
    if newest and (bad or all or as_json or format):
        raise ConfigError("--newest prints one path; leave out --all, --bad, --format and --json")
    if newest:
        return _print_newest(checkpoints, look)
    audits = [audit for folder in checkpoints for audit in [*newest_first([folder], look)] or [look(folder)]]
    shown = [audit for audit in audits if not (bad and audit.state is FolderState.complete)]
    from dcpbench.report.document import (  # pandas takes up to a second
        Content,
        Lines,
        document_text,
        write_output,
    )

    if as_json or format == "json":
        write_output(json.dumps([_plain(audit) for audit in shown], indent=1) + "\n", None)
    else:
        of_one = all or len(audits) == 1  # of several, only their states matter
        sections: list[Lines | Table] = []
        lines: list[str | Text] = []
        for audit in shown:
            lines += _lines(audit, all)
            if of_one and audit.entries:
                sections += [Lines("", lines), _keys(audit, all)]
                lines = []
        content = Content([*sections, Lines("", [*lines, _summary(audits)])])
        write_output(document_text([content], format or "table", sys.stdout), None)
    return max(_EXIT_STATUS[audit.state] for audit in audits)


def checkpoints_in(folder: Path, data: bool = False) -> list[Audited]:
    """Audit a checkpoint, or every checkpoint below a folder, the newest first. `data` reads tensors too.

    Raises:
        ResultsError: there is no checkpoint.
    """
    audits = [*newest_first([folder], partial(audited, data=data))]
    if not audits:
        raise ResultsError(f"{folder}: {audited(folder).because}")
    return audits


def _print_newest(folders: Sequence[Path], look: Callable[[Path], Audited]) -> int:
    audit = None
    for audit in newest_first(folders, look):
        if audit.state is FolderState.complete:
            with standard_output():
                print(audit.folder)
            return 0
        print_error(f"{audit.folder}: {audit.state}: {audit.why}")
    if audit is None:
        raise ResultsError("; ".join(f"{folder}: {look(folder).because}" for folder in folders))
    return 1


def _summary(audits: Iterable[Audited]) -> str:
    """Return `3 checkpoints: 1 complete, 2 torn`, and how many paths are not a checkpoint."""
    counts = Counter(audit.state for audit in audits)
    others = counts.pop(FolderState.none, 0)
    states = ", ".join(f"{counts[state]} {state}" for state in FolderState if counts[state])
    counted_states = f"{counted(counts.total(), 'checkpoint')}{': ' if states else ''}{states}"
    return f"{counted_states}; not a checkpoint: {counted(others, 'path')}" if others else counted_states


def _lines(audit: Audited, all_keys: bool) -> Iterator[str | Text]:
    """Yield the state of a checkpoint, what is in it, and what is wrong."""
    style = style_of("pass" if audit.state is FolderState.complete else "fail")
    state = "" if audit.state is FolderState.none else audit.state
    yield text_of(": ".join(filter(None, (str(audit.folder), state, audit.because))), style)
    if audit.entries:
        tensors = [entry for entry in audit.entries.values() if entry.shape is not None]
        elements = sum(math.prod(entry.shape or ()) for entry in tensors)
        files, values = len(audit.files) - len(audit.beside), len(audit.entries) - len(tensors)
        content = f"{counted(len(tensors), 'tensor')} with {elements:,} elements, {counted(values, 'value')}"
        yield f"  {size_text(audit.size)} in {counted(files, 'file')}; {content}"
    for finding in audit.findings[: None if all_keys else _MOST_SHOWN]:
        yield f"  {mismatch_sentence(finding)}"
    if not all_keys and len(audit.findings) > _MOST_SHOWN:
        yield f"  and {len(audit.findings) - _MOST_SHOWN} more: --all shows them"
    if audit.beside:
        names = ", ".join([*audit.beside][:3]) + (", ..." if len(audit.beside) > 3 else "")
        unreferenced = counted(len(audit.beside), "unreferenced file")
        yield f"  {size_text(sum(audit.beside.values()))} in {unreferenced}: {names}"


def _keys(audit: Audited, all_keys: bool) -> "Table":
    import pandas as pd

    from dcpbench.report.document import Table

    rows = []
    for key, entry in [*audit.entries.items()][: None if all_keys else _MOST_SHOWN]:
        shape = "" if entry.shape is None else str([*entry.shape])
        dtype = (entry.dtype or "value").removeprefix("torch.")
        rows.append((f"  {key}", dtype, shape, str(len(entry.chunks))))
    if not all_keys and len(audit.entries) > _MOST_SHOWN:
        rows.append((f"  and {len(audit.entries) - _MOST_SHOWN} more: --all shows them", "", "", ""))
    # pandas keeps texts as UTF-8 where pyarrow is installed, and a key may be none
    table = pd.DataFrame(rows, columns=["  key", "dtype", "shape", "chunks"], dtype=object)
    return Table("", table, numbers=("chunks",), folded=())


def _plain(audit: Audited) -> dict[str, Any]:
    """Return an audit as JSON values."""
    return {
        "checkpoint": str(audit.folder),
        "state": audit.state,
        "because": audit.why or None,
        "bytes": audit.size,
        "files": audit.files,
        "beside": [*audit.beside],
        "findings": [{**finding.plain(), "text": mismatch_sentence(finding)} for finding in audit.findings],
        "keys": {
            key: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "chunks": [{"offsets": c.offsets, "sizes": c.sizes, "file": c.file} for c in entry.chunks],
            }
            for key, entry in audit.entries.items()
        },
    }
