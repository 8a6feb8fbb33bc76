"""The row: the one record that a cell leaves behind, and how rows are written and read.

Rows are appended to `results.jsonl` whole and flushed the moment a cell ends, by the driver alone: a
sweep that dies keeps every row it had. `results.csv` is the same without `details`, written beside
and renamed, so that it is there whole or not at all. What is read is held against the types of `Row`,
and nothing in it is ever evaluated.

A sweep that is resumed takes the rows that do not stand any more out of `results.jsonl`, which so has
one row for each cell at every moment, and keeps them in `superseded.jsonl`.
"""

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from dcpbench.records import jsonl
from dcpbench.records.schema import Columns, told

SCHEMA_VERSION = 1

RESULTS_JSONL = "results.jsonl"
RESULTS_CSV = "results.csv"
SUPERSEDED_JSONL = "superseded.jsonl"
ENVIRONMENT_JSON = "environment.json"
SWEEP_JSON = "sweep.json"

STATUSES = ("crash", "timeout", "error", "fail", "vacuous", "xpass", "xfail", "skip", "pass")
"""Every status that a cell may come to, the worst first."""

UNKNOWN = "unknown"
"""Stands for the status of a row that does not tell it; it counts as not well."""

PASSING = frozenset({"pass", "xfail", "skip"})
"""The statuses of a cell that came out as it should: its ranks may stay, its checkpoints go, and the
exit status of the sweep stays 0."""

WRONG_CONFIGURATION = 2
INTERRUPTED = 130
"""Exit statuses beside `exit_status`: nothing was started; the user broke off."""

CHECKS = (
    "model_equal",
    "optim_equal",
    "extra_equal",
    "loss_resume_equal",
    "loss_twin_close",
    "state_twin_close",
    "loss_resume_close",
    "contract_held",
    "checkpoint_whole",
    "save_harmless",
)
"""The checks of a cell, each a column: true, false, or null where it did not apply."""


class ResultsError(Exception):
    """A results folder cannot be read or written to: one line that says which file and why."""


@dataclass
class Row:
    """One cell. Flat but for `details`; a new column goes to the end, none is ever renamed.

    Times are seconds of the slowest rank: `build_s`, `train_s` and `verify_s` over the whole cell,
    `save_s`, `save_stall_s` and `load_s` for one checkpoint (the median of the cell's). Sizes are
    bytes: `checkpoint_bytes` of the last checkpoint, `disk_bytes` of all files among the cell's
    checkpoints at its end, the peaks of the rank that needed most. `raw_write_s` and `raw_read_s` are what
    as many bytes take in plain files, without DCP. `shared_cell_s` stands for all times where other cells
    ran on the same devices: good for an estimate, and for no comparison. What was not measured is null.

    `flaky` says whether a second try came to another status than the first one, null where there was
    none; the row is the second try's, `details` has the first. `config_digest`, `code_digest` and
    `torch_version` say what was measured; `config_dir` is the user's folder of groups, without which
    the cell cannot be asked for again. Rows that differ in nothing but `repeat` are runs of one cell.
    """

    cell: str
    status: str
    reason: str | None
    scenario: str
    parallel: str
    compile: bool
    save: str
    model: str
    optimizer: str
    storage: str
    world_size: int | None
    device: str | None
    seed: int
    overrides: str
    model_equal: bool | None = None
    optim_equal: bool | None = None
    extra_equal: bool | None = None
    loss_resume_equal: bool | None = None
    loss_twin_close: bool | None = None
    state_twin_close: bool | None = None
    powered: bool | None = None
    max_abs_diff: float | None = None
    first_mismatch: str | None = None
    loss_at_save: float | None = None
    loss_resumed: float | None = None
    loss_continued: float | None = None
    loss_twin: float | None = None
    build_s: float | None = None
    train_s: float | None = None
    save_s: float | None = None
    save_stall_s: float | None = None
    load_s: float | None = None
    verify_s: float | None = None
    cell_s: float | None = None
    checkpoint_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    torch_version: str | None = None
    git_commit: str | None = None
    started_at: str | None = None
    schema_version: int = SCHEMA_VERSION
    load_parallel: str | None = None
    loss_resume_close: bool | None = None
    contract_held: bool | None = None
    checkpoint_whole: bool | None = None
    save_harmless: bool | None = None
    fault: str | None = None
    fault_seen: bool | None = None
    flaky: bool | None = None
    config_digest: str | None = None
    code_digest: str | None = None
    config_dir: str | None = None
    disk_bytes: int | None = None
    repeat: int | None = None
    raw_write_s: float | None = None
    raw_read_s: float | None = None
    shared_cell_s: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


