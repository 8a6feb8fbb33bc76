"""`dcpbench show FOLDER CELL`: one cell in full: its result, checks, mismatches, losses and times."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dcpbench.analysis.causes import causes_of
from dcpbench.analysis.cell_choice import runs_of
from dcpbench.analysis.frame import as_text, read_sweeps, records
from dcpbench.analysis.runs import again, severity, status_text
from dcpbench.code.sources import COMMITS
from dcpbench.config.text import clipped, counted, visible
from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import BAD, shown
from dcpbench.records.row import dict_in, list_in
from dcpbench.records.store import ResultsError
from dcpbench.report.document import first_of, put_out, quantity, width_of
from dcpbench.report.page.data import mismatches, why_null
from dcpbench.report.styles import complain, text_of, without_trailing_blanks

_STEPS = 20
"""The most steps whose losses are printed."""
_MISMATCHES = 20
_LONGEST = 10_000
"""The most characters of a text that are printed."""
_ORIGIN = {"torch_version": "torch", "python_version": "Python", "started_at": "started", **COMMITS}
_HEADS = ("check", "result", "control caught", "proves, if it passed")

Section = tuple[str, Sequence[RenderableType]]


def main(folder: Path, cell: Sequence[str] = (), as_json: bool = False) -> int:
    """Print one cell; raise ResultsError or QueryError if there is no such cell."""
    sweeps = read_sweeps([folder])
    if sweeps.frame.empty:
        raise ResultsError(next(iter(sweeps.left_out), f"{folder}: no rows yet"))
    runs = runs_of(sweeps.frame, cell)
    for sentence in first_of(sweeps.left_out):
        complain(sentence)
    (row,) = records(runs.loc[[severity(runs).idxmin()]])
    name, _ = row.pop("name"), row.pop("number")
    if as_json:
        put_out(json.dumps({**row, "causes": causes_of(row)}, indent=1, allow_nan=False) + "\n", None)
        return 0
    console = Console(width=width_of(sys.stdout))
    console.begin_capture()
    spec = shown(str(row["status"]), row["flaky"], row["fault_seen"])
    console.print(text_of(spec.label, spec.style).append(visible(f" {name}: {spec.help}"), style="default"))
    for title, parts in _sections(row):
        console.print()
        console.print(text_of(title, "bold"))
        for part in parts:
            console.print(Padding(part, (0, 0, 0, 2)))
    console.print()
    for line in _end(row, runs):  # unbroken, to be copied
        console.print(text_of(line), soft_wrap=True)
    put_out(without_trailing_blanks(console.end_capture()), None)
    return 0


def _sections(row: dict[str, Any]) -> Iterator[Section]:
    """Yield the title and the content of each section that the row has something for."""
    details = dict_in(row["details"])
    if row["reason"]:
        yield "reason", [_line(row["reason"])]
    if causes := causes_of(row):
        yield f"likely cause{'s' if len(causes) > 1 else ''}", [*map(_line, causes)]
    yield from _of_checks(row, details)
    ranks = [dict_in(rank) for rank in list_in(details.get("ranks"))]
    values = {
        f"{name}: {value}" for rank in ranks for name, value in dict_in(rank.get("in_no_state_dict")).items()
    }
    if values:
        yield "values in no state dict that differ", [_line(one) for one in sorted(values)]
    if losses := _losses(dict_in(next(iter(list_in(details.get("ranks"))), None))):
        yield "losses of rank 0", [losses]
    seconds = dict_in(details.get("phases")).items()
    if phases := [f"{name} {value:.3f} s" for name, value in seconds if isinstance(value, float)]:
        yield "phases of the slowest rank", [_line(", ".join(phases))]
    if measured := [f"{name} {quantity(name, row[name])}" for name in METRICS if row[name] is not None]:
        yield "measured", [_line(", ".join(measured))]
    axes = [f"{axis}={as_text(row[axis])}" for axis in AXES if row[axis] is not None]
    yield "configuration", [_line(" ".join(axes)), _line(f"overrides: {row['overrides']}")]
    if origin := [f"{called} {row[name]}" for name, called in _ORIGIN.items() if row[name] is not None]:
        yield "measured with", [_line(", ".join(origin))]
    if lines := list_in(details.get("log_tail")):
        yield f"end of the log of rank {details.get('rank', '?')}", [_line(line) for line in lines]


def _of_checks(row: dict[str, Any], details: dict[str, Any]) -> Iterator[Section]:
    reports = {check: dict_in(of) for check, of in dict_in(details.get("checks")).items()}
    if not (made := [check for check in CHECKS if row[check] is not None]):
        return
    verdicts = [f"{name} {_passed(row[name])}" for name in ("resume", "training") if row[name] is not None]
    title = f"checks ({', '.join(verdicts)})" if verdicts else "checks"
    table = _table(_HEADS)
    for check in made:
        seen, style = reports.get(check, {}), "" if row[check] else BAD
        names, missed = len(dict_in(seen.get("control"))), len(list_in(seen.get("control_missed")))
        caught = f"{names - missed} of {names}" if names else "-"
        table.add_row(Text(check, style), Text(_passed(row[check]), style), caught, CHECKS[check].help)
    yield title, [table]
    for check in made:
        if listed := mismatches(reports.get(check, {}), _MISMATCHES):
            count = reports[check].get("mismatch_count", len(listed))
            yield f"mismatches of {check} ({count})", [_line(one) for one in listed]
    nulls: dict[str, list[str]] = {}
    for check, why in why_null(row):
        nulls.setdefault(why, []).append(check)
    yield "checks that do not apply", [_line(f"{', '.join(of)}: {why}") for why, of in nulls.items()]


def _losses(rank: dict[str, Any]) -> Table | None:
    """Return the losses of the steps after each load: uninterrupted, of the twin, and resumed."""
    runs = {str(name): dict(enumerate(list_in(of), 1)) for name, of in dict_in(rank.get("losses")).items()}
    loaded = dict_in(rank.get("resumed"))
    resumed = {int(step): list_in(of) for step, of in loaded.items() if step.isdecimal() and len(step) < 10}
    after = {f"resumed from {step}": dict(enumerate(resumed[step], step + 1)) for step in sorted(resumed)}
    steps = sorted({step for losses in after.values() for step in losses})[:_STEPS]
    table = _table(("step", *runs, *after))
    for step in steps:
        first, *others = (losses.get(step) for losses in ({step: str(step)}, *runs.values(), *after.values()))
        table.add_row(first, *(f"{one:.9g}" if isinstance(one, float) else "-" for one in others))
    return table if steps else None


def _end(row: dict[str, Any], runs: pd.DataFrame) -> Iterator[str]:
    """Yield the other runs of the cell, its log and its command."""
    if len(runs) > 1:
        each = zip(runs["repeat"], status_text(runs), runs["retry_of"].notna(), strict=True)
        listed = ", ".join(
            f"repeat={repeat} {status}{' (retry)' * is_retry}" for repeat, status, is_retry in each
        )
        yield f"the worst of {counted(len(runs), 'run')}: {listed}"
    rank = dict_in(row["details"]).get("rank", 0)
    with suppress(OSError, ValueError):  # the name of a cell can be any text
        if (log := Path(row["sweep"]) / str(row["cell"]) / f"rank{rank}.log").exists():
            yield f"log: {log}"
    yield f"again: {again(row)}"


def _table(heads: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(text_of(head), no_wrap=head in _HEADS[:2])
    return table


def _line(text: object) -> Text:
    return text_of(clipped(str(text), _LONGEST))


def _passed(value: object) -> str:
    return "passed" if value else "failed"
