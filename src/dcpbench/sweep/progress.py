"""Show the progress of a sweep: a live display on a terminal, a line per cell elsewhere."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dcpbench.analysis.causes import short_reason
from dcpbench.config.text import cells_text, clipped, counted, duration_text, path_text, visible
from dcpbench.plan.plan import Plan
from dcpbench.records.row import Row, cell_seconds
from dcpbench.report.styles import style_of, text_of

_FAILURES_SHOWN = 5
_LEFT_EVERY_S = 1.0
_WORTH_TELLING_S = 60.0


def print_sentences(console: Console, *sentences: str | None) -> None:
    """Print sentences, each on a line that only the terminal wraps; None is left out."""
    for sentence in filter(None, sentences):
        console.print(text_of(sentence), soft_wrap=True)


def cells_sentence(plan: Plan, folder: Path) -> str:
    """Return the first line of a sweep: the cells that have no row yet, and the folder."""
    return f"{cells_text(plan.distinct, len(plan.cells))}; rows go to {path_text(folder)}"


def ranks_sentence(plan: Plan) -> str:
    """Return how many ranks the cells have."""
    sizes = sorted({cell.world_size for cell in plan.cells if not cell.skip})
    fewest = f"{sizes[0]} to " if len(sizes) > 1 else ""
    return f"{fewest}{counted(sizes[-1], 'rank')} starting" if sizes else "all cells are skipped"


@dataclass
class _Running:
    """A running cell: its start, and the phase of each rank."""

    note: str
    phases: dict[int, str] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        doing = ", ".join(sorted(set(self.phases.copy().values()))) or "starting ranks"
        note = f"({self.note}) " if self.note else ""
        return f"{note}{doing}  {time.monotonic() - self.since:.0f} s"


class ProgressDisplay:
    """Show the numbers of cells done and left, running cells with their phases, and the latest failures."""

    def __init__(
        self, console: Console, total: int, done: int = 0, titles: Mapping[str, str] | None = None
    ) -> None:
        """Show nothing yet; `titles` are the names to show for some cells."""
        self._console = console
        self._titles = titles or {}
        self._total = total
        self._done = done
        self._failed: list[tuple[str, str]] = []
        self._left_at = 0.0
        self._running: dict[str, _Running] = {}
        left = TextColumn("{task.fields[left]}")
        self._bar = Progress(
            "cells", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, console=console
        )
        self._task = self._bar.add_task("cells", total=total, completed=done, left="")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, cell: str, note: str = "") -> None:
        """Show a cell that starts, with a `note` in brackets."""
        self._running[cell] = _Running(note)

    def phase(self, cell: str, rank: int, phase: str, note: str = "") -> None:
        """Show the phase that a rank of a running cell begins; a note of the first rank is a line."""
        self._running[cell].phases[rank] = phase
        if note and not rank:
            print_sentences(self._console, f"{self._name(cell)}: {note}")

    def end(self, row: Row, left: Callable[[], float | None]) -> None:
        """Show the row of a cell; `left` estimates the seconds for the remaining cells."""
        self._done += 1
        self._running.pop(row.cell, None)
        self._bar.update(self._task, completed=self._done)
        if not row.is_ok:
            self._failed.append((row.status, f" {self._name(row.cell)}: {short_reason(row.flat())}"))
        if self._console.is_terminal:
            # Not after each of many short cells: the estimate iterates over all that are left.
            if time.monotonic() - self._left_at >= _LEFT_EVERY_S:
                self._left_at, seconds = time.monotonic(), left()
                self._bar.update(self._task, left=f"about {duration_text(seconds)} left" if seconds else "")
            return
        took_s = cell_seconds(row)
        spent = "" if took_s is None else f" {took_s:.1f} s"
        line = Text(f"[{self._done}/{self._total}] ").append(row.status, style_of(row.status))
        line.append(f"{' (flaky)' if row.flaky else ''} {self._name(row.cell)}{spent}")
        if row.reason and (row.status != "pass" or row.flaky):
            line.append(visible(f": {clipped(short_reason(row.flat()))}"))
        self._console.print(line, soft_wrap=True)
        # After each tenth of the sweep, unless it ends soon.
        tenths = 10 * self._done // self._total
        if tenths > 10 * (self._done - 1) // self._total:
            seconds = left() or 0.0
            if seconds >= _WORTH_TELLING_S:
                self._console.print(Text(f"about {duration_text(seconds)} left"))

    def _name(self, cell: str) -> str:
        return self._titles.get(cell, cell)

    def _render(self) -> Group:
        lines: list[Progress | Text] = [self._bar]
        running = list(self._running.items())
        lines += [_line(f"running  {self._name(cell)}  {about}") for cell, about in running]
        for status, text in self._failed[-_FAILURES_SHOWN:]:
            lines.append(_line("").append(f"{status:8}", style_of(status)).append(visible(text)))
        if (more := len(self._failed) - _FAILURES_SHOWN) > 0:
            lines.append(_line(f"… and {more} more before these"))
        return Group(*lines)


def _line(text: str) -> Text:
    return Text(visible(text), no_wrap=True, overflow="ellipsis")
