"""The rows of sweeps as one tidy pandas DataFrame, from which every table and notebook starts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.core.statuses import StatusSpec, shown
from dcpbench.records import files
from dcpbench.records.row import Row, column_types, dict_in, list_in, shared_gpu_sentences
from dcpbench.records.store import ENVIRONMENT_JSON, RESULTS_JSONL, SWEEP_JSON, ResultsError, parse, read_rows

_DTYPES = {bool: "boolean", int: "Int64", float: "float64", str: "string"}


def dtypes() -> dict[str, str]:
    """Return the dtype of each column of a row, and of `config` and `details`."""
    return {name: _DTYPES.get(kind.python, "object") for name, kind in column_types().items()}


@dataclass(frozen=True)
class Sweeps:
    """The rows of one sweep or of several, see `read_sweeps`.

    Args:
        environments: the `environment.json` of each sweep, by the names in the column `sweep`; empty if it
            cannot be read.
        left_out: a sentence for each damaged line of a file.
        sweep_records: the `sweep.json` of each sweep, likewise; without one, all its cells have rows.
    """

    frame: pd.DataFrame
    environments: dict[str, dict[str, Any]]
    left_out: list[str]
    sweep_records: dict[str, dict[str, Any]] = field(default_factory=dict)

    def words(self) -> list[str]:
        """Return the words of the command of a single sweep."""
        known = [record.get("arguments") for record in self.sweep_records.values()]
        return [*map(str, list_in(known[0]))] if len(known) == 1 else []

    def shared_gpus(self, frame: pd.DataFrame) -> list[str]:
        """Say how ranks share GPUs in some of the rows."""
        rows = plain_rows(frame[["ranks_per_gpu", "backend"]].drop_duplicates())
        return shared_gpu_sentences(
            rows, (environment.get("nccl") for environment in self.environments.values())
        )

    def not_run(self) -> dict[str, list[str]]:
        """Return the cells of each sweep that have no row."""
        done = set(zip(self.frame["sweep"], self.frame["cell"], strict=True))
        cells = {sweep: dict_in(known.get("cells")) for sweep, known in self.sweep_records.items()}
        return {sweep: [cell for cell in of if (sweep, cell) not in done] for sweep, of in cells.items()}

    def with_short_names(self) -> "Sweeps":
        """Return them with the shortest names that distinguish their folders."""
        names = short_names(self.environments)
        frame = self.frame.assign(sweep=self.frame["sweep"].map(names).astype("string"))
        environments, known = (
            {names[folder]: of for folder, of in records_by_folder.items()}
            for records_by_folder in (self.environments, self.sweep_records)
        )
        return Sweeps(frame, environments, self.left_out, known)


def read_sweeps(places: Path | str | Sequence[Path | str], details: bool = True) -> Sweeps:
    """Read the rows of one sweep or of several as one tidy frame; a folder of sweeps contributes all of them.

    The frame has one row for each run of a cell, in the order of the files, and these columns:

    - `sweep` (string): the folder that the row is in;
    - every column of a row (`dcpbench.records.row.columns`), in its order, as `string`, `boolean`, `Int64`
      or `float64`. Values that were not measured or do not apply are missing: `pd.NA`, NaN in a `float64`.
      Units are in the names: `_s` seconds, `_bytes`;
    - `config` and `details` (object): dictionaries, which can be empty. Without `details` the rows of a cell
      share their `config`, so that the frame of many sweeps is small.

    Damaged lines do not hide others: they are skipped, and reported in `left_out`.

        frame = read_sweeps("outputs/nightly").frame
        frame.groupby("parallel")["save_s"].median()

    Raises:
        dcpbench.records.store.ResultsError: a place has no results, or none that can be read.
    """
    frames, left_out = [], []
    environments, known, configs = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    named = [Path(place) for place in ([places] if isinstance(places, str | Path) else places)]
    for folder in {sweep.resolve(): sweep for place in named for sweep in sweeps_in(place)}.values():
        try:
            sweep = read_sweep(folder, details)
        except ResultsError as error:
            if folder in named:
                raise
            left_out.append(str(error))
            continue
        if not details:
            both = zip(sweep.frame["config_digest"], sweep.frame["config"], strict=True)
            sweep.frame["config"] = [configs.setdefault(digest, config) for digest, config in both]
        frames.append(sweep.frame)
        environments |= sweep.environments
        known |= sweep.sweep_records
        left_out += sweep.left_out
    if not frames:
        raise ResultsError(left_out[0])
    return Sweeps(pd.concat(frames, ignore_index=True), environments, left_out, known)


def read_sweep(folder: Path, details: bool = True) -> Sweeps:
    """Read the rows of the sweep in a folder, see `read_sweeps`."""
    return sweep_of(folder, *read_rows(folder, details))


def sweep_of(folder: Path, rows: Sequence[Row], damaged: Sequence[str]) -> Sweeps:
    """Return the sweep in a folder, given what `read_rows` has read."""
    columns = {name: [row[name] for row in rows] for name in dtypes()}
    frame = frame_of({"sweep": [str(folder)] * len(rows), **columns})
    environment, remarks = _document(folder / ENVIRONMENT_JSON)
    record, _ = _document(folder / SWEEP_JSON)
    return Sweeps(frame, {str(folder): environment}, [*damaged, *remarks], {str(folder): record})


def frame_of(values: Mapping[str, list[Any]]) -> pd.DataFrame:
    """Return the values of columns, None if one is missing, as a frame like that of `read_sweeps`."""
    types = {"sweep": "string", **dtypes()}
    return pd.DataFrame({name: pd.Series(column, dtype=types[name]) for name, column in values.items()})


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dicts of plain Python values; missing values become None."""
    plain = frame.astype(object)
    return [
        {str(name): value for name, value in row.items()}
        for row in plain.where(plain.notna(), None).to_dict("records")
    ]


