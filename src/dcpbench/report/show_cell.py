"""`dcpbench show FOLDER CELL`: one cell in full: its result, checks, mismatches, losses and times."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from rich.text import Text

from dcpbench.analysis.causes import causes_of
from dcpbench.analysis.cell_choice import runs_of
from dcpbench.analysis.frame import as_text, plain_rows, read_sweeps
from dcpbench.analysis.runs import rerun_command, severity, status_text
from dcpbench.code.sources import COMMITS
from dcpbench.config.text import clipped, counted, visible
from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.notes import NOTES
from dcpbench.core.statuses import BAD, shown
from dcpbench.records.row import dict_in, list_in, notes_of
from dcpbench.records.store import ResultsError
from dcpbench.report.document import (
    Content,
    Lines,
    Table,
    document_text,
    first_sentences,
    quantity_text,
    write_output,
)
from dcpbench.report.page.data import mismatches, why_null
from dcpbench.report.styles import print_error, text_of

_STEPS = 20
"""The most steps whose losses are printed."""
_MISMATCHES = 20
_LONGEST = 10_000
"""The most characters of a text that are printed."""
_ORIGIN = {"torch_version": "torch", "python_version": "Python", "started_at": "started", **COMMITS}
_HEADS = ("check", "result", "control caught", "proves, if it passed")


def main(folder: Path, cell: Sequence[str] = (), format: str | None = None, as_json: bool = False) -> int:
    """Print one cell; raise ResultsError or QueryError if there is no such cell."""
    sweeps = read_sweeps([folder])
    if sweeps.frame.empty:
        raise ResultsError(next(iter(sweeps.left_out), f"{folder}: no rows yet"))
    runs = runs_of(sweeps.frame, cell)
    for sentence in first_sentences(sweeps.left_out):
        print_error(sentence)
    (row,) = plain_rows(runs.loc[[severity(runs).idxmin()]])
    name, _ = row.pop("name"), row.pop("number")
    if as_json or format == "json":
        write_output(json.dumps({**row, "causes": causes_of(row)}, indent=1, allow_nan=False) + "\n", None)
        return 0
    spec = shown(str(row["status"]), row["flaky"], row["fault_seen"])
    first = text_of(spec.label, spec.style).append(visible(f" {name}: {spec.help}"), style="default")
    parts = [Lines("", [first]), *_sections(row), Lines("", [*_end(row, runs)], unbroken=True)]
    write_output(document_text([Content(parts)], format or "table", sys.stdout), None)
    return 0


def _sections(row: dict[str, Any]) -> Iterator[Table | Lines]:
    """Yield the sections that the row has something for."""
    details = dict_in(row["details"])
    if row["reason"]:
        yield _lines("reason", row["reason"])
    if causes := causes_of(row):
        yield _lines(f"likely cause{'s' if len(causes) > 1 else ''}", *causes)
    yield from _of_checks(row, details)
    notes = [*notes_of(row)]
    for kind, spec in NOTES.items():
        if spec.title and (lines := sorted({note.sentence for note in notes if note.kind == kind})):
            yield _lines(spec.title, *lines)
    yield from _losses(dict_in(next(iter(list_in(details.get("ranks"))), None)))
    seconds = dict_in(details.get("phases")).items()
    if phases := [f"{name} {value:.3f} s" for name, value in seconds if isinstance(value, float)]:
        yield _lines("phases of the slowest rank", ", ".join(phases))
    if measured := [f"{name} {quantity_text(name, row[name])}" for name in METRICS if row[name] is not None]:
        yield _lines("measured", ", ".join(measured))
    axes = [f"{axis}={as_text(row[axis])}" for axis in AXES if row[axis] is not None]
    yield _lines("configuration", " ".join(axes), f"overrides: {row['overrides']}")
    if origin := [f"{called} {row[name]}" for name, called in _ORIGIN.items() if row[name] is not None]:
        yield _lines("measured with", ", ".join(origin))
    if lines := list_in(details.get("log_tail")):
        yield _lines(f"end of the log of rank {details.get('rank', '?')}", *lines)


def _of_checks(row: dict[str, Any], details: dict[str, Any]) -> Iterator[Table | Lines]:
    reports = {check: dict_in(of) for check, of in dict_in(details.get("checks")).items()}
    if not (made := [check for check in CHECKS if row[check] is not None]):
        return
    verdicts = [f"{name} {_passed(row[name])}" for name in ("resume", "training") if row[name] is not None]
    title = f"checks ({', '.join(verdicts)})" if verdicts else "checks"
    table = []
    for check in made:
        seen, style = reports.get(check, {}), "" if row[check] else BAD
        names, missed = len(dict_in(seen.get("control"))), len(list_in(seen.get("control_missed")))
        caught = f"{names - missed} of {names}" if names else "-"
        table.append((Text(check, style), Text(_passed(row[check]), style), caught, CHECKS[check].help))
    yield Table(title, pd.DataFrame(table, columns=_HEADS), folded=_HEADS[2:], indent=2)
    for check in made:
        if listed := mismatches(reports.get(check, {}), _MISMATCHES):
            count = reports[check].get("mismatch_count", len(listed))
            yield _lines(f"mismatches of {check} ({count})", *listed)
    nulls: dict[str, list[str]] = {}
    for check, why in why_null(row):
        nulls.setdefault(why, []).append(check)
    if nulls:
        yield _lines("checks that do not apply", *(f"{', '.join(of)}: {why}" for why, of in nulls.items()))


def _losses(rank: dict[str, Any]) -> Iterator[Table]:
    """Yield the losses of the steps after each load: uninterrupted, of the twin, and resumed."""
    runs = {str(name): dict(enumerate(list_in(of), 1)) for name, of in dict_in(rank.get("losses")).items()}
    loaded = dict_in(rank.get("resumed"))
    resumed = {int(step): list_in(of) for step, of in loaded.items() if step.isdecimal() and len(step) < 10}
    after = {f"resumed from {step}": dict(enumerate(resumed[step], step + 1)) for step in sorted(resumed)}
    steps = sorted({step for losses in after.values() for step in losses})[:_STEPS]
    columns = {**runs, **after}
    table = [
        [
            str(step),
            *(f"{loss:.9g}" if isinstance(loss := of.get(step), float) else "-" for of in columns.values()),
        ]
        for step in steps
    ]
    if table:
        yield Table(
            "losses of rank 0", pd.DataFrame(table, columns=["step", *columns]), folded=(*columns,), indent=2
        )


def _end(row: dict[str, Any], runs: pd.DataFrame) -> Iterator[str]:
    """Yield the other runs of the cell, its log and its command."""
    if len(runs) > 1:
        repeats = zip(runs["repeat"], status_text(runs), runs["retry_of"].notna(), strict=True)
        listed = ", ".join(
            f"repeat={repeat} {status}{' (retry)' * is_retry}" for repeat, status, is_retry in repeats
        )
        yield f"the worst of {counted(len(runs), 'run')}: {listed}"
    rank = dict_in(row["details"]).get("rank", 0)
    with suppress(OSError, ValueError):  # the name of a cell can be any text
        if (log := Path(row["sweep"]) / str(row["cell"]) / f"rank{rank}.log").exists():
            yield f"log: {log}"
    yield f"again: {rerun_command(row)}"


def _lines(title: str, *lines: object) -> Lines:
    return Lines(title, [clipped(str(line), _LONGEST) for line in lines])


def _passed(value: object) -> str:
    return "passed" if value else "failed"
