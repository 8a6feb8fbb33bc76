"""Print the plan of a sweep: what would run and how long it would take; start no rank."""

import itertools
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from dcpbench.config.text import cells_text, duration_text
from dcpbench.core.axes import AXES
from dcpbench.plan.estimates import TimeEstimates, too_little_space
from dcpbench.plan.plan import Plan, PlannedCell
from dcpbench.records.row import Row, exit_status
from dcpbench.records.store import SUPERSEDED_JSONL, stored_rows
from dcpbench.report.styles import style_of
from dcpbench.sweep.request import Options
from dcpbench.sweep.valid_rows import ValidRows

if TYPE_CHECKING:
    from dcpbench.report.document import Lines, Table

_WOULD = {"run": "would run", "skip": "would be skipped", "done": "are done"}
_STYLES = {"done": style_of("pass"), "skip": style_of("skip")}
_MOST_CELLS = 50
"""With more cells, blocks are shown unless all cells are requested."""


@dataclass(frozen=True)
class Forecast:
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


def print_plan(sweep: Plan, folder: Path, valid: ValidRows, options: Options) -> int:
    """Print to standard output what would happen to the cells of the sweep in `folder`, one by one or by
    block, and the sum.

    Returns:
        the exit status of a run, as far as it is known: 1 if every cell would be a skip, or a cell that would
        run has a target that no file defines.
    """
    done, gpus = valid.rows, sweep.machine.gpus
    superseded = [line.row for line in valid.superseded if line.row]
    # The times of rows that are no longer valid are still good for an estimate.
    times = TimeEstimates([*stored_rows(folder, SUPERSEDED_JSONL), *superseded, *done.values()])
    plans = [_cell_plan(cell, done.get(cell.run), times) for cell in sweep.cells]
    to_run = _to_run(plans)
    targets = {target: file for cell in to_run for target, file in cell.targets.items()}
    by_block = {
        block: _block([plan for plan in plans if plan.block == block], times, gpus)
        for block in dict.fromkeys(plan.block for plan in plans)
    }
    from dcpbench.report.document import Content, document_text, write_output  # pandas takes up to a second

    if options.plan == "json":
        plain = {
            "cells": [plan.as_json for plan in plans],
            "blocks": by_block,
            "seconds": times.remaining_s(to_run, gpus),
            "targets": targets,
        }
        text = f"{json.dumps(plain, indent=1)}\n"
    else:
        sentences = [*itertools.starmap(_target, targets.items()), *valid.sentences(len(plans))]
        counts = Counter(plan.would for plan in plans)
        parts = [f"{counts[would]} {words}" for would, words in _WOULD.items() if counts[would]]
        sentences.append(f"{cells_text(sweep.distinct, len(plans))}: {', '.join(parts)}")
        if to_run:
            sentences.append(_estimate(to_run, times, gpus))
        elif not done:
            sentences.append("every cell would be skipped: nothing would be measured")
        is_complete = options.every or len(plans) <= _MOST_CELLS
        sections = [*_sections(plans, None if is_complete else by_block)]
        more = "" if is_complete else "--all shows every cell, --json all of it"
        content = Content(sections, more=more, headline="\n".join(sentences))
        text = document_text([content], options.plan, sys.stdout)
    write_output(text, None)
    missing = None in targets.values()
    return int(missing) if to_run else exit_status(done.values())


def _to_run(plans: Iterable[Forecast]) -> list[PlannedCell]:
    return [plan.cell for plan in plans if plan.would == "run"]


def _block(plans: Sequence[Forecast], times: TimeEstimates, gpus: int) -> dict[str, Any]:
    """Return the cells of a block by plan, and the estimated seconds for all of them."""
    counts = Counter(plan.would for plan in plans)
    seconds = times.remaining_s(_to_run(plans), gpus)
    return {"cells": len(plans), **{would: counts[would] for would in _WOULD}, "seconds": seconds}


