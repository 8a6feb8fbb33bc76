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
import errno
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpbench.core.metrics import METRICS, Measurement
from dcpbench.records import files
from dcpbench.records.row import AXES, STATUSES, Row, columns
from dcpbench.records.row_reader import UNKNOWN, read_row, value_text

RESULTS_JSONL = "results.jsonl"
RESULTS_CSV = "results.csv"
MEASUREMENTS_JSONL = "measurements.jsonl"
SUPERSEDED_JSONL = "superseded.jsonl"
ENVIRONMENT_JSON = "environment.json"
SWEEP_JSON = "sweep.json"
PARTS = "*-part-*-of-*"
"""The folders of the parts of a sweep (`part=2/4`), in the folder of the whole."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CELL = ("cell", "overrides", "repeat", *AXES)
"""The columns in which rows of one cell are equal."""


class ResultsError(Exception):
    """A results folder cannot be read or written to: one line that says which file and why; `no_room` where
    it is that the disk is full."""

    no_room = False


@dataclass(frozen=True)
class Line:
    """A line of `results.jsonl`, and its row without `details`; None if that is damaged or of another
    version."""

    content: bytes
    row: Row | None

    @property
    def torn(self) -> bool:
        """Whether it is the last line, broken off in the middle."""
        return not self.content.endswith(b"\n")


def append_row(folder: Path, row: Row) -> bytes:
    """Add one row to `results.jsonl` in a single write, and have it on disk before returning its line.

    Raises:
        ResultsError: it cannot be written, and nothing of it is left.
    """
    return _append(folder / RESULTS_JSONL, [row.flat()])


def append_measurements(folder: Path, row: Row, measurements: Iterable[Measurement]) -> None:
    """Add what was measured in a cell to `measurements.jsonl`, in a single write.

    Raises:
        ResultsError: it cannot be written, and nothing of it is left.
    """
    units = {name: spec.unit for name, spec in METRICS.items()}
    about = {"cell": row.cell, "repeat": row.repeat}
    _append(
        folder / MEASUREMENTS_JSONL,
        [{**about, **vars(one), "unit": units.get(one.metric, "s")} for one in measurements],
    )


def _append(path: Path, contents: Sequence[dict[str, Any]]) -> bytes:
    if not contents:
        return b""
    whole = lines = "".join(_line(one) for one in contents).encode()
    with _writing(path), files.open_to_append(path) as out:
        before = out.seek(0, os.SEEK_END)
        try:
            while lines:  # what is not taken at once is asked for again, to hear why
                lines = lines[out.write(lines) :]
            os.fsync(out.fileno())
        except OSError:
            out.truncate(before)
            raise
    return whole


def _line(content: dict[str, Any]) -> str:
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        # JSON has no NaN and no infinity: they become null, and the check that saw them says so.
        text = json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None))
    return text + "\n"


def write_csv(folder: Path) -> None:
    """Write `results.csv`: the columns of the rows of `results.jsonl`.

    Raises:
        ResultsError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns(), extrasaction="ignore")
    writer.writeheader()
    writer.writerows(row.flat() for row in stored_rows(folder))
    write_whole(folder / RESULTS_CSV, [text.getvalue().encode()])


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that is there whole or not at all.

    Raises:
        ResultsError: it cannot be written.
    """
    write_whole(path, [(json.dumps(content, indent=2) + "\n").encode()])


def row_folders(folder: Path) -> list[Path]:
    """Return the folders with the rows of a sweep: its own, or where it has none, those of its parts."""
    if not (folder / RESULTS_JSONL).exists() and (folder / SWEEP_JSON).exists():
        return sorted(path.parent for path in folder.glob(f"{PARTS}/{RESULTS_JSONL}")) or [folder]
    return [folder]


def read_rows(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a sweep's folder as `read_row` gives them, and a sentence for each damaged line.

    Columns that an older row does not have yet are not in its dictionary; columns that are not known here
    are kept as they are.

    Raises:
        ResultsError: the folder holds no `results.jsonl`, or it cannot be read.
    """
    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    line_of: dict[tuple[object, ...], int] = {}
    try:
        paths = [place / RESULTS_JSONL for place in row_folders(folder)]
        of_all = ((path, *line) for path in paths for line in enumerate(files.lines(path), start=1))
        for path, number, line in of_all:
            row, remarks = read_row(line, number)
            if row is not None:
                rows.append(row)
                if row["status"] not in (*STATUSES, UNKNOWN):
                    told = f"status {value_text(row['status'])} is none of {', '.join(STATUSES)}"
                    remarks.append(f"{told}; it counts as not ok")
                first = line_of.setdefault(tuple(row.get(name) for name in _CELL), number)
                if first != number:
                    remarks.append(f"the cell of line {first} once more; both are shown")
            if remarks:
                damaged.append(f"{path}:{number}: {'; '.join(remarks)}")
    except OSError as error:
        why = f"no sweep here ({RESULTS_JSONL}: {error.strerror})"
        if folder.is_file():
            why = f"a file, where the folder of a sweep was expected: try {folder.parent}"
        raise ResultsError(f"{folder}: {why}") from None
    return rows, damaged


