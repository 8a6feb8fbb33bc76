"""Print the plan of a sweep (`plan=true`): what would run and how long it would take; start no rank."""

import itertools
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CellPlan:
    """The plan for a cell: it would `run`, be a `skip` or is `done`; the estimated seconds, None if unknown;
    the reason; and the `known` failures that are expected of it."""

    cell: PlannedCell
    would: str
    because: str = ""
    seconds: float | None = None
    known: tuple[str, ...] = ()

    @property
    def block(self) -> str:
        """The line of a plan by blocks that the cell is in."""
        return self.cell.block or f"scenario={self.cell.config.scenario.name}"

    @property
    def as_json(self) -> dict[str, Any]:
        """Everything about it in plain values."""
        return {**vars(self), "cell": self.cell.name, "block": self.block}


def print_plan(sweep: Plan, folder: Path, valid: ValidRows, shown: PlanAs) -> int:
    """Print to standard output what would happen to the cells of the sweep in `folder`, one by one or by
    block, and the sum.

    Returns:
        the exit status of a run, as far as it is known: 1 if every cell would be a skip, or a cell that would
        run has a target that no file defines.
    """
    done, gpus = valid.rows, sweep.machine.gpus
    superseded = [line.row for line in valid.superseded if line.row]
    # The times of rows that are no longer valid are still good for an estimate.
    times = Times([*stored_rows(folder, SUPERSEDED_JSONL), *superseded, *done.values()])
    plans = [_cell_plan(cell, done.get(cell.run), times) for cell in sweep.cells]
    to_run = _to_run(plans)
    targets = {target: file for cell in to_run for target, file in cell.targets.items()}
    by_block = {
        block: _block([plan for plan in plans if plan.block == block], times, gpus)
        for block in dict.fromkeys(plan.block for plan in plans)
    }
    with standard_output():
        if shown is PlanAs.json:
            content = {
                "cells": [plan.as_json for plan in plans],
                "blocks": by_block,
                "seconds": times.left(to_run, gpus),
                "targets": targets,
            }
            sys.stdout.write(f"{json.dumps(content, indent=1)}\n")
        else:
            _print(plans, by_block, is_complete=shown is PlanAs.cells or len(plans) <= _MOST_CELLS)
            sentences = valid.sentences(len(plans))
            counts = Counter(plan.would for plan in plans)
            parts = [f"{counts[would]} {words}" for would, words in _WOULD.items() if counts[would]]
            sentences.append(f"{cells_text(sweep.distinct, len(plans))}: {', '.join(parts)}")
            if to_run:
                sentences.append(_estimate(to_run, times, gpus))
            elif not done:
                sentences.append("every cell would be skipped: nothing would be measured")
            for sentence in [*itertools.starmap(_target, targets.items()), *sentences]:
                _print_line(sentence)
    missing = None in targets.values()
    return int(missing) if to_run else exit_status(done.values())


def _to_run(plans: Iterable[CellPlan]) -> list[PlannedCell]:
    return [plan.cell for plan in plans if plan.would == "run"]


def _block(plans: Sequence[CellPlan], times: Times, gpus: int) -> dict[str, Any]:
    """Return the cells of a block by plan, and the estimated seconds for all of them."""
    counts = Counter(plan.would for plan in plans)
    seconds = times.left(_to_run(plans), gpus)
    return {"cells": len(plans), **{would: counts[would] for would in _WOULD}, "seconds": seconds}


def _cell_plan(cell: PlannedCell, done: Row | None, times: Times) -> CellPlan:
    """Return the plan for a cell, given its row if it is done, and the times of cells so far."""
    if done:
        return CellPlan(cell, "done", f"{done.status}: {done.reason}" if done.reason else done.status)
    if skip := cell.skip or too_little_space(cell.config.storage, cell.checkpoints):
        return CellPlan(cell, "skip", skip)
    failures = [failure for failure in cell.known_failures if failure.always]
    known = tuple(f"{failure.id}: {failure.reason}" for failure in failures)
    because = "; ".join(f"known failure {failure.id}" for failure in failures)
    return CellPlan(cell, "run", because, times.seconds(cell), known)


def _target(target: str, file: str | None) -> str:
    if file:
        return f"{target}: in {file}"
    return f"{target}: not found in {Path.cwd()}, nor installed; cells that need it would be errors"


def _print(plans: Sequence[CellPlan], by_block: dict[str, dict[str, Any]], is_complete: bool) -> None:
    """Print the cells if the plan is to be complete, else the blocks and the reasons for skips."""
    if is_complete:
        _print_cells(plans)
    else:
        print_table(_blocks(by_block), fits=True)
        _print_reasons("would be skipped", (plan.because for plan in plans if plan.would == "skip"))
    _print_reasons("known failures, which are expected", (text for plan in plans for text in plan.known))
    _print_line("")
    if not is_complete:
        _print_line("--all shows every cell, --json all of it")


def _print_cells(plans: Sequence[CellPlan]) -> None:
    """Print the table of a run, with the plan in place of results. Repeats of a cell with the same plan are
    one line."""
    from dcpbench.analysis.frame import frame_of  # pandas takes up to a second to import
    from dcpbench.report.tables import told_apart

    cells = [plan.cell for plan in plans]
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
