"""Write and read the files of rows in a sweep's folder.

The driver alone appends a row to `results.jsonl` when its cell ends, and flushes it: a sweep that dies keeps
all its rows. Values too large for a column are the row's details, written to `details.jsonl` before the row.
A row is complete without details, and details without a row are ignored. `results.csv` has the columns of the
rows. `measurements.jsonl` has each value that a rank measured; the rows' metrics are made from them. Values
that are read are checked against the types of their columns, and never evaluated.

A resumed sweep moves the rows that are no longer valid to `superseded.jsonl`, so that `results.jsonl` has one
row for each cell. If a file cannot be read or written, a ResultsError is raised and no part of a row is left.
"""

import csv
import errno
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpbench.config.text import visible
from dcpbench.core.metrics import METRICS, Measurement
from dcpbench.core.statuses import STATUSES
from dcpbench.records import files
from dcpbench.records.plain_values import ColumnType
from dcpbench.records.row import REQUIRED, SCHEMA_VERSION, Row, RunKey, column_types, columns

RESULTS_JSONL = "results.jsonl"
DETAILS_JSONL = "details.jsonl"
RESULTS_CSV = "results.csv"
MEASUREMENTS_JSONL = "measurements.jsonl"
SUPERSEDED_JSONL = "superseded.jsonl"
ENVIRONMENT_JSON = "environment.json"
SWEEP_JSON = "sweep.json"

_FORMULA = (*"=+-@", *"\uff1d\uff0b\uff0d\uff20")
"""The characters that begin a formula in a spreadsheet, in both widths."""
_VERSION = "schema version"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer of 64 bits",
    float: "a finite number",
    str: "a text",
    dict: "an object",
}
_ATTEMPT = ("cell", "repeat", "started_at")
"""The columns that connect details with their row: the start distinguishes runs before and after a resume."""

Details = Mapping[tuple[object, ...], dict[str, Any]]


class ResultsError(Exception):
    """A results folder cannot be read or written to: one line that names the file and the reason. `no_room`:
    the disk is full."""

    no_room = False


@dataclass(frozen=True)
class Line:
    """A line of `results.jsonl`, and its row, or the reason why it is ignored; a blank line has neither."""

    content: bytes
    row: Row | None
    ignored: str = ""

    @property
    def torn(self) -> bool:
        """Whether its write was interrupted; only the last line can be."""
        return not self.content.endswith(b"\n")


def append_row(folder: Path, *rows: Row) -> None:
    """Append rows to `results.jsonl` in a single write, after their details to `details.jsonl`; then both are
    on disk. If that fails, raise a ResultsError and leave no part of a row."""
    lines = [row.flat() for row in rows]
    details = [({name: line[name] for name in _ATTEMPT}, line.pop("details")) for line in lines]
    _append(folder / DETAILS_JSONL, [about | {"details": of} for about, of in details if of])
    _append(folder / RESULTS_JSONL, lines)


def append_measurements(folder: Path, row: Row, measurements: Iterable[Measurement]) -> None:
    """Append the measurements of a cell to `measurements.jsonl` in a single write."""
    units = {name: spec.unit for name, spec in METRICS.items()}
    about = {"cell": row.cell, "repeat": row.repeat}
    _append(
        folder / MEASUREMENTS_JSONL,
        [
            {**about, **vars(measurement), "unit": units.get(measurement.metric, "s")}
            for measurement in measurements
        ],
    )


def _append(path: Path, contents: Sequence[dict[str, Any]]) -> None:
    if not contents:
        return
    lines = "".join(f"{json.dumps(content)}\n" for content in contents).encode()
    with _writing(path), files.open_to_append(path) as out:
        before = out.seek(0, os.SEEK_END)
        try:
            while lines:  # a write can be short; the next one says why
                lines = lines[out.write(lines) :]
            os.fsync(out.fileno())
        except OSError:
            out.truncate(before)
            raise


