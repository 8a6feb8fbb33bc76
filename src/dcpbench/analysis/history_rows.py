"""The rows of many sweeps, with the columns that a history needs and no others.

`results.jsonl` is what counts, but most of it is `details`: a thousand sweeps are gigabytes of JSON. Its flat
copy `results.csv` is read instead where it is not older, whole, and ends with the same row.
"""

import csv
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.analysis.cell_identity import identity_keys, override_values, with_cells
from dcpbench.analysis.frame import frame_of, short_names, sweeps_in
from dcpbench.core.plain_values import ColumnType
from dcpbench.records import files
from dcpbench.records.row import AXES, Row, column_types
from dcpbench.records.row_reader import READABLE
from dcpbench.records.store import RESULTS_CSV, RESULTS_JSONL, ResultsError, read_rows, stored_rows

_LAST = ("cell", "status", "started_at")
_NEEDED = (*_LAST, "overrides", "schema_version")
_COLUMNS = (*_NEEDED, *AXES, "config_digest", "reason", "flaky", "fault_seen", "repeat")
_COLUMNS += ("torch_version", "git_commit")
_LOOKED_AT = 10
_LEAST_IN_COMMON = 0.5
_LONGEST_TEXT = 2**31 - 1
_MOST_FLAT_BYTES = 2**30
_OF_TEXT: dict[type, Callable[[str], Any]] = {
    bool: {"True": True, "False": False}.__getitem__,
    int: int,
    float: float,
    str: str,
}


@dataclass(frozen=True)
class Rows:
    """The rows of sweeps.

    Args:
        frame: columns as `read_sweeps` has them; `sweep` is a short name, no two alike.
        folders: the sweeps' folders by these names.
        remarks: sentences on what could not be read, or not in the quick way.
        keys: the overrides that are part of a cell's identity, see `cell_identity.identity_keys`.
    """

    frame: pd.DataFrame
    folders: dict[str, Path]
    remarks: list[str]
    keys: Collection[str] = ()
    _stored: dict[str, list[Row]] = field(default_factory=dict)

    def config(self, sweep: str, **wanted: str) -> Mapping[str, Any]:
        """The configuration of the row in this sweep whose column has this value; empty if there is none."""
        ((column, value),) = wanted.items()
        if sweep not in self._stored:
            self._stored[sweep] = list(stored_rows(self.folders[sweep]))
        return next((row.config for row in self._stored[sweep] if row[column] == value), {})


class _NotFlatError(Exception):
    """Why the rows of a sweep are not to be read from its `results.csv`, in a few words."""


def read_history(places: Sequence[Path], columns: Sequence[str] = ()) -> Rows:
    """The rows of all sweeps in these places with a history's columns and these; ResultsError if none."""
    found = {sweep.resolve(): sweep for place in places for sweep in sweeps_in(place)}.values()
    folders = {name: Path(folder) for folder, name in short_names(map(str, found)).items()}
    values: dict[str, list[Any]] = {name: [] for name in dict.fromkeys(["sweep", *_COLUMNS, *columns])}
    refused: dict[str, list[Path]] = {}
    remarks = []
    for name, folder in folders.items():
        try:
            rows = _flat_rows(folder, values.keys())
        except _NotFlatError as why:
            refused.setdefault(str(why), []).append(folder)
            try:
                rows, damaged = read_rows(folder)
            except ResultsError as error:
                rows, damaged = [], [str(error)]
            remarks += damaged
        for column, of_all in values.items():
            of_all += [name] * len(rows) if column == "sweep" else [row.get(column) for row in rows]
    if not values["sweep"]:
        told = "; ".join([f"no rows in {len(folders)} sweeps", *remarks[:1]])
        raise ResultsError(f"{', '.join(map(str, places))}: {told}")
    slow = []
    for reason, (first, *others) in refused.items():
        more = f" and {len(others)} more" if others else ""
        slow.append(f"{first}{more}: {reason}; read from {RESULTS_JSONL}, which takes longer")
    read = Rows(frame_of(values), folders, slow + remarks)
    return replace(read, keys=_identity_keys(read))


