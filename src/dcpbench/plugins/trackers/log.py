"""`dcpbench log <sweep>... --to <tracker>`: write rows to the tracker that a team already uses.

Logging a sweep again adds no duplicates: cells that have run again replace their earlier runs. Each tracker
has a module with two functions. `log(sweep, folder, project)` writes the cells that have `changed` and
returns the digests that were logged before; `seen_with(folder)` returns the command to view them. Only the
module of the requested tracker, and so its package, is imported. No tracker opens a connection: all data
stays on this machine.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dcpbench.analysis.frame import read_sweeps
from dcpbench.analysis.query import QueryError
from dcpbench.config.text import counted, visible
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import digest_of
from dcpbench.core.plugins import plugins
from dcpbench.records.row import NESTED, Row, cell_seconds, column_types
from dcpbench.records.store import SUPERSEDED_JSONL, ResultsError, stored_rows
from dcpbench.report.styles import complain

_PARAMETERS = (*AXES, "repeat", "overrides")
_OUTCOME = ("status", "reason", "first_mismatch")
_ORIGIN = ("torch_version", "target_commit", "dcpbench_commit", "started_at", "config_digest", "code_digest")
_TAGS = (*_OUTCOME, *_ORIGIN)
_LONGEST_TAG = 500
"""Characters; every tracker accepts that many. The row has the complete text."""


@dataclass(frozen=True)
class LoggedCell:
    """A row for trackers. `key` is unique among the cells of all sweeps, `digest` among all rows.

    Metrics are the columns with numbers, and those with yes (1) or no (0), except missing values. `started_s`
    and `ended_s` are seconds since 1970, or start at 0 if unknown.
    """

    row: Row
    key: str
    digest: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    started_s: float
    ended_s: float


@dataclass(frozen=True)
class LoggedSweep:
    """One sweep, with its machine and versions."""

    key: str
    name: str
    environment: dict[str, str]
    cells: list[LoggedCell]

    def changed(self, before: Mapping[str, str]) -> list[LoggedCell]:
        """Return the cells whose digests differ from those in a tracker, given by key."""
        return [cell for cell in self.cells if before.get(cell.key) != cell.digest]


def main(sweeps: Sequence[Path], to: str, dir: Path | None = None, project: str = "dcpbench") -> int:
    """Log sweeps to a tracker.

    Raises:
        dcpbench.records.store.ResultsError: a folder contains no results, or the tracker's package is
        missing. QueryError: the project's name is invalid.
    """
    if not project or "/" in project or project.startswith("."):
        raise QueryError(f"--project: {project!r} is not a valid name")
    try:
        modules = {name: module for plugin in plugins() for name, module in plugin.trackers.items()}
        tracker = importlib.import_module(modules[to])
    except ModuleNotFoundError as error:
        raise ResultsError(
            f"--to {to}: the package {error.name} is not installed: pip install 'dcpbench[{to}]'"
        ) from None
    folder = dir or Path("outputs") / to
    read = read_sweeps(sweeps)
    for sentence in read.left_out:
        complain(sentence)
    for place, environment in read.environments.items():
        sweep = logged_sweep(Path(place), environment)
        before = tracker.log(sweep, folder, project)
        changed = sweep.changed(before)
        new = sum(cell.key not in before for cell in changed)
        counts = [f"{counted(new, 'cell')} logged"]
        if replaced := len(changed) - new:
            counts.append(f"{replaced} replaced after running again")
        if same := len(sweep.cells) - len(changed):
            counts.append(f"{same} already logged")
        print(visible(f"{place}: {', '.join(counts)}"))
    print(f"written to {folder}; to view it: {tracker.seen_with(folder)}")
    return 0


def logged_sweep(folder: Path, environment: dict[str, Any]) -> LoggedSweep:
    """Read a sweep for trackers. Its key is derived from the first row ever written, so that it stays the
    same after a resume, a move or a removal of rows."""
    rows = {row.cell: row for row in stored_rows(folder)}.values()
    replaced = stored_rows(folder, SUPERSEDED_JSONL)
    moments = [(row.started_at or "", row.torch_version or "") for row in (*rows, *replaced)]
    name = folder.resolve().name
    key = digest_of([name, *min(moments, default=())])
    known = {name: str(value) for name, value in environment.items() if value not in (None, [], "")}
    return LoggedSweep(key, name, known, [_logged_cell(key, row) for row in rows])


def _logged_cell(sweep: str, row: Row) -> LoggedCell:
    values = {name: row[name] for name in (*_PARAMETERS, *_TAGS)}
    texts = {name: str(value)[:_LONGEST_TAG] for name, value in values.items() if value not in (None, "")}
    numbers = {
        name: row[name]
        for name, kind in column_types().items()
        if kind.python is not str and name not in (*_PARAMETERS, *NESTED, "schema_version")
    }
    try:
        started_s = datetime.fromisoformat(row.started_at or "").timestamp()
    except ValueError:
        started_s = 0.0
    return LoggedCell(
        row=row,
        key=digest_of([sweep, row.cell]),
        digest=digest_of(row.flat()),
        params={name: texts[name] for name in _PARAMETERS if name in texts},
        metrics={name: float(value) for name, value in numbers.items() if value is not None},
        tags={name: texts[name] for name in _TAGS if name in texts},
        started_s=started_s,
        ended_s=started_s + (cell_seconds(row) or 0.0),
    )
