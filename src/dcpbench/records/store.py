"""How rows are written and read.

Rows are appended to `results.jsonl` whole and flushed the moment a cell ends, by the driver alone: a
sweep that dies keeps every row it had. `results.csv` is its columns, written beside and renamed, so that it
is there whole or not at all. `measurements.jsonl` has every value that a rank measured, one a line, as the
rows' metrics were made of them. What is read is held against the types of the columns, and nothing in it is
ever evaluated.

A sweep that is resumed takes the rows that do not stand any more out of `results.jsonl`, which so has
one row for each cell at every moment, and keeps them in `superseded.jsonl`.
"""

import csv
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dcpbench.records.metrics import METRICS, Measurement
from dcpbench.records.row import AXES, STATUSES, Row, columns
from dcpbench.records.row_reader import UNKNOWN, parse, read_row, value_text

RESULTS_JSONL = "results.jsonl"
RESULTS_CSV = "results.csv"
MEASUREMENTS_JSONL = "measurements.jsonl"
SUPERSEDED_JSONL = "superseded.jsonl"
ENVIRONMENT_JSON = "environment.json"
SWEEP_JSON = "sweep.json"

_CELL = ("cell", "overrides", "repeat", *AXES)
"""The columns in which rows of one cell are equal."""


class ResultsError(Exception):
    """A results folder cannot be read or written to: one line that says which file and why."""


@dataclass(frozen=True)
class Line:
    """Where a line of `results.jsonl` lies, and the row in it without its `details`.

    No row: it is not one, or of another schema version. `torn`: the last line, broken off in the middle.
    """

    start: int
    length: int
    row: Row | None
    torn: bool


def append_row(folder: Path, row: Row) -> None:
    """Add one row to `results.jsonl` in a single write, and have it on disk before returning.

    Raises:
        ResultsError: it cannot be written, and nothing of it is left.
    """
    _append(folder / RESULTS_JSONL, [row.flat()])


def append_measurements(folder: Path, row: Row, measurements: Iterable[Measurement]) -> None:
    """Add what was measured in a cell to `measurements.jsonl`, in a single write.

    Raises:
        ResultsError: it cannot be written, and nothing of it is left.
    """
    units = {name: spec.unit for name, spec in METRICS.items()}
    about = {"cell": row.cell, "repeat": row.repeat}
    _append(
        folder / MEASUREMENTS_JSONL,
        [{**about, **asdict(one), "unit": units.get(one.metric, "s")} for one in measurements],
    )


def _append(path: Path, contents: Sequence[dict[str, Any]]) -> None:
    if not contents:
        return
    line = "".join(json.dumps(_finite(one), allow_nan=False) + "\n" for one in contents).encode()
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
    """Write `results.csv`: the columns of the rows of `results.jsonl`.

    Raises:
        ResultsError: it cannot be written.
    """
    with_name = folder / RESULTS_CSV
    beside = with_name.with_suffix(".csv.tmp")
    with _writing(with_name), beside.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=columns(), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row.flat() for row in stored_rows(folder))
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
                row, remarks = read_row(line, number)
                if row is not None:
                    rows.append(row)
                    if row["status"] not in (*STATUSES, UNKNOWN):
                        known = ", ".join(STATUSES)
                        status = value_text(row["status"])
                        remarks.append(f"status {status} is none of {known}; it counts as not ok")
                    first = line_of.setdefault(tuple(row.get(name) for name in _CELL), number)
                    if first != number:
                        remarks.append(f"the cell of line {first} once more; both are shown")
                if remarks:
                    damaged.append(f"{path}:{number}: {'; '.join(remarks)}")
    except OSError as error:
        if folder.is_file():
            why = f"a file, where the folder of a sweep was expected: try {folder.parent}"
        else:
            why = f"no sweep here ({RESULTS_JSONL}: {error.strerror})"
        raise ResultsError(f"{folder}: {why}") from None
    return rows, damaged


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


def keep_measurements(folder: Path, cells: Collection[str]) -> None:
    """Have `measurements.jsonl` hold just what was measured in these cells.

    Raises:
        ResultsError: it cannot be written.
    """
    path = folder / MEASUREMENTS_JSONL
    if not path.exists():
        return
    with path.open("rb") as lines:
        _replace(path, (line for line in lines if _cell_of(line) in cells))


def _cell_of(line: bytes) -> str | None:
    try:
        measured, _ = parse(line)
    except ValueError:
        return None
    return measured.get("cell") if isinstance(measured, dict) else None


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
    row, remarks = read_row(line, 0)
    return None if row is None or remarks else Row.of({**row, "details": {}})


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, and the check that saw them says so."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
