"""What the user sees while a sweep works: a live display on a terminal, a line per cell elsewhere."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dcpbench.report.styles import style_of
from dcpbench.results import PASSING, Row

_FAILURES_SHOWN = 5


class ProgressDisplay:
    """Cells done and left, the running cell with the phase of each rank, what has failed so far."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._failures: list[Row] = []
        self._cell = ""
        self._phases: dict[int, str] = {}
        self._started = 0.0
        self._bar = Progress(
            TextColumn("cells"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("cells", total=total)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, cell: str) -> None:
        """A cell starts."""
        self._cell, self._phases, self._started = cell, {}, time.monotonic()

    def phase(self, rank: int, phase: str) -> None:
        """A rank of the running cell begins a phase."""
        self._phases[rank] = phase

    def end(self, row: Row) -> None:
        """A cell has its row."""
        self._done += 1
        self._cell = ""
        self._bar.update(self._task, completed=self._done)
        if row.status not in PASSING or row.flaky:
            self._failures.append(row)
        if not self._console.is_terminal:
            spent = f" {row.cell_s:.1f} s" if row.cell_s is not None else ""
            line = Text(f"[{self._done}/{self._total}] ")
            line.append(row.status, style_of(row.status))
            line.append(f"{' (flaky)' if row.flaky else ''} {row.cell}{spent}")
            if row.reason and (row.status != "pass" or row.flaky):
                line.append(f": {row.reason}")
            self._console.print(line, soft_wrap=True)

    def _render(self) -> Group:
        lines: list[Progress | Text] = [self._bar]
        if self._cell:
            spent = time.monotonic() - self._started
            phases = sorted(set(self._phases.values()))
            doing = ", ".join(phases) or "starting ranks"
            lines.append(_line(f"running  {self._cell}  {doing}  {spent:.0f} s"))
        for row in self._failures[-_FAILURES_SHOWN:]:
            line = _line("")
            line.append(f"{row.status:8}", style_of(row.status))
            line.append(f" {row.cell}: {row.reason}")
            lines.append(line)
        if len(self._failures) > _FAILURES_SHOWN:
            lines.append(_line(f"… and {len(self._failures) - _FAILURES_SHOWN} more before these"))
        return Group(*lines)


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