def as_text(value: object) -> str:
    """Return the value of an axis as it is written on the command line; `-` for none."""
    if value is None or value is pd.NA or value != value:
        return "-"
    return str(value).lower() if pd.api.types.is_bool(value) else str(value)


def without_retries(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without retries, which count neither as cells nor in costs and histories."""
    return frame[frame["retry_of"].isna()].reset_index(drop=True)


def row_noun(frame: pd.DataFrame) -> str:
    """Return the noun for a row: `stop` of a script, or `cell`."""
    return "stop" if len(frame) and frame["cell"].str.startswith("stop=").all() else "cell"


def outcomes(frame: pd.DataFrame) -> list[StatusSpec]:
    """Return what each row is shown as."""
    return [shown(**row) for row in plain_rows(frame[["status", "flaky", "fault_seen"]])]


def as_expected(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Tell for each row whether it ended as expected."""
    return pd.Series([spec.ok for spec in outcomes(frame)], index=frame.index, dtype=bool)


def is_true(column: "pd.Series[Any]") -> "pd.Series[bool]":
    """Tell where a column is true; a missing value is not."""
    return column.fillna(False).astype(bool)


def is_false(column: "pd.Series[Any]") -> "pd.Series[bool]":
    """Tell where a column is false; a missing value is not."""
    return ~column.fillna(True).astype(bool)


def short_names(folders: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of each folder's path that no other of them shares."""
    parts = {folder: Path(folder).resolve().parts for folder in folders}
    ends = {path: [path[-length:] for length in range(1, len(path) + 1)] for path in parts.values()}
    count = Counter(chain.from_iterable(ends.values()))
    names = {path: next((end for end in of if count[end] == 1), path) for path, of in ends.items()}
    return {folder: str(Path(*names[path])) for folder, path in parts.items()}


def sweeps_in(place: Path) -> Iterator[Path]:
    """Yield the folder if it is a sweep, else the sweeps in it or its folders; ResultsError if none."""
    try:
        itself = place.is_file() or (place / RESULTS_JSONL).exists()
    except OSError as error:
        raise ResultsError(f"{place}: cannot be read: {error.strerror}") from None
    if itself:
        yield place
        return
    for below in ("*", "*/*"):
        if folders := {path.parent for path in place.glob(f"{below}/{RESULTS_JSONL}")}:
            yield from sorted(folders)
            return
    raise ResultsError(f"{place}: no sweep here or in the folders below it (no {RESULTS_JSONL})")


def _document(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a JSON object of a sweep's folder, empty if there is none, with remarks."""
    try:
        known = parse(files.read(path))
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return {}, [f"{path}: cannot be read: {why}"]
    if not isinstance(known, dict):
        return {}, [f"{path}: expected a JSON object; ignored"]
    return known, []