def sweep_before(folder: Path) -> Path | None:
    """The newest sweep beside the one in `folder` that ended, began before it did and has half of its cells,
    whatever they are called there; None if there is none."""
    own = folder.resolve()
    rows = _rows_of(own)
    written = {path.parent: _written_ns(path) for path in own.parent.glob(f"*/{RESULTS_CSV}")}
    limit = max(map(_written_ns, own.glob("results.*")), default=0)
    ended = [place for place, at in written.items() if place != own and at <= limit]
    for place in sorted(ended, key=written.__getitem__, reverse=True)[:_LOOKED_AT]:
        other = _rows_of(place)
        if rows is None or other is None:
            continue
        frames, keys = (rows.frame, other.frame), {*rows.keys, *other.keys}
        began, then = (one["started_at"].dropna().min() for one in frames)
        cells, there = (with_cells(one, keys)["address"].drop_duplicates() for one in frames)
        if (pd.isna(began) or pd.isna(then) or then < began) and cells.isin(there).mean() >= _LEAST_IN_COMMON:
            return place
    return None


def _rows_of(folder: Path) -> Rows | None:
    with suppress(ResultsError, OSError):  # what lies beside a sweep may be anybody's
        return read_history([folder])
    return None


def _written_ns(path: Path) -> int:
    with suppress(OSError):  # it may go at any time
        return path.lstat().st_mtime_ns
    return 0


def _identity_keys(rows: Rows) -> set[str]:
    """`identity_keys`, by one of the newest configurations for each key that is overridden anywhere."""
    once = rows.frame.drop_duplicates("overrides", keep="last").dropna(subset="overrides")
    of_lines = dict(zip(once["overrides"], once["sweep"], strict=True))
    newest = {key: line for line in of_lines for key in override_values(line)}
    configs = (rows.config(of_lines[line], overrides=line) for line in newest.values())
    return identity_keys(newest.values(), configs)


def _flat_rows(folder: Path, wanted: Collection[str]) -> list[dict[str, Any]]:
    """The wanted columns of `results.csv`; _NotFlatError if it may differ from `results.jsonl`."""
    path = folder / RESULTS_CSV
    try:
        if path.stat().st_mtime_ns < (folder / RESULTS_JSONL).stat().st_mtime_ns:
            raise _NotFlatError(f"{RESULTS_CSV} is older than {RESULTS_JSONL}")
        rows = _parsed(files.read(path, _MOST_FLAT_BYTES).decode(), wanted)
    except FileNotFoundError:
        raise _NotFlatError(f"no {RESULTS_CSV}") from None
    except OSError as error:
        raise _NotFlatError(f"{RESULTS_CSV} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, csv.Error):
        raise _NotFlatError(f"{RESULTS_CSV} is damaged") from None
    last = rows[-1] if rows else {}
    if _last_row(folder / RESULTS_JSONL) != {name: last.get(name) for name in _LAST}:
        raise _NotFlatError(f"{RESULTS_CSV} does not end with the row that {RESULTS_JSONL} ends with")
    return rows


def _parsed(text: str, wanted: Collection[str]) -> list[dict[str, Any]]:
    """The rows of a CSV file; ValueError, KeyError or csv.Error if it is damaged or of another schema."""
    csv.field_size_limit(_LONGEST_TEXT)
    head, *lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    if not text.endswith("\n") or "\0" in text or not set(_NEEDED).issubset(head):
        raise ValueError("not whole")
    if not lines:
        return []
    types = column_types()
    texts = zip(head, zip(*lines, strict=True), strict=True)
    columns = {name: _values(of_all, types[name]) for name, of_all in texts if name in wanted}
    if not all(columns["cell"] + columns["status"]):
        raise ValueError("a row without its name or status")
    if not set(columns["schema_version"]).issubset(READABLE):
        raise ValueError("a row of another schema")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _values(texts: Sequence[str], kind: ColumnType) -> list[Any]:
    """The values of a column, each text looked at once; ValueError or KeyError if it cannot hold one."""
    of_text = {
        text: _OF_TEXT[kind.python](text) if text or not kind.optional else None for text in set(texts)
    }
    if not all(map(kind.fits, of_text.values())):
        raise ValueError("a value that the column cannot hold")
    return [of_text[text] for text in texts]


def _last_row(path: Path) -> dict[str, Any] | None:
    """What identifies the last row of a file, of which no more is read than needed; None if it has none."""
    try:
        with files.open_regular(path) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as lines:
            row = json.loads(lines[lines.rfind(b"\n", 0, -1) + 1 :])
        return {name: row[name] for name in _LAST}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
