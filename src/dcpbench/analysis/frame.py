"""The rows of sweeps as one tidy pandas DataFrame: where every table, and a notebook, starts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.core.statuses import SEVERITY, STATUSES, UNKNOWN, StatusSpec, shown
from dcpbench.records import files
from dcpbench.records.row import column_types
from dcpbench.records.row_reader import parse
from dcpbench.records.store import (
    ENVIRONMENT_JSON,
    PARTS,
    RESULTS_JSONL,
    SWEEP_JSON,
    ResultsError,
    read_rows,
    row_folders,
)

_DTYPES = {bool: "boolean", int: "Int64", float: "float64", str: "string"}


def dtypes() -> dict[str, str]:
    """The dtype of each column of a row, and of what is nested in it; see `read_sweeps`."""
    return {name: _DTYPES.get(kind.python, "object") for name, kind in column_types().items()}


@dataclass(frozen=True)
class Sweeps:
    """The rows of one sweep or of several, see `read_sweeps`.

    `environments` has what each sweep's `environment.json` says, by the names in the column `sweep`; nothing
    where it cannot be read. `left_out` is a sentence for each line of a file in which something was damaged.
    """

    frame: pd.DataFrame
    environments: dict[str, dict[str, Any]]
    left_out: list[str]


def read_sweeps(places: Path | str | Sequence[Path | str]) -> Sweeps:
    """Read the rows of one sweep or of several as one tidy frame; a folder of sweeps stands for all of them.

    The frame has one row for each run of a cell, in the order of the files, and these columns:

    - `sweep` (string): the folder that the row is in;
    - every column of a row (`dcpbench.records.row.columns`), in its order: texts are `string`, what is true
      or false is `boolean`, integers are `Int64`, and other numbers `float64`. What was not measured, or
      does not apply, is missing: `pd.NA`, and NaN in a `float64`. Units are in the names: `_s` seconds,
      `_bytes`;
    - `config` and `details` (object): dictionaries, empty where there is none.

    Lines that are damaged do not hide others: what can be read is in the frame, and `left_out` tells.

        frame = read_sweeps("outputs/nightly").frame
        frame.groupby("parallel")["save_s"].median()

    Raises:
        dcpbench.records.store.ResultsError: one of the places holds no results, or none of those in it can be
            read.
    """
    frames, environments, left_out = [], {}, []
    named = [Path(place) for place in ([places] if isinstance(places, str | Path) else places)]
    for folder in {sweep.resolve(): sweep for place in named for sweep in sweeps_in(place)}.values():
        try:
            frame, sentences = read_frame(folder)
        except ResultsError as error:
            if folder in named:
                raise
            left_out.append(str(error))
            continue
        frame.insert(0, "sweep", pd.Series(str(folder), index=frame.index, dtype="string"))
        frames.append(frame)
        environments[str(folder)], remarks = _environment(folder)
        left_out += [*sentences, *remarks]
    if not frames:
        raise ResultsError(left_out[0])
    return Sweeps(pd.concat(frames, ignore_index=True), environments, left_out)


def read_frame(folder: Path) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a sweep as in `read_sweeps`, a sentence for each damaged line; may raise ResultsError."""
    rows, damaged = read_rows(folder)
    return frame_of({name: [row[name] for row in rows] for name in dtypes()}), damaged


def frame_of(values: Mapping[str, list[Any]]) -> pd.DataFrame:
    """The values of columns, None where one is missing, as a frame like that of `read_sweeps`."""
    types = {"sweep": "string", **dtypes()}
    return pd.DataFrame({name: pd.Series(column, dtype=types[name]) for name, column in values.items()})


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dictionaries of plain Python values, None for what is missing: what JSON can say."""
    plain = frame.astype(object)
    return [
        {str(name): value for name, value in row.items()}
        for row in plain.where(plain.notna(), None).to_dict("records")
    ]


def as_text(value: object) -> str:
    """The value of an axis as it is written on the command line; `-` for none."""
    if value is None or value is pd.NA or value != value:
        return "-"
    return str(value).lower() if pd.api.types.is_bool(value) else str(value)


def outcomes(frame: pd.DataFrame) -> list[StatusSpec]:
    """Return what each row is shown as."""
    known = frame[["status", "flaky", "fault_seen"]].astype(object)
    return [shown(*row) for row in known.where(known.notna(), None).itertuples(index=False)]


def ok(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Tell for each row whether it ended as expected."""
    return pd.Series([spec.ok for spec in outcomes(frame)], index=frame.index, dtype=bool)


def severities(statuses: "pd.Series[str]") -> "pd.Series[int]":
    """How bad each status is, by `SEVERITY`; one that no row can have is unknown."""
    return statuses.where(statuses.isin([*STATUSES]), UNKNOWN.name).map(SEVERITY).astype(int)


def is_true(column: "pd.Series[Any]") -> "pd.Series[bool]":
    """Where a column is true; what is missing is not."""
    return column.fillna(False).astype(bool)


def is_false(column: "pd.Series[Any]") -> "pd.Series[bool]":
    """Where a column is false; what is missing is not."""
    return ~column.fillna(True).astype(bool)


def short_names(folders: Iterable[str]) -> dict[str, str]:
    """For each folder the least of its path, from the end, that no other of them has as well."""
    parts = {folder: Path(folder).resolve().parts for folder in folders}
    ends = {path: [path[-length:] for length in range(1, len(path) + 1)] for path in parts.values()}
    count = Counter(chain.from_iterable(ends.values()))
    names = {path: next((end for end in of if count[end] == 1), path) for path, of in ends.items()}
    return {folder: str(Path(*names[path])) for folder, path in parts.items()}


def sweeps_in(place: Path) -> Iterator[Path]:
    """The folder itself if it is a sweep, else the sweeps in it or in its folders; ResultsError if none."""
    try:
        itself = place.is_file() or (row_folders(place)[0] / RESULTS_JSONL).exists()
    except OSError as error:
        raise ResultsError(f"{place}: cannot be read: {error.strerror}") from None
    if itself:
        yield place
        return
    for below in ("*", "*/*"):
        found = {path.parent for path in place.glob(f"{below}/{RESULTS_JSONL}")}
        in_parts = {path.parents[1] for path in place.glob(f"{below}/{PARTS}/{RESULTS_JSONL}")}
        if found := found | {whole for whole in in_parts if (whole / SWEEP_JSON).exists()}:
            yield from sorted(found)
            return
    raise ResultsError(f"{place}: no sweep here, nor in a folder of it (no {RESULTS_JSONL})")


def _environment(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What `environment.json` says, and remarks; of a sweep in parts that of the first one, and as `earlier`
    in what those of the others differ."""
    (known, remarks), *others = [_environment_of(place) for place in row_folders(folder)]
    other = [{name: value for name, value in one.items() if value != known.get(name)} for one, _ in others]
    earlier = known.get("earlier", [])
    if any(other) and isinstance(earlier, list):
        known = {**known, "earlier": [*earlier, *filter(None, other)]}
    return known, [*remarks, *chain.from_iterable(told for _, told in others)]


def _environment_of(folder: Path) -> tuple[dict[str, Any], list[str]]:
    path = folder / ENVIRONMENT_JSON
    try:
        known, remarks = parse(files.read(path))
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return {}, [f"{path}: cannot be read: {why}"]
    if not isinstance(known, dict):
        return {}, [f"{path}: not an object, so it says nothing of the machine"]
    return known, [f"{path}: {remark}" for remark in remarks]
