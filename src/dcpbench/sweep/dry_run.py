"""Print the plan of a sweep (`plan=true`): what would run and how long it would take; start no rank."""

import itertools
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcpbench.config.groups import PlanAs
from dcpbench.config.text import cells_text, duration_text
from dcpbench.core.axes import AXES
from dcpbench.records.row import Row, exit_status
from dcpbench.records.store import SUPERSEDED_JSONL, stored_rows
from dcpbench.report.styles import print_table, standard_output, style_of, text_of
from dcpbench.sweep.plan import Plan, PlannedCell
from dcpbench.sweep.resources import Times, too_little_space
from dcpbench.sweep.valid_rows import ValidRows

_WOULD = {"run": "would run", "skip": "would be skipped", "done": "are done"}
_STYLES = {"done": style_of("pass"), "skip": style_of("skip")}
_MOST_CELLS = 50
"""With more cells, blocks are shown unless all cells are requested."""
_MOST_GROUPS = 24
"""An axis with more values makes groups that are too small."""


@dataclass(frozen=True)
class CellPlan:
    """The plan for a cell of a `block`: it would `run`, be a `skip` or is `done`; the estimated seconds, None
    if unknown; the reason; and the `known` failures that are expected of it."""

    cell: str
    block: str
    would: str
    seconds: float | None
    because: str
    known: tuple[str, ...] = ()


def print_plan(sweep: Plan, folder: Path, valid: ValidRows, shown: PlanAs) -> int:
    """Print to standard output what would happen to the cells of the sweep in `folder`, one by one or by
    block, and the sum.

    Returns:
        the exit status of a run, as far as it is known: 1 if every cell would be a skip, or a cell that would
        run has a target that no file defines.
    """
    done, cells, gpus = valid.rows, sweep.cells, sweep.machine.gpus
    superseded = [line.row for line in valid.superseded if line.row]
    # The times of rows that are no longer valid are still good for an estimate.
    replaced = [*stored_rows(folder, SUPERSEDED_JSONL), *superseded]
    times = Times([*replaced, *done.values()])
    plans = [
        _cell_plan(cell, block, done.get(cell.run), times)
        for cell, block in zip(cells, _groups(cells), strict=True)
    ]
    planned = [*zip(cells, plans, strict=True)]
    to_run = [cell for cell, plan in planned if plan.would == "run"]
    targets = {target: file for cell in to_run for target, file in cell.targets.items()}
    by_block = {
        block: _block([(cell, plan) for cell, plan in planned if plan.block == block], times, gpus)
        for block in dict.fromkeys(plan.block for plan in plans)
    }
    with standard_output():
        if shown is PlanAs.json:
            content = {
                "cells": [*map(asdict, plans)],
                "blocks": by_block,
                "seconds": times.left(to_run, gpus),
                "targets": targets,
            }
            sys.stdout.write(f"{json.dumps(content, indent=1)}\n")
        else:
            _print(cells, plans, by_block, shown)
            sentences = valid.sentences(len(cells))
            counts = Counter(plan.would for plan in plans)
            parts = [f"{counts[would]} {words}" for would, words in _WOULD.items() if counts[would]]
            sentences.append(f"{cells_text(sweep.distinct, len(cells))}: {', '.join(parts)}")
            if to_run:
                sentences.append(_estimate(to_run, times, gpus))
            elif not done:
                sentences.append("every cell would be skipped: nothing would be measured")
            for sentence in [*itertools.starmap(_target, targets.items()), *sentences]:
                _print_line(sentence)
    missing = None in targets.values()
    return int(missing) if to_run else exit_status(done.values())


def _block(planned: Sequence[tuple[PlannedCell, CellPlan]], times: Times, gpus: int) -> dict[str, Any]:
    """Return the cells of a block by plan, and the estimated seconds for all of them."""
    counts = Counter(plan.would for _, plan in planned)
    seconds = times.left((cell for cell, plan in planned if plan.would == "run"), gpus)
    return {"cells": len(planned), **{would: counts[would] for would in _WOULD}, "seconds": seconds}


def _groups(cells: Sequence[PlannedCell]) -> list[str]:
    """Return the group of each cell: its block; without blocks its scenario, or else its value of the axis
    that is swept over most values, but not too many."""
    if all(cell.block for cell in cells):
        return [cell.block for cell in cells]
    lists = [dict(item.partition("=")[::2] for item in cell.overrides) for cell in cells]
    keys = dict.fromkeys(key for each in lists for key in each)
    values = {key: {each.get(key) for each in lists} for key in keys}
    several = [key for key, found in values.items() if 1 < len(found) <= _MOST_GROUPS]
    if not several:
        return ["all"] * len(cells)
    best = max(several, key=lambda key: (key == "scenario", len(values[key])))
    return [f"{best}={each[best]}" if best in each else f"no {best}" for each in lists]