def read_lines(folder: Path, name: str = RESULTS_JSONL) -> Iterator[Line]:
    """The lines of `results.jsonl`, or of `superseded.jsonl`, one after another, up to one that is too long;
    none if there is no such file.

    Raises:
        ResultsError: it cannot be read.
    """
    with suppress(FileNotFoundError), _reading(folder / name):
        for content in files.lines(folder / name):
            row, remarks = read_row(content, 0)
            torn = not content.endswith(b"\n")
            yield Line(content, None if row is None or remarks or torn else Row.of({**row, "details": {}}))


def stored_rows(folder: Path, name: str = RESULTS_JSONL) -> Iterator[Row]:
    """The rows of a sweep without their `details`, one after another."""
    return (line.row for place in row_folders(folder) for line in read_lines(place, name) if line.row)


def keep_lines(folder: Path, keep: Iterable[Line], take_out: Iterable[Line] = ()) -> None:
    """Have `results.jsonl` hold just the lines to `keep`, in their order, and `superseded.jsonl` those
    that were taken out. A process that is killed meanwhile leaves the one file old or new, and no line
    lost or twice in the other.

    Raises:
        ResultsError: one of them cannot be written.
    """
    if taken := dict.fromkeys(line.content for line in take_out):
        known = dict.fromkeys(line.content for line in read_lines(folder, SUPERSEDED_JSONL))
        write_whole(folder / SUPERSEDED_JSONL, known | taken)
    write_whole(folder / RESULTS_JSONL, (line.content for line in keep))


def keep_measurements(folder: Path, cells: Collection[str]) -> None:
    """Have `measurements.jsonl` hold just what was measured in these cells.

    Raises:
        ResultsError: it cannot be written.
    """
    if os.path.lexists(folder / MEASUREMENTS_JSONL):
        write_whole(folder / MEASUREMENTS_JSONL, measured_in(folder, cells))


def measured_in(folder: Path, cells: Collection[str]) -> Iterator[bytes]:
    """The lines of `measurements.jsonl` that are of these cells; none if there is no such file.

    Raises:
        ResultsError: it cannot be read.
    """
    path = folder / MEASUREMENTS_JSONL
    with suppress(FileNotFoundError), _reading(path):
        yield from (line for line in files.lines(path) if _cell_of(line) in cells)


def _cell_of(line: bytes) -> str | None:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return cell if isinstance(cell := json.loads(line)["cell"], str) else None
    return None


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file of a sweep's folder that is there whole or not at all.

    Raises:
        ResultsError: it cannot be written.
    """
    with _writing(path):
        files.replace(path, parts)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = ResultsError(f"{path} cannot be written to: {error.strerror}")
        told.no_room = error.errno in _NO_ROOM
        raise told from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from None