COLUMNS = tuple(item.name for item in fields(Row) if item.name != "details")

_TYPED = Columns.of(Row)
_CELL = {*_TYPED.required, "load_parallel", "fault", "repeat"} - {"status", "reason"}


def column_types() -> dict[str, type]:
    """The type of each column of a row and of `details`: bool, int, float, str or dict."""
    return {name: kind.python for name, kind in _TYPED.kinds.items()}


@dataclass(frozen=True)
class Line:
    """Where a line of `results.jsonl` lies, and the row in it without its `details`.

    No row: it is not one, or of another schema version. `torn`: the last line, broken off in the middle.
    """

    start: int
    length: int
    row: Row | None
    torn: bool


def exit_status(rows: Iterable[Row]) -> int:
    """0 when every row is as it should be and at least one cell ran, else 1.

    A cell with a planted fault is as it should be when the fault was seen for what it is. A flaky cell
    never is: that its second try passed does not say what its first one was.
    """
    well, ran = True, False
    for row in rows:
        well = well and as_it_should_be(row)
        ran = ran or row.status != "skip"
    return 0 if well and ran else 1


def forget_times(row: Row) -> None:
    """Make null what is in seconds but `shared_cell_s`: other cells ran on the same devices."""
    row.shared_cell_s = row.cell_s
    for column in COLUMNS:
        if column.endswith("_s") and column != "shared_cell_s":
            setattr(row, column, None)


def as_it_should_be(row: Row) -> bool:
    """Whether a row is what one wants to see."""
    if row.flaky:
        return False
    return row.status in PASSING if row.fault_seen is None else row.fault_seen


def append_row(folder: Path, row: Row) -> None:
    """Add one row to `results.jsonl` in a single write, and have it on disk before returning.

    Raises:
        ResultsError: it cannot be written, and nothing of it is left.
    """
    line = (json.dumps(_finite(asdict(row)), allow_nan=False) + "\n").encode()
    path = folder / RESULTS_JSONL
    with _writing(path), path.open("ab", buffering=0) as out:
        before = out.seek(0, os.SEEK_END)
        try:
            while line:  # what is not taken at once is asked for again, to hear why
                line = line[out.write(line) :]
            os.fsync(out.fileno())
        except OSError:
            out.truncate(before)
            raise


def write_csv(folder: Path) -> None:
    """Write `results.csv`: the rows of `results.jsonl` without `details`, one column each.

    Raises:
        ResultsError: it cannot be written.
    """
    with_name = folder / RESULTS_CSV
    beside = with_name.with_suffix(".csv.tmp")
    with _writing(with_name), beside.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(asdict(row) for row in stored_rows(folder))
    beside.replace(with_name)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is there whole or not at all.

    Raises:
        ResultsError: it cannot be written.
    """
    _replace(path, [(json.dumps(content, indent=2) + "\n").encode()])


def read_rows(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a sweep's folder as plain dictionaries, and a sentence for each damaged line.

    What a line holds of a row is kept: a value that its column cannot hold becomes null (a `status`
    `unknown`, a `cell` the number of its line, `details` empty). A line that is no row at all (a crash in
    the middle of a write) or one of another schema version is left out. Columns that an older row does
    not have yet are not in its dictionary; columns that are not known here are kept as they are.

    Raises:
        ResultsError: the folder holds no `results.jsonl`, or it cannot be read.
    """
    path = folder / RESULTS_JSONL
    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    line_of: dict[tuple[object, ...], int] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                row, remarks = _read_row(line, number)
                if row is not None:
                    rows.append(row)
                    first = line_of.setdefault(tuple(row.get(name) for name in _CELL), number)
                    if first != number:
                        remarks.append(f"the cell of line {first} once more; both are shown")
                if remarks:
                    damaged.append(f"{path}:{number}: {'; '.join(remarks)}")
    except OSError as error:
        raise ResultsError(_why_no_sweep(folder, error)) from None
    return rows, damaged


def _why_no_sweep(folder: Path, error: OSError) -> str:
    if folder.is_file():
        return f"{folder}: a file, where the folder of a sweep was expected: try {folder.parent}"
    return f"{folder}: no sweep here ({RESULTS_JSONL}: {error.strerror})"