def _cell_plan(cell: PlannedCell, block: str, done: Row | None, times: Times) -> CellPlan:
    """Return the plan for a cell, given its row if it is done, and the times of cells so far."""
    name = cell.name
    if done:
        return CellPlan(
            name, block, "done", None, f"{done.status}: {done.reason}" if done.reason else done.status
        )
    skip = cell.skip or too_little_space(cell.config.storage, cell.checkpoints[0])
    if skip:
        return CellPlan(name, block, "skip", None, skip)
    failures = [failure for failure in cell.known_failures if failure.always]
    known = tuple(f"{failure.id}: {failure.reason}" for failure in failures)
    because = "; ".join(f"known failure {failure.id}" for failure in failures)
    return CellPlan(name, block, "run", times.seconds(cell), because, known)


def _target(target: str, file: str | None) -> str:
    if file:
        return f"{target}: in {file}"
    return f"{target}: not found in {Path.cwd()}, nor installed; cells that need it would be errors"


def _print(
    cells: Sequence[PlannedCell],
    plans: Sequence[CellPlan],
    by_block: dict[str, dict[str, Any]],
    shown: PlanAs,
) -> None:
    if shown is PlanAs.cells or (shown is PlanAs.auto and len(plans) <= _MOST_CELLS):
        _print_cells(cells, plans)
    else:
        print_table(_blocks(by_block), fits=True)
        _print_reasons("would be skipped", (plan.because for plan in plans if plan.would == "skip"))
    _print_reasons("known failures, which are expected", (one for plan in plans for one in plan.known))
    _print_line("")
    if shown is PlanAs.auto and len(plans) > _MOST_CELLS:
        _print_line("--all shows every cell, --json all of it")


def _print_cells(cells: Sequence[PlannedCell], plans: Sequence[CellPlan]) -> None:
    """Print the table of a run, with the plan in place of results. Repeats of a cell with the same plan are
    one line."""
    from dcpbench.analysis.frame import frame_of  # pandas takes up to a second to import
    from dcpbench.report.tables import told_apart

    values: dict[str, list[Any]] = {axis: [cell.columns.get(axis) for cell in cells] for axis in AXES}
    words = ((word for word in cell.overrides if not word.startswith("repeat=")) for cell in cells)
    title, shown_cells = told_apart(frame_of({**values, "overrides": [*map(shlex.join, words)]}))
    lines: defaultdict[tuple[str, ...], list[CellPlan]] = defaultdict(list)
    for texts, plan in zip(shown_cells.to_numpy().tolist(), plans, strict=True):
        lines[*texts, plan.would, plan.because].append(plan)
    runs = ["runs"] if len(lines) < len(plans) else []
    reasons = ["because"] if any(plan.because for plan in plans) else []
    table = Table(*shown_cells.columns, "would", *runs, "about", *reasons, box=None, pad_edge=False)
    table.header_style = "bold"
    for column in table.columns:
        column.overflow = "fold"
    for (*texts, would, because), equal in lines.items():
        seconds = [plan.seconds for plan in equal if plan.seconds is not None]
        about = _about(sum(seconds) if seconds else None) if would == "run" else ""
        how = Text(would, style=_STYLES.get(would, "default"), no_wrap=True)
        counts = [str(len(equal)) for _ in runs]
        table.add_row(*map(text_of, texts), how, *counts, about, *(text_of(because) for _ in reasons))
    if title:
        _print_line(title, "bold")
    print_table(table, fits=True)


def _blocks(by_block: dict[str, dict[str, Any]]) -> Table:
    table = Table("block", box=None, pad_edge=False, header_style="bold")
    for column in ("cells", *_WOULD, "about"):
        table.add_column(column, justify="right")
    for name, block in by_block.items():
        numbers = [str(block[column] or "") for column in ("cells", *_WOULD)]
        table.add_row(text_of(name), *numbers, _about(block["seconds"]) if block["run"] else "")
    return table


def _about(seconds: float | None) -> str:
    return "?" if seconds is None else duration_text(seconds)


def _print_reasons(heading: str, reasons: Iterable[str]) -> None:
    """Print each reason once, with the number of its cells."""
    for number, (reason, cells) in enumerate(Counter(reasons).most_common()):
        if not number:
            _print_line("")
            _print_line(f"{heading}:")
        _print_line(f"  {cells} × {reason}")


def _print_line(sentence: str, style: str = "") -> None:
    console = Console()
    console.print(text_of(sentence, style), soft_wrap=not console.is_terminal)


def _estimate(to_run: Sequence[PlannedCell], times: Times, gpus: int) -> str:
    total = times.left(to_run, gpus)
    if total is None:
        return "no time estimate: no similar cell has finished yet"
    missing = sum(times.seconds(cell) is None for cell in to_run)
    known = f"{len(to_run) - missing} of the {len(to_run)}"
    text = f"about {duration_text(total)}, from the times of cells similar to {known} in this sweep"
    return text + f"; {missing} have no similar cell and are assumed to take as long" if missing else text
