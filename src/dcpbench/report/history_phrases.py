"""The sentences of a history, the same on whatever they are written."""

import math
from collections import Counter
from collections.abc import Sequence

import pandas as pd

from dcpbench.analysis.cell_history import Folded, Story
from dcpbench.analysis.cell_matrix import History
from dcpbench.analysis.change_points import LEAST_SIDE, Change
from dcpbench.analysis.status_codes import ABSENT, KINDS
from dcpbench.report.labels import plain, seconds

_COMMIT = 8
_DAY = 10


def headline(told: History, cells: Sequence[Story]) -> list[str]:
    """How many sweeps there are, of when, and how the newest one is."""
    sweeps = told.sweeps
    there = [cell for cell in cells if cell.last_seen == len(sweeps) - 1]
    well = sum(cell.now.well for cell in there)
    days = list(dict.fromkeys(plain(sweeps["started_at"].iloc[place])[:_DAY] for place in (0, -1)))
    newest = _sweep(sweeps, len(sweeps) - 1)
    return [
        f"{len(sweeps)} sweep{'s' if len(sweeps) > 1 else ''}, {' to '.join(days)}",
        f"The newest, {newest}: {well} of {len(there)} cells as they should be",
    ]


def origin(sweeps: pd.DataFrame, at: int) -> str:
    """The commit and the torch version of a sweep; where they changed, also those of the one before."""
    return ", ".join(
        f"{name} {_turn(sweeps[column], at, length)}"
        for name, column, length in (("commit", "git_commit", _COMMIT), ("torch", "torch_version", 80))
    )


def cost_change(change: Change, metric: str, sweeps: pd.DataFrame) -> str:
    """By how much a cost changed, and at which sweep."""
    values = f"{amount(metric, change.before)} to {amount(metric, change.after)}"
    return f"{percent(change)} since {_sweep(sweeps, change.at)}, {values}"


def status_change(cell: Story, sweeps: pd.DataFrame) -> str:
    """What a cell came to before, what since, and since which sweep."""
    if cell.since is None or cell.before is None:
        return ""
    return f"{cell.before.label} to {cell.now.label} since {_sweep(sweeps, cell.since)}"


def percent(change: Change) -> str:
    """A change as a share of what was before."""
    return f"{(change.ratio - 1) * 100:+.0f} %" if change.ratio < 10 else f"{change.ratio:.0f} times"


def amount(metric: str, value: float) -> str:
    """A value of a metric, with its unit where its name has one."""
    if math.isnan(value):
        return "-"
    if metric.endswith("_s"):
        return f"{seconds(value) if value >= 0.1 else f'{value:.3g}'} s"
    return f"{value:,.0f}{' B' if metric.endswith('_bytes') else ''}" if value >= 100 else f"{value:.4g}"


def commonest(cells: Sequence[Story], told: History, most: int = 5) -> list[str]:
    """The newest sweeps at which something changed, and in how many cells: one cause has many effects."""
    counts: dict[int, Counter[str]] = {}
    for cell in cells:
        if cell.since is not None:
            counts.setdefault(cell.since, Counter())[_turned(cell)] += 1
        for cost in cell.costs:
            for change in cost.changes:
                what = f"{cost.metric} {'up' if change.ratio > 1 else 'down'}"
                counts.setdefault(change.at, Counter())[what] += 1
    newest = sorted(counts, reverse=True)[:most]
    return [f"{_sweep(told.sweeps, at)}: {_in_cells(counts[at])}" for at in newest]


def _turned(cell: Story) -> str:
    if not cell.now.well:
        return f"now {cell.now.label}"
    return f"now {cell.now.label}, well" if cell.before and cell.before.well else f"{cell.now.label} again"


def _in_cells(counts: Counter[str]) -> str:
    return "; ".join(f"{what} in {number}" for what, number in counts.most_common())


def summed_up(fold: Folded, cells: Sequence[Story], told: History) -> list[str]:
    """What is not told one by one, in a sentence each."""
    sentences = []
    if fold.even:
        kinds = Counter(cell.now.label for cell in fold.even)
        said = ", ".join(f"{number} {label}" for label, number in kinds.most_common())
        sentences.append(f"{_cells(fold.even)} all along the same and well, with steady costs: {said}")
    if fold.earlier:
        sentences.append(
            f"{_cells(fold.earlier)} well now, in which something changed only before the sweeps shown"
        )
    if sentences:
        sentences[-1] += " (--all shows them)"
    if gone := [cell for cell in cells if cell.last_seen < len(told.sweeps) - 1]:
        last = max(cell.last_seen for cell in gone)
        sentences.append(f"{_cells(gone)} not in the newest sweep, last in {_sweep(told.sweeps, last)}")
    return sentences


def caution(told: History) -> str:
    """Why nothing, or little, can be said of changes; nothing if enough can."""
    number = len(told.sweeps)
    if number == 1:
        return "One sweep: there is no history yet; the next one in this folder starts it."
    if not (told.kinds != ABSENT).sum(axis=1).max() > 1:
        return "No cell is in more than one sweep (by its axes and overrides), so nothing can be compared."
    if number < 2 * LEAST_SIDE:
        return f"Changes of costs are looked for from {2 * LEAST_SIDE} sweeps on."
    return ""


def legend(letters: str) -> str:
    """What these letters stand for."""
    return ", ".join(f"{kind.letter} {kind.label}" for kind in reversed(KINDS) if kind.letter in letters)


def _cells(cells: Sequence[Story]) -> str:
    return f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"


def _sweep(sweeps: pd.DataFrame, at: int) -> str:
    return f"{sweeps['name'].iloc[at]}, {origin(sweeps, at)}"


def _turn(column: "pd.Series[str]", at: int, length: int) -> str:
    now = plain(column.iloc[at])[:length]
    before = plain(column.iloc[at - 1])[:length] if at else now
    return now if now == before else f"{before} → {now}"
