"""`dcpbench history <folder>...`: print each cell over many sweeps, one character per sweep."""

import io
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich.text import Text

from dcpbench.analysis.cell_history import KINDS, CellHistory, Cost, History, group_by_display, history
from dcpbench.analysis.change_points import FALSE_ALARMS, LEAST_EFFECT, LEAST_SIDE
from dcpbench.analysis.frame import plain_rows, read_sweeps
from dcpbench.analysis.query import known_metric, parse_condition, split_names
from dcpbench.analysis.runs import without_numbers
from dcpbench.code.sources import COMMITS, short
from dcpbench.config.text import clipped, counted
from dcpbench.core.metrics import METRICS
from dcpbench.records.store import ResultsError
from dcpbench.report.document import (
    Content,
    Table,
    axis_text,
    change_style,
    document_text,
    first_sentences,
    format_of,
    quantity_text,
    width_of,
    write_output,
)

_FORMATS = {".txt": "table", ".md": "markdown", ".json": "json"}

_MARKDOWN_STRIP = 40
"""The number of newest sweeps that Markdown shows."""

_COMMIT = 8
_DAY = 10
_BLOCKS = "▁▂▃▄▅▆▇█"
_LEAST_SPAN = 0.3
"""The blocks span at least this share of the median, so that noise stays small."""
_PADDING = 6
"""The blanks on both sides of three columns."""
_LEAST_STRIP = 10
_NEWEST_CHANGES = 5
_COLUMNS = ["cell", "", "newest right", "now", "last change"]
_REASON = 200


def main(
    folders: Sequence[Path],
    where: Sequence[str] = (),
    metric: Sequence[str] = (),
    last: int | None = None,
    all: bool = False,
    format: str | None = None,
    output: Path | None = None,
) -> int:
    """Show cells over many sweeps; raise ResultsError if they cannot be read or written."""
    conditions = [parse_condition(condition) for condition in where]
    metrics = tuple(dict.fromkeys(map(known_metric, split_names(metric)))) or default_metrics()
    written_as = format_of(format, output, _FORMATS)
    sweeps = read_sweeps(folders, details=False)
    if sweeps.frame.empty:
        problem = "; ".join(
            [f"no rows in {counted(len(sweeps.environments), 'sweep')}", *sweeps.left_out[:1]]
        )
        raise ResultsError(f"{', '.join(map(str, folders))}: {problem}")
    timeline = history(sweeps, metrics, last, conditions)
    if written_as == "json":
        text = _json(timeline, sweeps.left_out)
    else:
        out = io.StringIO() if output else sys.stdout
        in_markdown = min(_MARKDOWN_STRIP, len(timeline.sweeps))
        strip = in_markdown if written_as == "markdown" else strip_length(timeline, width_of(out))
        parts = contents(timeline, first_sentences(sweeps.left_out), all, strip)
        text = document_text(parts, written_as, out)
    write_output(text, output)
    return 0


def epilog() -> str:
    """Return the end of the help text."""
    metrics = ", ".join(default_metrics())
    return f"""\
Cells are matched by their axes, other overrides and configuration. Runs of one cell (repeats=N) have their
worst status and their median cost. A test finds changes of a cost of at least {LEAST_EFFECT:.0%}; at most
{FALSE_ALARMS:.0%} of histories show one that is not real (docs/compare.md).

Without --metric: {metrics}."""


def default_metrics() -> tuple[str, ...]:
    """Return the metrics that are shown by default."""
    return tuple(spec.name for spec in METRICS.values() if spec.history)


def _json(timeline: History, remarks: Sequence[str]) -> str:
    """Return all sweeps and cells, with every median and change; sweeps are referred to by position."""
    cells = [
        {
            "name": cell.name,
            "config_digest": cell.axes["config_digest"],
            "axes": {axis: value for axis, value in cell.axes.items() if axis != "config_digest"},
            "statuses": "".join(KINDS[kind].letter for kind in cell.kinds),
            "ok": cell.current_status.ok,
            "last_seen": cell.present_in[-1],
            "since": cell.last_change_of_status and cell.last_change_of_status[0],
            "reason": cell.reason or None,
            "reconfigured": cell.reconfigured and {"at": cell.present_in[0], "keys": cell.reconfigured},
            "costs": {
                cost.metric: {
                    "medians": [None if np.isnan(value) else float(value) for value in cost.medians],
                    "changes": list(map(asdict, cost.changes)),
                }
                for cost in cell.costs
            },
        }
        for cell in timeline.cells
    ]
    statuses = {kind.letter: {"label": kind.label, "ok": kind.ok} for kind in KINDS}
    content = {
        "sweeps": plain_rows(timeline.sweeps),
        "cells": cells,
        "statuses": statuses,
        "remarks": [*remarks],
    }
    return json.dumps(content, allow_nan=False) + "\n"