def _read_row(line: bytes, number: int) -> tuple[dict[str, Any] | None, list[str]]:
    if not line.strip():
        return None, []
    try:
        row, remarks = jsonl.parse(line)
    except ValueError as error:
        return None, [_why_no_row(line, str(error))]
    if not isinstance(row, dict):
        return None, [f"{told(row)}, where a row was expected; left out"]
    if row.get("schema_version") != SCHEMA_VERSION:
        return None, [_why_not_this_version(row)]
    for name in _TYPED.misfits(row):
        remarks.append(_put_right(row, name, number))
    if row["status"] not in (*STATUSES, UNKNOWN):
        remarks.append(
            f"status {told(row['status'])} is none of {', '.join(STATUSES)}; it counts as not well"
        )
    return row, remarks


def _why_no_row(line: bytes, error: str) -> str:
    if not line.endswith(b"\n"):
        return "not a whole row, broken off in the middle of a write, left out; resume= runs its cell again"
    if b"\0" in line:
        return "not a whole row, NUL bytes in it (the disk or the machine went down), left out"
    return f"not a whole row, left out: {error}"


def _why_not_this_version(row: dict[str, Any]) -> str:
    version, commit = row.get("schema_version"), row.get("git_commit")
    if version is None:
        return "no schema_version in it, so no row of dcpbench; left out"
    by = f"dcpbench at commit {commit}" if isinstance(commit, str) else "the dcpbench that wrote it"
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    return (
        f"a row of schema version {told(version)}, this dcpbench reads {SCHEMA_VERSION}; left out; "
        f"{'a newer dcpbench' if newer else by} reads it"
    )


def _put_right(row: dict[str, Any], name: str, number: int) -> str:
    found = f"{name} is {told(row[name])}" if name in row else f"no {name}"
    row[name] = {"status": UNKNOWN, "cell": f"line {number}", "details": {}}.get(name)
    shown = "empty" if row[name] == {} else row[name] or "null"
    return f"{found}, where {_TYPED.kinds[name].name} was expected; shown as {shown}"


def read_lines(folder: Path, name: str = RESULTS_JSONL) -> Iterator[Line]:
    """The lines of `results.jsonl` one after another, of which only one is held at a time; none if there
    is no such file. So those of `superseded.jsonl`, asked for by name."""
    try:
        rows = (folder / name).open("rb")
    except FileNotFoundError:
        return
    with rows:
        start = 0
        for line in rows:
            torn = not line.endswith(b"\n")
            yield Line(start, len(line), None if torn else _row(line), torn)
            start += len(line)


def stored_rows(folder: Path, name: str = RESULTS_JSONL) -> Iterator[Row]:
    """The rows of a sweep without their `details`, one after another."""
    return (line.row for line in read_lines(folder, name) if line.row)


def keep_lines(folder: Path, keep: Iterable[Line], take_out: Iterable[Line] = ()) -> None:
    """Have `results.jsonl` hold just the lines to `keep`, in their order, and `superseded.jsonl` those
    that were taken out. A process that is killed meanwhile leaves the one file old or new, and no line
    lost or twice in the other.

    Raises:
        ResultsError: one of them cannot be written.
    """
    path, history = folder / RESULTS_JSONL, folder / SUPERSEDED_JSONL
    with path.open("rb") as rows:
        if taken := dict.fromkeys(_bytes(rows, line) for line in take_out):
            before = history.read_bytes() if history.exists() else b""
            known = set(before.splitlines(keepends=True))
            new = [line for line in taken if line not in known]
            _replace(history, [before, *new])
        _replace(path, (_bytes(rows, line) for line in keep))


def _bytes(rows: BinaryIO, line: Line) -> bytes:
    rows.seek(line.start)
    return rows.read(line.length)


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    beside = path.with_name(path.name + ".tmp")
    with _writing(path):
        with beside.open("wb") as out:
            out.writelines(parts)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(f"{path} cannot be written to: {error.strerror}") from None


def _row(line: bytes) -> Row | None:
    """The row that a line holds, if nothing about it is damaged."""
    try:
        read, remarks = jsonl.parse(line)
    except ValueError:
        return None
    if remarks or not isinstance(read, dict) or read.get("schema_version") != SCHEMA_VERSION:
        return None
    if _TYPED.misfits(read):
        return None
    return Row(**{name: read[name] for name in COLUMNS if name in read})


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, and the check that saw them says so."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
