"""End a sweep: its reports, the next command, and the exit status."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dcpbench.config.text import command_text, counted, done_text, path_text
from dcpbench.records.row import INTERRUPTED, exit_status
from dcpbench.records.store import ResultsError, stored_rows, write_csv
from dcpbench.sweep import driver

Say = Callable[[str], None]


def close(sweep: driver.Sweep, is_part: bool, status: int, began: float, say: Say) -> int:
    """End the ranks, write the reports, print the table, and return the exit status. The last line says how
    many cells are left, if there are any.

    Args:
        is_part: another part of the sweep can have cells that were not skipped.
        status: the exit status so far; 0 if only the rows decide it.
        began: when the command began, of `time.monotonic`.
    """
    try:
        sweep.end()
        rows = [*stored_rows(sweep.folder)]
    except ResultsError as wrong:
        sweep.interrupted_by = sweep.interrupted_by or wrong
        rows = [*sweep.log.rows.values()]
    what = "run" if sweep.plan.distinct < len(sweep.plan.cells) else "cell"
    done, complete = done_text(len(rows), len(sweep.plan.cells), what), len(rows) == len(sweep.plan.cells)
    if error := sweep.interrupted_by:
        first = "free disk space, then " if isinstance(error, ResultsError) and error.no_room else ""
        say(f"interrupted: {done}: {error}; {first}run: {command_text('resume', sweep.folder)}")
        return 1
    before = None
    if rows:
        before = _report(sweep.folder, say)
        if not is_part and all(row.status == "skip" for row in rows):
            say("every cell was skipped: nothing was measured")
        spent_s = time.monotonic() - began
        say(f"{counted(sweep.written, what)} in {spent_s:.1f} s, written to {sweep.folder}")
    for sentence in next_steps(sweep.folder, before, complete):
        say(sentence)
    if not complete:
        say(f"{'interrupted: ' if status == INTERRUPTED else ''}{done}")
    if is_part:
        return status or int(not complete or not all(row.is_ok for row in rows))
    return status or (exit_status(rows) if complete else 1)


def next_steps(folder: Path, before: Path | None, complete: bool) -> list[str]:
    """Return a line with the page, and one with the next command: resume where rows are missing, else compare
    with the sweep `before`."""
    page = folder / "report.html"
    lines = [f"page: {path_text(page)}"] if page.is_file() else []
    if not complete:
        lines.append(f"next: {command_text('resume', folder)}")
    elif before:
        lines.append(f"next: {command_text('compare', before, folder)}")
    return lines


def _report(folder: Path, say: Say) -> Path | None:
    """Write and print all reports, and say which could not be written. Return the sweep to compare with."""
    from dcpbench.analysis.cell_history import sweep_before
    from dcpbench.report.show import print_report, write_reports

    before = sweep_before(folder)
    for show in (write_csv, partial(write_reports, place=before), print_report):
        try:
            show(folder)
        except ResultsError as error:
            say(str(error))
    return before