def strip_length(timeline: History, width: int) -> int:
    """Return how many sweeps fit into lines of this width."""
    lengths = [[len("status")], [0]]
    for cell in timeline.cells:
        lengths[0] += [len(cost.metric) for cost in cell.costs]
        lengths[1] += [
            len(cell.current_status.label),
            *(len(quantity_text(cost.metric, cost.latest)) for cost in cell.costs),
        ]
    space = width - sum(map(max, lengths)) - _PADDING
    return min(len(timeline.sweeps), max(_LEAST_STRIP, space))


def contents(timeline: History, remarks: Sequence[str], every: bool, strip: int) -> list[Content]:
    """Return the newest sweep, the latest changes, and the cells over the newest `strip` sweeps."""
    fold = group_by_display(timeline.cells, strip, every)
    first, reasons = len(timeline.sweeps) - strip, set[str]()
    lines = [line for cell in fold["shown"] for line in _lines(cell, timeline, first, reasons)]
    table = pd.DataFrame(lines, columns=_COLUMNS, dtype=object)
    letters = {KINDS[kind].letter for cell in fold["shown"] for kind in cell.kinds[-strip:]}
    legend = ", ".join(f"{kind.letter} {kind.label}" for kind in reversed(KINDS) if kind.letter in letters)
    of = "" if strip == len(timeline.sweeps) else f": {strip} of {len(timeline.sweeps)}"
    sentences = [
        f"{legend}. One character per sweep, the newest on the right{of}" if letters else "",
        _caution(timeline),
        *_summed_up(fold, timeline),
    ]
    newest = pd.DataFrame(_newest_changes(timeline), columns=["sweep", "change", "cells"])
    changed = Content([Table("What changed, and in how many cells", newest, heading="sweep")])
    strips = [Table("", table, ("now",), heading="cell", below="last change")] if lines else []
    return [
        Content(headline="\n".join(_headline(timeline))),
        *([changed] if len(newest) else []),
        Content(strips, damaged=remarks, headline="\n".join(filter(None, sentences))),
    ]


def sparkline(medians: npt.NDArray[np.float64]) -> str:
    """Return one block for each sweep, or a space if nothing was measured."""
    measured = medians[~np.isnan(medians)]
    if not measured.size:
        return " " * len(medians)
    low, span = measured.min(), max(np.ptp(measured), _LEAST_SPAN * abs(float(np.median(measured))), 1e-300)
    steps = np.minimum((medians - low) / span * len(_BLOCKS), len(_BLOCKS) - 1)
    return "".join(" " if np.isnan(step) else _BLOCKS[int(step)] for step in steps)


def _lines(
    cell: CellHistory, timeline: History, first: int, reasons: set[str]
) -> Iterator[tuple[object, ...]]:
    """Yield the lines of a cell (`_COLUMNS`) from the sweep `first` on. A reason that is among `reasons`, but
    for its numbers, is not printed again."""
    signs = Text()
    for kind, same in groupby(cell.kinds[first:]):
        signs.append(KINDS[kind].letter * len(list(same)), style=KINDS[kind].style)
    changes = {}  # by sweep: where the cell got its configuration and its status, if it ever had others
    if cell.reconfigured is not None:
        keys = ", ".join(f"{key}: {old} → {new}" for key, (old, new) in cell.reconfigured.items())
        changes[cell.present_in[0]] = (
            f"other configuration since {_sweep(timeline.sweeps, cell.present_in[0])}: {keys}"
        )
    if cell.last_change_of_status:
        at, before = cell.last_change_of_status
        changes[at] = f"{before.label} to {cell.current_status.label} since {_sweep(timeline.sweeps, at)}"
    texts = [text for at, text in changes.items() if at >= first]
    if cell.reason and not cell.current_status.ok:
        reason = clipped(" ".join(cell.reason.split()), _REASON)
        texts.append(reason if without_numbers(reason) not in reasons else "reason as above")
        reasons.add(without_numbers(reason))
    _point_at(signs, [at - first for at in changes], cell.current_status.style)
    name = cell.name
    if cell.replaced:
        name += f" (configuration until {timeline.sweeps['name'].iloc[cell.present_in[-1]]})"
    yield name, "status", signs, cell.current_status.label, "; ".join(texts)
    for cost in cell.costs:
        if not np.isnan(cost.latest):
            yield name, *_cost_line(cost, timeline, first)


