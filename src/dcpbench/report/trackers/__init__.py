"""`python -m dcpbench.report log <sweep>... --to <tracker>`: the rows, where a team looks at its runs anyway.

Logging a sweep again adds nothing that is there: cells that have run again since replace their earlier runs.
A module here for each tracker has `log(sweep, folder, project)` and `seen_with(folder)`; only the one that is
asked for is imported, and with it the package that it needs. None of them opens a connection: what they
write stays on this machine.
"""

import argparse
import hashlib
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dcpbench.analysis.frame import read_sweeps
from dcpbench.records.row import AXES, NESTED, Row, column_types
from dcpbench.records.store import SUPERSEDED_JSONL, ResultsError, stored_rows

_TRACKERS = ("tensorboard", "mlflow", "wandb")
_PARAMETERS = (*AXES, "repeat", "overrides")
_TAGS = (
    "status",
    "reason",
    "first_mismatch",
    "torch_version",
    "git_commit",
    "started_at",
    "config_digest",
    "code_digest",
)
_LONGEST_TAG = 500
"""Characters: what every tracker takes and a table can show; the row has the whole."""


@dataclass(frozen=True)
class LoggedCell:
    """One row. `key` is no other cell's of any sweep, `digest` no other row's.

    Metrics are the columns that are numbers and those that are yes (1) or no (0); what was not measured is
    not among them. `started_s` is seconds since 1970, `ok` whether it came out as it should.
    """

    key: str
    digest: str
    name: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    started_s: float
    repeat: int
    ok: bool

    @property
    def ended_s(self) -> float:
        """When it had ended, as far as that is known."""
        return self.started_s + self.metrics.get("cell_s", 0.0)


@dataclass(frozen=True)
class LoggedSweep:
    """One sweep, and the machine and versions that it ran on."""

    key: str
    name: str
    environment: dict[str, str]
    cells: list[LoggedCell]


Logged = Counter[str]
"""How many cells are `new` to a tracker, `replaced` what it had of them, or were there as the `same`."""


def main(arguments: list[str]) -> int:
    """Log sweeps to a tracker.

    Raises:
        dcpbench.records.store.ResultsError: a folder holds no results, or the tracker's package is missing.
    """
    given = _parser().parse_args(arguments)
    try:
        tracker = importlib.import_module(f"dcpbench.report.trackers.{given.to}")
    except ModuleNotFoundError as error:
        raise ResultsError(
            f"--to {given.to}: the package {error.name} is not installed: pip install 'dcpbench[{given.to}]'"
        ) from None
    folder: Path = given.dir or Path("outputs") / given.to
    sweeps = read_sweeps(given.sweep)
    for sentence in sweeps.left_out:
        sys.stderr.write(f"dcpbench.report: {sentence}\n")
    for place, environment in sweeps.environments.items():
        sweep = logged_sweep(Path(place), environment)
        logged: Logged = tracker.log(sweep, folder, given.project)
        counts = [f"{logged['new']} cells logged"]
        counts += [f"{logged['replaced']} replaced, which have run again"] if logged["replaced"] else []
        counts += [f"{logged['same']} were there already"] if logged["same"] else []
        print(f"{place}: {', '.join(counts)}")
    print(f"in {folder}; to see it: {tracker.seen_with(folder)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    log = argparse.ArgumentParser(
        prog="python -m dcpbench.report log",
        description="Write the rows of sweeps as runs of a tracker, on this machine; nothing is sent.",
    )
    log.add_argument("sweep", type=Path, nargs="+", help="a sweep's folder, or one that holds sweeps")
    log.add_argument("--to", choices=_TRACKERS, required=True)
    log.add_argument("--dir", type=Path, help="where to write (outputs/<tracker>)")
    log.add_argument(
        "--project",
        type=_name,
        default="dcpbench",
        help="the project (wandb), experiment (mlflow) or folder (tensorboard) of the runs (%(default)s)",
    )
    return log


def _name(text: str) -> str:
    if not text or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} is no name")
    return text


def log_cells(
    sweep: LoggedSweep,
    digest_there: Callable[[LoggedCell], str | None],
    write: Callable[[LoggedCell], None],
) -> Logged:
    """Write each cell that is not there as it is now.

    Args:
        digest_there: the digest of what is there of a cell; None for nothing, empty where a write broke off.
        write: puts a cell there, in place of what is there of it.
    """
    logged: Logged = Counter()
    for cell in sweep.cells:
        before = digest_there(cell)
        logged["new" if before is None else "same" if before == cell.digest else "replaced"] += 1
        if before != cell.digest:
            write(cell)
    return logged


def logged_sweep(folder: Path, environment: dict[str, Any]) -> LoggedSweep:
    """A sweep's folder as trackers take it."""
    rows = list(stored_rows(folder))
    key = _sweep_key(folder, rows)
    known = {name: str(value) for name, value in environment.items() if value not in (None, [], "")}
    return LoggedSweep(key, folder.resolve().name, known, [_logged_cell(key, row) for row in rows])


def _logged_cell(sweep: str, row: Row) -> LoggedCell:
    values = {name: row[name] for name in (*_PARAMETERS, *_TAGS)}
    texts = {name: str(value)[:_LONGEST_TAG] for name, value in values.items() if value not in (None, "")}
    return LoggedCell(
        key=_digest(sweep, row.cell),
        digest=_digest(json.dumps(row.flat(), sort_keys=True, default=str)),
        name=row.cell,
        params={name: texts[name] for name in _PARAMETERS if name in texts},
        metrics=_metrics(row),
        tags={name: texts[name] for name in _TAGS if name in texts},
        started_s=_seconds(row.started_at),
        repeat=row.repeat or 0,
        ok=row.is_ok,
    )


def _metrics(row: Row) -> dict[str, float]:
    others = {*_PARAMETERS, *NESTED, "schema_version"}
    numbers = (name for name, kind in column_types().items() if kind.python is not str and name not in others)
    values = {name: row[name] for name in numbers}
    return {
        name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)
    }


def _sweep_key(folder: Path, rows: Iterable[Row]) -> str:
    """The same before and after a resume, a move or a thinning: of the row that was written first, which
    may have been replaced since."""
    replaced = stored_rows(folder, SUPERSEDED_JSONL)
    first = min(
        ((row.started_at or "", row.torch_version or "") for row in (*rows, *replaced)), default=("", "")
    )
    return _digest(folder.resolve().name, *first)


def _seconds(moment: str | None) -> float:
    try:
        return datetime.fromisoformat(moment or "").timestamp()
    except ValueError:
        return 0.0


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
