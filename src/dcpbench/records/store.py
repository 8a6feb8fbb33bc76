"""How rows are written and read.

Rows are appended to `results.jsonl` whole and flushed the moment a cell ends, by the driver alone: a
sweep that dies keeps every row it had. What is too large for a column are a row's details. They are written
to `details.jsonl` before their row, which is complete without them; details without a row are ignored.
`results.csv` is the columns of the rows, written beside and renamed, so that it is there whole or not at all.
`measurements.jsonl` has every value that a rank measured, one a line, as the rows' metrics were made of them.
What is read is held against the types of the columns, and nothing in it is ever evaluated.

A sweep that is resumed takes the rows that do not stand any more out of `results.jsonl`, which so has
one row for each cell at every moment, and keeps them in `superseded.jsonl`.
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

from dcpbench.core.axes import AXES
from dcpbench.core.metrics import METRICS, Measurement
from dcpbench.core.statuses import STATUSES, UNKNOWN
from dcpbench.records import files
from dcpbench.records.row import Row, column_types, columns
from dcpbench.records.row_reader import parse, read_row, value_text

RESULTS_JSONL = "results.jsonl"
DETAILS_JSONL = "details.jsonl"
RESULTS_CSV = "results.csv"
MEASUREMENTS_JSONL = "measurements.jsonl"
SUPERSEDED_JSONL = "superseded.jsonl"
ENVIRONMENT_JSON = "environment.json"
SWEEP_JSON = "sweep.json"
PARTS = "*-part-*-of-*"
"""The folders of the parts of a sweep (`part=2/4`), in the folder of the whole."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CELL = ("cell", "overrides", "repeat")
"""The columns in which rows of one cell are equal."""
_ATTEMPT = ("cell", "repeat", "started_at")
"""The columns by which details are a row's: when it started tells the attempts of a cell apart."""


class ResultsError(Exception):
    """A results folder cannot be read or written to: one line that says which file and why; `no_room` where
    it is that the disk is full."""

    no_room = False


@dataclass(frozen=True)
class Line:
    """A line of `results.jsonl`, the row that was `found` in it, if any, and a remark for each thing that is
    wrong with it."""

    content: bytes
    found: Row | None
    remarks: Sequence[str] = ()

    @property
    def torn(self) -> bool:
        """Whether it is the last line, broken off in the middle."""
        return not self.content.endswith(b"\n")

    @property
    def row(self) -> Row | None:
        """Its row; None if that is damaged or of another version."""
        return None if self.remarks or self.torn else self.found


def append_row(folder: Path, row: Row) -> Line:
    """Add one row to `results.jsonl` in a single write, after its details to `details.jsonl`, and have both
    on disk before returning its line.

    Raises:
        ResultsError: it cannot be written, and no row is left of it.
    """
    flat = row.flat()
    if details := flat.pop("details"):
        _append(folder / DETAILS_JSONL, [{name: flat[name] for name in _ATTEMPT} | {"details": details}])
    content = _append(folder / RESULTS_JSONL, [flat])
    return Line(content, Row.of(json.loads(content)))


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


def read_rows(folder: Path, details: bool = True) -> tuple[list[Row], list[str]]:
    """The rows of a sweep's folder, with their `details` or without, and a sentence for each damaged line.

    A column that an older row does not have has its default; what is no column here is left out.

    Raises:
        ResultsError: the folder holds no `results.jsonl`, or it cannot be read.
    """
    rows: list[Row] = []
    damaged: list[str] = []
    line_of: dict[tuple[object, ...], int] = {}
    try:
        for place in row_folders(folder):
            beside, remarks = _details_in(place) if details else (None, [])
            damaged += remarks
            for number, line in enumerate(_lines(place / RESULTS_JSONL, beside), start=1):
                told = [*line.remarks]
                if line.found:
                    rows.append(line.found)
                    if (status := line.found.status) not in (*STATUSES, UNKNOWN.name):
                        unknown = f"status {value_text(status)} is none of {', '.join(STATUSES)}"
                        told.append(f"{unknown}; it counts as not ok")
                    first = line_of.setdefault(tuple(line.found[name] for name in (*_CELL, *AXES)), number)
                    if first != number:
                        told.append(f"the cell of line {first} once more; both are shown")
                if told:
                    damaged.append(f"{place / RESULTS_JSONL}:{number}: {'; '.join(told)}")
    except OSError as error:
        why = f"no sweep here ({RESULTS_JSONL}: {error.strerror})"
        if folder.is_file():
            why = f"a file, where the folder of a sweep was expected: try {folder.parent}"
        raise ResultsError(f"{folder}: {why}") from None
    return rows, damaged


def read_lines(folder: Path, name: str = RESULTS_JSONL) -> Iterator[Line]:
    """The lines of `results.jsonl`, or of `superseded.jsonl`, one after another, up to one that is too long;
    none if there is no such file. Their rows are without `details`.

    Raises:
        ResultsError: it cannot be read.
    """
    with suppress(FileNotFoundError), _reading(folder / name):
        yield from _lines(folder / name)


def stored_rows(folder: Path, name: str = RESULTS_JSONL) -> Iterator[Row]:
    """The rows of a sweep without their `details`, one after another."""
    return (line.row for place in row_folders(folder) for line in read_lines(place, name) if line.row)


def _lines(path: Path, beside: Mapping[tuple[object, ...], dict[str, Any]] | None = None) -> Iterator[Line]:
    """The lines of a file of rows. A row has its details from `beside`, if it has none in its line, as those
    that were written before there was `details.jsonl`; none at all where that is None."""
    types = column_types()
    for number, content in enumerate(files.lines(path), start=1):
        row, remarks = read_row(content, number, types)
        if row is not None:
            inside = row.get("details") or (beside or {}).get(tuple(row.get(name) for name in _ATTEMPT))
            row["details"] = {} if beside is None else inside or {}
        yield Line(content, None if row is None else Row.of(row), remarks)


def _details_in(folder: Path) -> tuple[dict[tuple[object, ...], dict[str, Any]], list[str]]:
    """The details in `details.jsonl` by attempt, and a sentence for each damaged line."""
    path = folder / DETAILS_JSONL
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    damaged: list[str] = []
    try:
        for number, content in enumerate(files.lines(path), start=1):
            try:
                line, remarks = parse(content)
                if not isinstance(line["details"], dict):
                    raise TypeError
                found[tuple(line[name] for name in _ATTEMPT)] = line["details"]
            except (ValueError, KeyError, TypeError):
                remarks = ["no details of a row, left out"]
            if remarks:
                damaged.append(f"{path}:{number}: {'; '.join(remarks)}")
    except FileNotFoundError:
        pass
    except OSError as error:
        damaged.append(f"{path} cannot be read: {error.strerror}")
    return found, damaged


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


def keep_beside(folder: Path, cells: Collection[str]) -> None:
    """Have `measurements.jsonl` hold just what was measured in these cells, and `details.jsonl` no line that
    is broken off.

    Raises:
        ResultsError: one of them cannot be written.
    """
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