def write_csv(folder: Path, rows: Iterable[Row] | None = None) -> None:
    """Write the columns of rows, without others those of `results.jsonl`, to `results.csv`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns(), extrasaction="ignore")
    writer.writeheader()
    for row in stored_rows(folder) if rows is None else rows:
        writer.writerow({name: csv_entry(value) for name, value in row.flat().items()})
    write_whole(folder / RESULTS_CSV, [text.getvalue().encode()])


def csv_entry(value: object) -> object:
    """Return a value for a CSV file, in which a spreadsheet runs no text as a formula."""
    if not isinstance(value, str):
        return value
    shown = visible(value, but="\n\t")
    if shown.lstrip()[:1] not in _FORMULA:
        return shown
    try:
        float(shown)
    except ValueError:
        return f"'{shown}"
    return shown


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_whole(path, [(json.dumps(content, indent=2) + "\n").encode()])


def read_rows(folder: Path, details: bool = True) -> tuple[list[Row], list[str]]:
    """Return the rows of a sweep's folder, with their `details` or without, and a sentence for each damaged
    line.

    Raises:
        ResultsError: the folder has no sweep, or one of another version.
    """
    rows: list[Row] = []
    damaged: list[str] = []
    line_of: dict[RunKey, int] = {}
    ignored: set[str] = set()
    try:
        known, damaged = _read_details(folder) if details else (None, [])
        for number, line in enumerate(_lines(folder / RESULTS_JSONL, known), start=1):
            remarks = [f"{line.ignored}; ignored"] if line.ignored else []
            ignored.add(line.ignored)
            if line.row:
                rows.append(line.row)
                if (status := line.row.status) not in STATUSES:
                    unknown = f"status {short_text(status)} is not one of {', '.join(STATUSES)}"
                    remarks.append(f"{unknown}; it counts as not ok")
                first = line_of.setdefault(line.row.run, number)
                if first != number:
                    remarks.append(f"repeats the run of line {first}; both are shown")
            if remarks:
                damaged.append(f"{folder / RESULTS_JSONL}:{number}: {'; '.join(remarks)}")
    except OSError as error:
        why = f"no sweep here ({RESULTS_JSONL}: {error.strerror})"
        if folder.is_file():
            why = f"a file, not the folder of a sweep: try {folder.parent}"
        raise ResultsError(f"{folder}: {why}") from None
    if not rows and len(ignored) == 1 and (version := ignored.pop()).startswith(_VERSION):
        raise ResultsError(f"{folder}: all of its rows have {version}")
    return rows, damaged


def read_lines(folder: Path, name: str = RESULTS_JSONL, kept: str = "") -> Iterator[Line]:
    """Yield the lines of `results.jsonl`, or of `superseded.jsonl`, up to one that is too long; none if the
    file does not exist. Their rows are without `details`, except for the one that is `kept`."""
    known = _read_details(folder)[0] if kept else {}
    try:
        yield from _lines(
            folder / name, {attempt: {kept: of[kept]} for attempt, of in known.items() if kept in of}
        )
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResultsError(f"{folder / name} cannot be read: {error.strerror}") from None


def stored_rows(folder: Path, name: str = RESULTS_JSONL) -> Iterator[Row]:
    """Yield the valid rows of a sweep without their `details`."""
    return (line.row for line in read_lines(folder, name) if line.row)


def _lines(path: Path, details: Details | None = None) -> Iterator[Line]:
    """Yield the lines of a file of rows, with their `details`; with None these are left out."""
    types = column_types()
    for content in files.lines(path):
        if not content.strip():
            yield Line(content, None)
            continue
        try:
            row = read_row(content, types)
        except ValueError as error:
            yield Line(content, None, str(error))
            continue
        row["details"] = (details or {}).get(tuple(row.get(name) for name in _ATTEMPT), {})
        yield Line(content, Row.of(row))


def _read_details(folder: Path) -> tuple[Details, list[str]]:
    """Return the details in `details.jsonl` by attempt, and a sentence for each damaged line."""
    path = folder / DETAILS_JSONL
    details: dict[tuple[object, ...], dict[str, Any]] = {}
    damaged: list[str] = []
    try:
        for number, content in enumerate(files.lines(path), start=1):
            try:
                line = parse(content)
                if not isinstance(line["details"], dict):
                    raise TypeError
                details[tuple(line[name] for name in _ATTEMPT)] = line["details"]
            except (ValueError, KeyError, TypeError):
                damaged.append(f"{path}:{number}: not the details of a row; ignored")
    except FileNotFoundError:
        pass
    except OSError as error:
        damaged.append(f"{path} cannot be read: {error.strerror}")
    return details, damaged


def keep_lines(folder: Path, keep: Iterable[Line], take_out: Iterable[Line] = ()) -> None:
    """Make `results.jsonl` the lines to `keep`, in their order, and add those that are taken out to
    `superseded.jsonl`. If the process is killed meanwhile, no line is lost, and none is twice in a file."""
    if taken := dict.fromkeys(line.content for line in take_out):
        known = dict.fromkeys(line.content for line in read_lines(folder, SUPERSEDED_JSONL))
        write_whole(folder / SUPERSEDED_JSONL, known | taken)
    write_whole(folder / RESULTS_JSONL, (line.content for line in keep))


def keep_beside(folder: Path, cells: Collection[str]) -> None:
    """Remove from `measurements.jsonl` those of other cells, and from `details.jsonl` a torn line."""
    for name, kept in (
        (MEASUREMENTS_JSONL, lambda line: _cell_of(line) in cells),
        (DETAILS_JSONL, lambda line: line.endswith(b"\n")),
    ):
        if os.path.lexists(folder / name):
            write_whole(folder / name, filter(kept, files.lines(folder / name)))


def _cell_of(line: bytes) -> str | None:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return cell if isinstance(cell := json.loads(line)["cell"], str) else None
    return None


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file of a sweep's folder atomically."""
    with _writing(path):
        files.replace(path, parts)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        wrong = ResultsError(f"{path} cannot be written to: {error.strerror}")
        wrong.no_room = error.errno in _NO_ROOM
        raise wrong from None


def read_row(line: bytes, types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Return the row in a line, given the `types` of all columns.

    Raises:
        ValueError: the line is not a row of this version; the message says why.
    """
    if len(line) == files.LONGEST_LINE:
        raise ValueError(f"longer than the {len(line):,} bytes of any row, and hides all lines after it")
    if not line.endswith(b"\n"):
        raise ValueError("a torn row, whose write was interrupted")
    row = parse(line)
    if not isinstance(row, dict):
        raise ValueError(f"{short_text(row)}, expected a row")
    if (version := row.get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(f"{_VERSION} {short_text(version)}, this dcpbench reads {SCHEMA_VERSION}")
    for name, kind in types.items():
        if (name in row or name in REQUIRED) and not kind.fits(row.get(name)):
            value = f"{name} is {short_text(row[name])}" if name in row else f"no {name}"
            raise ValueError(f"{value}, expected {_TYPE_NAMES[kind.python]}")
    return dict.fromkeys(REQUIRED) | row


def parse(content: bytes) -> Any:
    """Return the JSON value in a text. Unlike `json.loads`, refuse NaN, infinities and lone surrogates.

    Raises:
        ValueError: it is not JSON; the message names the place and the problem.
    """
    try:
        value = json.loads(content.decode(), parse_constant=_refuse)
        if b"\\ud" in content.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def short_text(value: object) -> str:
    """Return a short text for any value."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text):,} characters)"