def _cost_line(cost: Cost, timeline: History, first: int) -> tuple[object, ...]:
    signs = Text(sparkline(cost.medians[first:]))
    seen = [change for change in cost.changes if change.at >= first]
    edges = [*(change.at for change in seen), len(timeline.sweeps)]
    for change, end in zip(seen, edges[1:], strict=True):
        signs.stylize(change_style(cost.metric, change.ratio), change.at - first, end - first)
    text = ""
    if seen:
        last = seen[-1]
        more = f"; {len(seen) - 1} more before" if len(seen) > 1 else ""
        values = f"{quantity_text(cost.metric, last.before)} to {quantity_text(cost.metric, last.after)}"
        step = f"{(last.ratio - 1) * 100:+.0f} %" if last.ratio < 10 else f"{last.ratio:.0f} times"
        text = f"{step} since {_sweep(timeline.sweeps, last.at)}, {values}{more}"
        _point_at(signs, [last.at - first], change_style(cost.metric, last.ratio))
    return cost.metric, signs, quantity_text(cost.metric, cost.latest), text


def _point_at(signs: Text, places: Sequence[int], style: str) -> None:
    """Add a line below that points to the characters at these places."""
    arrows = {place for place in places if place >= 0}
    if arrows:
        signs.append(
            "\n" + "".join("^" if at in arrows else " " for at in range(max(arrows) + 1)), style=style
        )


def _headline(timeline: History) -> list[str]:
    """Count the sweeps, give their days, and summarize the newest."""
    sweeps = timeline.sweeps
    present = [cell for cell in timeline.cells if cell.present_in[-1] == len(sweeps) - 1]
    good = sum(cell.current_status.ok for cell in present)
    days = dict.fromkeys(axis_text(sweeps["started_at"].iloc[place])[:_DAY] for place in (0, -1))
    newest = _sweep(sweeps, len(sweeps) - 1)
    return [
        f"{counted(len(sweeps), 'sweep')}, {' to '.join(days)}",
        f"The newest, {newest}: {good} of {len(present)} cells as expected",
    ]


def _newest_changes(timeline: History) -> list[tuple[str, str, str]]:
    """Return the changes at the newest sweeps, and in how many cells."""
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for cell in timeline.cells:
        if cell.reconfigured is not None:
            counts[cell.present_in[0]]["other configuration"] += 1
        if cell.last_change_of_status:
            at, before = cell.last_change_of_status
            label, ok = cell.current_status.label, cell.current_status.ok
            now = f"now {label}, ok" if before.ok else f"{label} again"
            counts[at][now if ok else f"now {label}"] += 1
        for cost in cell.costs:
            for change in cost.changes:
                counts[change.at][f"{cost.metric} {'up' if change.ratio > 1 else 'down'}"] += 1
    newest = sorted(counts, reverse=True)[:_NEWEST_CHANGES]
    return [
        (_sweep(timeline.sweeps, at), change, str(number))
        for at in newest
        for change, number in counts[at].most_common()
    ]


def _summed_up(fold: Mapping[str, Sequence[CellHistory]], timeline: History) -> Iterator[str]:
    """Count the cells that are not listed, one sentence for each group."""
    labels = Counter(cell.current_status.label for cell in fold["steady"])
    steady = ", ".join(f"{number} {label}" for label, number in labels.most_common())
    for group, text in (
        ("steady", f"unchanged and ok, with steady costs: {steady}"),
        ("earlier", "ok now, changed only before the sweeps that are shown"),
        ("replaced", "with a configuration that was replaced later"),
    ):
        if fold[group]:
            yield f"{counted(len(fold[group]), 'cell')} {text} (--all lists them)"
    newest = len(timeline.sweeps) - 1
    if missing := [cell for cell in timeline.cells if cell.present_in[-1] < newest and not cell.replaced]:
        last = max(cell.present_in[-1] for cell in missing)
        newest_of_them = _sweep(timeline.sweeps, last)
        yield f"{counted(len(missing), 'cell')} not in the newest sweep, last in {newest_of_them}"


def _caution(timeline: History) -> str:
    """Say why changes cannot be found; empty if they can."""
    number = len(timeline.sweeps)
    if number == 1:
        return "One sweep: a history needs at least two in this folder."
    if all(len(cell.present_in) == 1 for cell in timeline.cells):
        return "No cell is in more than one sweep (by axes, overrides and configuration)."
    if number < 2 * LEAST_SIDE:
        return f"Changes of costs need at least {2 * LEAST_SIDE} sweeps."
    return ""


def _sweep(sweeps: pd.DataFrame, at: int) -> str:
    """Return a sweep's name, its commit and its torch version; if these changed, also those before. The
    commit is that of the user's targets; dcpbench's is added if there is none, or if it changed."""
    both = sweeps.iloc[max(0, at - 1) : at + 1]
    target, ours, torch = (
        list(dict.fromkeys(short(axis_text(value), _COMMIT) for value in both[column].dropna()))
        for column in (*COMMITS, "torch_version")
    )
    parts = [f"commit {' → '.join(target)}"] if target else []
    parts += [f"dcpbench {' → '.join(ours) or '-'}"] if not target or len(ours) > 1 else []
    return ", ".join([str(sweeps["name"].iloc[at]), *parts, f"torch {' → '.join(torch) or '-'}"])
