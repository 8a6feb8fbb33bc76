"""The end of a sweep: its rows in order, its reports, what to do next, and the exit status."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dcpbench.config.text import counted
from dcpbench.records.row import INTERRUPTED, exit_status
from dcpbench.records.store import ResultsError, write_csv
from dcpbench.sweep import driver, next_steps, parts
from dcpbench.sweep.sweep_folder import SweepFolder

Say = Callable[[str], None]


def close(sweep: driver.Sweep, folder: SweepFolder, status: int, say: Say) -> int:
    """End the ranks, put the rows in order, write the reports, and print the table.

    Args:
        status: the exit status as far as it is known, 0 if it depends on the rows alone.

    Returns:
        the exit status.
    """
    try:
        sweep.end()
        names = [job.cell.name for job in sweep.jobs]
        if not sweep.interrupted_by and (changed := sweep.log.settle(names)):
            say(changed)
    except ResultsError as wrong:
        sweep.interrupted_by = sweep.interrupted_by or wrong
    if error := sweep.interrupted_by:
        room = "make room, and " if isinstance(error, ResultsError) and error.no_room else ""
        say(f"broken off: {error}; {room}go on with resume={folder.path}")
        return 1
    rows = list(sweep.log.rows.values())
    complete = len(rows) == len(sweep.jobs)
    if status == INTERRUPTED or not complete:
        why = "interrupted: " if status == INTERRUPTED else ""
        say(f"{why}{len(rows)} of {len(sweep.jobs)} cells have a row")
    if rows:
        before = _report(folder.path, say)
        if not folder.part and all(row.status == "skip" for row in rows):
            say("every cell was skipped: nothing was measured")
        spent_s = time.monotonic() - sweep.started
        say(f"{counted(sweep.written, 'cell')} in {spent_s:.1f} s, written to {folder.path}")
        for sentence in next_steps.sentences(folder.path, before, complete):
            say(sentence)
        if folder.part:
            say(f"part={folder.part}: {parts.progress(folder.path.parent)}")
            say(f"next: {next_steps.command('report', folder.path.parent)}")
    if folder.part:  # others may have what is no skip
        return status or int(not complete or not all(row.is_ok for row in rows))
    return status or (exit_status(rows) if complete else 1)


def _report(folder: Path, say: Say) -> Path | None:
    """Show the rows in all ways; what cannot be written is reported. Return the sweep to compare with."""
    from dcpbench.analysis.history_rows import sweep_before
    from dcpbench.report.show import print_report, write_reports

    before = sweep_before(folder)
    for show in (write_csv, partial(write_reports, place=before), print_report):
        try:
            show(folder)
        except ResultsError as error:
            say(str(error))
    return before
