"""A history in the terminal: a strip of letters and lines of blocks for each cell, the newest sweep right."""

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TextIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from dcpbench.analysis.cell_history import Cost, Story, folded
from dcpbench.analysis.cell_matrix import History
from dcpbench.analysis.change_points import Change
from dcpbench.analysis.status_codes import KINDS
from dcpbench.report import history_phrases as phrases
from dcpbench.report.styles import BAD, style_of
from dcpbench.report.terminal import visible

_BLOCKS = "▁▂▃▄▅▆▇█"
_LEAST_SPAN = 0.3
"""The blocks span this share of the median at least, so that noise stays low."""
_BETWEEN = 2
_LEAST_STRIP = 10
_WIDTH_OF_A_FILE = 120


def rendered(told: History, cells: Sequence[Story], remarks: Sequence[str], every: bool, file: TextIO) -> str:
    """A history as it is to be written to this file: with styles for a terminal, and as wide as that is."""
    own = Console(file=file)
    page = io.StringIO()
    console = Console(
        file=page,
        width=own.width if own.is_terminal else _WIDTH_OF_A_FILE,
        force_terminal=own.is_terminal,
        color_system=own.color_system,  # type: ignore[arg-type]
    )
    for line in lines(told, cells, remarks, every, console.width):
        console.print(line, soft_wrap=True)
    return page.getvalue()


def strip_width(cells: Sequence[Story], width: int) -> int:
    """How many sweeps fit into lines so wide."""
    return max(_LEAST_STRIP, width - _labels(cells) - 2 * _BETWEEN - _latest(cells))


def blocks(medians: npt.NDArray[np.float64]) -> str:
    """One block for each sweep, a space where nothing was measured."""
    measured = medians[~np.isnan(medians)]
    if not measured.size:
        return " " * len(medians)
    low, span = measured.min(), max(np.ptp(measured), _LEAST_SPAN * abs(float(np.median(measured))), 1e-300)
    steps = np.minimum((medians - low) / span * len(_BLOCKS), len(_BLOCKS) - 1)
    return "".join(" " if np.isnan(step) else _BLOCKS[int(step)] for step in steps)


def lines(
    told: History, cells: Sequence[Story], remarks: Sequence[str], every: bool, width: int
) -> Iterator[Text]:
    """The lines of a history, no longer than `width`."""
    strip = min(strip_width(cells, width), len(told.sweeps))
    fold = folded(cells, strip, every)
    yield from (_wrapped(said, width, "bold") for said in phrases.headline(told, cells))
    if newest := phrases.commonest(cells, told):
        yield Text("\nWhat changed, and in how many cells:", style="bold")
        yield from (_wrapped(f"  {sentence}", width) for sentence in newest)
    for cell in fold.shown:
        yield Text()
        yield from _cell(cell, told, strip, width, _labels(cells))
    yield Text()
    letters = "".join(KINDS[kind].letter for cell in fold.shown for kind in cell.kinds[-strip:])
    if letters:
        yield _wrapped(f"{phrases.legend(letters)}. {_extent(told, strip)}", width, "dim")
    for sentence in filter(None, [phrases.caution(told), *phrases.summed_up(fold, cells, told)]):
        yield _wrapped(sentence, width)
    yield from (_wrapped(remark, width, BAD) for remark in remarks)


def _extent(told: History, strip: int) -> str:
    if strip == len(told.sweeps):
        return "One sign a sweep, the newest right"
    return f"One sign a sweep, the newest right: {strip} of {len(told.sweeps)}"


def _cell(cell: Story, told: History, strip: int, width: int, labels: int) -> Iterator[Text]:
    yield Text(visible(cell.name), style="bold")
    first = len(told.sweeps) - strip
    line = Text(f"{'  status':{labels}}  ")
    for kind, same in groupby(cell.kinds[first:]):
        line.append(KINDS[kind].letter * len(list(same)), style=style_of(KINDS[kind].status))
    style = style_of(cell.now.status)
    yield line.append("  ").append(cell.now.label, style=style)
    margin = labels + _BETWEEN
    if cell.since is not None and cell.since >= first:
        said = phrases.status_change(cell, told.sweeps)
        yield from _pointed(margin + cell.since - first, said, width, margin, style)
    if cell.reason and not cell.now.well:
        room = max(width - margin, 20)
        said = visible(" ".join(cell.reason.split()))
        yield Text(" " * margin + (said if len(said) <= room else f"{said[: room - 3]}..."), style="dim")
    for cost in cell.costs:
        if not np.isnan(cost.latest):
            yield from _cost(cost, told, first, width, labels)


def _cost(cost: Cost, told: History, first: int, width: int, labels: int) -> Iterator[Text]:
    line = Text(f"  {cost.metric:{labels - 2}}  ")
    for start, end, style in _stretches(cost.changes, first, len(told.sweeps)):
        line.append(blocks(cost.medians[first:])[start - first : end - first], style=style)
    yield line.append(f"  {phrases.amount(cost.metric, cost.latest)}")
    for change in cost.changes[-1:]:
        if change.at >= first:
            more = sum(other.at >= first for other in cost.changes) - 1
            said = phrases.cost_change(change, cost.metric, told.sweeps)
            said += f"; {more} more before" if more else ""
            margin = labels + _BETWEEN
            yield from _pointed(margin + change.at - first, said, width, margin, _style(change))


def _stretches(changes: Sequence[Change], first: int, end: int) -> Iterator[tuple[int, int, str]]:
    """The sweeps between changes, and the style of their blocks: of the change before them."""
    edges = [(first, "")] + [(change.at, _style(change)) for change in changes if change.at >= first]
    for (start, style), (stop, _) in zip(edges, [*edges[1:], (end, "")], strict=True):
        yield start, stop, style


def _style(change: Change) -> str:
    return "red" if change.ratio > 1 else "green"


def _pointed(column: int, said: str, width: int, margin: int, style: str) -> Iterator[Text]:
    """What is said of a column, beside an arrow that points up to it, or below."""
    if column + 2 + len(said) <= width:
        yield Text(f"{' ' * column}^ {said}", style=style)
    elif margin + len(said) + 1 <= column:
        yield Text(f"{' ' * (column - len(said) - 1)}{said} ^", style=style)
    else:
        yield Text(f"{' ' * column}^", style=style)
        yield _wrapped(" " * min(margin, max(2, width - len(said))) + said, width, style)


def _wrapped(said: str, width: int, style: str = "") -> Text:
    """A sentence in lines no wider than this, the later ones as far in as the first and two more."""
    margin = " " * (len(said) - len(said.lstrip(" ")))
    lines = [""]
    for word in visible(said).split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(f"{margin}  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else f"{margin}{word}"
    return Text("\n".join(lines), style=style)


def _labels(cells: Sequence[Story]) -> int:
    return 2 + max([len("status"), *(len(cost.metric) for cell in cells[:1] for cost in cell.costs)])


def _latest(cells: Sequence[Story]) -> int:
    amounts = (phrases.amount(cost.metric, cost.latest) for cell in cells for cost in cell.costs)
    return max([len(cell.now.label) for cell in cells] + [len(said) for said in amounts], default=0)