def _cell_plan(cell: PlannedCell, done: Row | None, times: TimeEstimates) -> Forecast:
    """Return the plan for a cell, given its row if it is done, and the times of cells so far."""
    if done:
        return Forecast(cell, "done", f"{done.status}: {done.reason}" if done.reason else done.status)
    if skip := cell.skip or too_little_space(cell.config.storage, cell.checkpoints):
        return Forecast(cell, "skip", skip)
    failures = [failure for failure in cell.known_failures if failure.always]
    known = tuple(f"{failure.id}: {failure.reason}" for failure in failures)
    because = "; ".join(f"known failure {failure.id}" for failure in failures)
    return Forecast(cell, "run", because, times.seconds(cell), known)


def _target(target: str, file: str | None) -> str:
    if file:
        return f"{target}: in {file}"
    return f"{target}: not found in {Path.cwd()}, nor installed; cells that need it would be errors"


def _sections(
    plans: Sequence[Forecast], by_block: dict[str, dict[str, Any]] | None
) -> "Iterator[Table | Lines]":
    """Yield the cells, or blocks if they are given with the reasons for skips, and the known failures."""
    if by_block is None:
        yield _cells(plans)
    else:
        yield _blocks(by_block)
        yield from _reasons("would be skipped:", (plan.because for plan in plans if plan.would == "skip"))
    known = (text for plan in plans for text in plan.known)
    yield from _reasons("known failures, which are expected:", known)


def _cells(plans: Sequence[Forecast]) -> "Table":
    """Return the table of a run, with the plan in place of results. Repeats of a cell with the same plan are
    one line."""
    import pandas as pd

    from dcpbench.analysis.frame import frame_of
    from dcpbench.report.document import Table
    from dcpbench.report.tables import split_common_axes

    cells = [plan.cell for plan in plans]
    values: dict[str, list[Any]] = {axis: [cell.columns.get(axis) for cell in cells] for axis in AXES}
    words = ((word for word in cell.overrides if not word.startswith("repeat=")) for cell in cells)
    title, shown_cells = split_common_axes(frame_of({**values, "overrides": [*map(shlex.join, words)]}))
    lines: defaultdict[tuple[str, ...], list[Forecast]] = defaultdict(list)
    for texts, plan in zip(shown_cells.to_numpy().tolist(), plans, strict=True):
        lines[*texts, plan.would, plan.because].append(plan)
    rows = []
    for (*texts, would, because), equal in lines.items():
        seconds = [plan.seconds for plan in equal if plan.seconds is not None]
        about = _about(sum(seconds) if seconds else None) if would == "run" else ""
        rows.append([*texts, Text(would, _STYLES.get(would, "")), str(len(equal)), about, because])
    table = pd.DataFrame(rows, columns=[*shown_cells.columns, "would", "runs", "about", "because"])
    left_out = ["runs"] * (len(lines) == len(plans))
    left_out += ["because"] * (not any(plan.because for plan in plans))
    return Table(title, table.drop(columns=left_out), folded=(*shown_cells.columns, "because"))


def _blocks(by_block: dict[str, dict[str, Any]]) -> "Table":
    import pandas as pd

    from dcpbench.report.document import Table

    rows = [
        [name, *(str(block[column] or "") for column in ("cells", *_WOULD)), _about(block["seconds"])]
        for name, block in by_block.items()
    ]
    table = pd.DataFrame(rows, columns=["block", "cells", *_WOULD, "about"])
    table["about"] = table["about"].where(table["run"].ne(""), "")
    return Table("", table, numbers=(*table.columns[1:],), folded=("block",))


def _reasons(title: str, reasons: Iterable[str]) -> "Iterator[Lines]":
    """Yield each reason once, with the number of its cells."""
    from dcpbench.report.document import Lines

    if counts := Counter(reasons):
        yield Lines(title, [f"{cells} × {reason}" for reason, cells in counts.most_common()])


def _about(seconds: float | None) -> str:
    return "?" if seconds is None else duration_text(seconds)


def _estimate(to_run: Sequence[PlannedCell], times: TimeEstimates, gpus: int) -> str:
    total = times.remaining_s(to_run, gpus)
    if total is None:
        return "no time estimate: no similar cell has finished yet"
    missing = sum(times.seconds(cell) is None for cell in to_run)
    known = f"{len(to_run) - missing} of the {len(to_run)}"
    text = f"about {duration_text(total)}, from the times of cells similar to {known} in this sweep"
    return text + f"; {missing} have no similar cell and are assumed to take as long" if missing else text
