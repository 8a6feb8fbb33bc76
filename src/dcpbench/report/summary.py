"""The tables of a report, as frames of text; the rows that they are made from are read in `reading`."""

import pandas as pd

from dcpbench.analysis.failures import again, failures
from dcpbench.analysis.frame import AXES, Sweeps, is_true, read_environment, read_frame, read_sweeps
from dcpbench.analysis.repeats import one_a_cell, runs_text, status_text, without_repeat
from dcpbench.records.store import CHECKS
from dcpbench.report.fault_detection import detected, detection
from dcpbench.report.labels import SHORT, mark, plain, seconds

__all__ = [
    "AXES",
    "Sweeps",
    "again",
    "counts",
    "detected",
    "detection",
    "failures",
    "headline",
    "read_environment",
    "read_frame",
    "read_sweeps",
    "summary",
    "tables",
]

_ALWAYS = ("parallel", "compile", "save")
COSTS = ("save_s", "save_stall_s", "load_s", "raw_write_s", "raw_read_s", "cell_s")
_IF_MEASURED = ("raw_write_s", "raw_read_s")


def tables(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """What a report shows of a sweep: the cells in which no fault was planted, or none could be, and how
    the planted faults were seen; what would be empty is left out."""
    without_faults = frame[frame["fault_seen"].isna()]
    return [shown for shown in (summary(without_faults), detection(frame)) if len(shown)]


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """The results table as text, one row a cell: the axes that vary, the verdict, the checks, the costs in
    seconds. Of several runs of a cell it is the worst verdict and the median costs."""
    cells = one_a_cell(frame)
    table = pd.DataFrame({axis: cells[axis].map(plain) for axis in varying(cells, _ALWAYS)})
    others = without_repeat(cells["overrides"]).map(_beside_axes)
    if others.nunique() > 1:
        table["overrides"] = others
    table["status"] = status_text(cells).map(plain)
    if cells["runs"].gt(1).any():
        table["runs"] = runs_text(cells)
    for check in CHECKS:
        if cells[check].notna().any():
            table[SHORT[check]] = cells[check].map(mark)
    for cost in (name for name in COSTS if name not in _IF_MEASURED or cells[name].notna().any()):
        table[cost] = cells[cost].map(seconds)
    return table


def varying(frame: pd.DataFrame, always: tuple[str, ...] = ()) -> list[str]:
    """The axes in which the rows differ, and those that are shown always."""
    axes = [axis for axis in ("sweep", *AXES) if axis in frame]
    return [axis for axis in axes if axis in always or frame[axis].nunique(dropna=False) > 1]


def headline(frame: pd.DataFrame) -> str:
    """How many cells there are, in how many runs if these are more, and what they came to."""
    cells = len(one_a_cell(frame))
    runs = f" in {len(frame)} runs" if len(frame) > cells else ""
    return f"{cells} cells{runs}: {counts(frame)}" if cells else "0 cells: no rows yet"


def counts(frame: pd.DataFrame) -> str:
    """How many rows have which status, as one phrase."""
    phrases = [f"{number} {plain(status)}" for status, number in frame["status"].value_counts().items()]
    if flaky := is_true(frame["flaky"]).sum():
        phrases.append(f"{flaky} flaky")
    if frame["fault_seen"].notna().any():
        phrases.append(f"{detected(frame)} faults seen")
    return ", ".join(phrases)


def _beside_axes(overrides: str) -> str:
    """The overrides that no axis column shows."""
    return " ".join(item for item in overrides.split() if item.partition("=")[0] not in AXES)
