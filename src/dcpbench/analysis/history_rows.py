"""The rows of many sweeps, with the columns that a history needs and no others.

`results.jsonl` is what counts, but most of it is `details`: a thousand sweeps are gigabytes of JSON. Its flat
copy `results.csv` is read instead where it is not older, whole, and ends with the same row.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.analysis.cell_identity import identity_keys, override_values
from dcpbench.analysis.frame import dtypes, read_frame, short_names, sweeps_in
from dcpbench.records.row import AXES, SCHEMA_VERSION, Row
from dcpbench.records.store import RESULTS_CSV, RESULTS_JSONL, ResultsError, stored_rows
from dcpbench.records.upgrade import upgraded

_LAST = ("cell", "status", "started_at")
_OF_CELL = (*AXES, "overrides", "config_digest", "status", "reason", "flaky", "fault_seen", "repeat")
_OF_SWEEP = ("torch_version", "git_commit", "started_at")
_NEEDED = frozenset({*_LAST, "overrides", "schema_version"})
_TAIL_BYTES = 1 << 16
_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class Rows:
    """The rows of sweeps.

    Args:
        frame: columns as `read_sweeps` has them, and `at`, the place of the row's sweep in `folders`.
        folders: the sweeps' folders.
        names: just tell the sweeps apart.
        remarks: sentences on what could not be read, or not in the quick way.
        keys: the overrides that are part of a cell's identity, see `cell_identity.identity_keys`.
    """

    frame: pd.DataFrame
    folders: list[Path]
    names: list[str]
    remarks: list[str]
    keys: frozenset[str] = frozenset()
    _stored: dict[int, list[Row]] = field(default_factory=dict)

    def config(self, at: int, **wanted: str) -> Mapping[str, Any]:
        """The configuration of the row in this sweep whose column has this value; empty if there is none."""
        ((column, value),) = wanted.items()
        if at not in self._stored:
            self._stored[at] = list(stored_rows(self.folders[at]))
        return next((row.config for row in self._stored[at] if row[column] == value), {})


class _NotFlatError(Exception):
    """Why the rows of a sweep are not to be read from its `results.csv`, in a few words."""


def read_history(places: Sequence[Path], columns: Sequence[str] = ()) -> Rows:
    """The rows of all sweeps in these places, with the columns of a history and these.

    Raises:
        ResultsError: one of the places holds no results, or none of those in it can be read.
    """
    folders = list({sweep.resolve(): sweep for place in places for sweep in sweeps_in(place)}.values())
    wanted = list(dict.fromkeys([*_OF_CELL, *_OF_SWEEP, *columns, "cell", "schema_version"]))
    flat: list[pd.DataFrame] = []
    whole: list[pd.DataFrame] = []
    refused: dict[str, list[Path]] = {}
    damaged: list[str] = []
    for at, folder in enumerate(folders):
        try:
            flat.append(_read_csv(folder, wanted).assign(at=at))
        except _NotFlatError as why:
            refused.setdefault(str(why), []).append(folder)
            try:
                frame, sentences = read_frame(folder)
            except ResultsError as error:
                sentences = [str(error)]
            else:
                whole.append(frame[[*wanted, "config"]].assign(at=at))
            damaged += sentences
    frames = [_upgraded(flat), *whole]
    together = pd.concat([frame for frame in frames if len(frame)] or [pd.DataFrame()], ignore_index=True)
    if together.empty:
        first = f"; {damaged[0]}" if damaged else ""
        raise ResultsError(f"{', '.join(map(str, places))}: no rows in {len(folders)} sweeps{first}")
    names = short_names(map(str, folders))
    rows = Rows(
        together, folders, [names[str(folder)] for folder in folders], [*_read_slowly(refused), *damaged]
    )
    return replace(rows, keys=identity_keys(_samples(rows)))


def _read_slowly(refused: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    """A sentence for each reason why sweeps are read from `results.jsonl`."""
    for why, folders in refused.items():
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        yield f"{folders[0]}{more}: {why}; read from {RESULTS_JSONL}, which takes longer"


def _read_csv(folder: Path, wanted: Sequence[str]) -> pd.DataFrame:
    """These columns of `results.csv`; missing where it does not have one yet.

    Raises:
        _NotFlatError: it is not surely the same as `results.jsonl`.
    """
    path = folder / RESULTS_CSV
    try:
        if path.stat().st_mtime_ns < (folder / RESULTS_JSONL).stat().st_mtime_ns:
            raise _NotFlatError(f"{RESULTS_CSV} is older than {RESULTS_JSONL}")
        content = path.read_bytes()
    except FileNotFoundError:
        raise _NotFlatError(f"no {RESULTS_CSV}") from None
    except OSError as error:
        raise _NotFlatError(f"{RESULTS_CSV} cannot be read: {error.strerror}") from None
    try:
        frame = _parsed(content, wanted)
    except (ValueError, OverflowError):
        raise _NotFlatError(f"{RESULTS_CSV} is damaged") from None
    last = frame[list(_LAST)].astype(object).where(frame[list(_LAST)].notna(), None).tail(1)
    if [_last_row(folder / RESULTS_JSONL)] != (last.to_numpy().tolist() or [[None] * len(_LAST)]):
        raise _NotFlatError(f"{RESULTS_CSV} does not end with the row that {RESULTS_JSONL} ends with")
    return frame


def _parsed(content: bytes, wanted: Sequence[str]) -> pd.DataFrame:
    if not content.endswith(b"\n") or b"\0" in content:
        raise ValueError("torn")
    types = {name: dtype if dtype != "string" else "object" for name, dtype in dtypes().items()}
    frame = pd.read_csv(
        io.BytesIO(content),
        usecols=lambda name: name in wanted,
        dtype=types,
        keep_default_na=False,
        na_values=[""],
    )
    versions = range(1, SCHEMA_VERSION + 1)
    if not (
        set(frame) >= _NEEDED
        and frame["schema_version"].isin(versions).all()
        and frame[["cell", "status"]].notna().all(axis=None)
    ):
        raise ValueError("rows of another schema")
    missing = {
        name: pd.Series(pd.NA, index=frame.index, dtype=types[name]) for name in wanted if name not in frame
    }
    return frame.assign(**missing)[list(wanted)]


def _upgraded(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows of `results.csv`, those of schema version 1 as `dcpbench.records.upgrade` has them."""
    if not frames:
        return pd.DataFrame()
    together = pd.concat(frames, ignore_index=True)
    old = together["schema_version"] < SCHEMA_VERSION
    lines = together.loc[old, "overrides"]
    words = {line: upgraded({"overrides": line})["overrides"] for line in lines.unique()}
    together.loc[old, "overrides"] = lines.map(words)
    together.loc[old, "checkpointer"] = upgraded({})["checkpointer"]
    together.loc[old, "config_digest"] = None
    return together


def _samples(rows: Rows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Overrides and configurations, one of the newest for each key that is overridden anywhere."""
    once = rows.frame.drop_duplicates("overrides", keep="last").dropna(subset="overrides")
    sample = {
        key: (line, at, version)
        for line, at, version in zip(once["overrides"], once["at"], once["schema_version"], strict=True)
        for key in override_values(line)
    }
    for line, at, version in dict.fromkeys(sample.values()):
        old = version < SCHEMA_VERSION
        yield line, upgraded({"overrides": line})["config"] if old else rows.config(at, overrides=line)


def _last_row(path: Path) -> list[Any] | None:
    """What tells the last row of a file apart; None if it cannot be told."""
    try:
        row = json.loads(_last_line(path) or b"{}")
    except (OSError, ValueError, RecursionError):
        return None
    return [row.get(name) for name in _LAST] if isinstance(row, dict) else None


def _last_line(path: Path) -> bytes:
    """The last line of a file, of which no more is read than needed.

    Raises:
        ValueError: it was broken off.
    """
    with path.open("rb") as file:
        size, tail = file.seek(0, io.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(0, size - tail))
            read = file.read()
            if read and not read.endswith(b"\n"):
                raise ValueError("a torn line")
            start = read.rstrip(b"\n").rfind(b"\n") + 1
            if start or tail >= min(size, _MOST_BYTES):
                return read[start:]
            tail *= 4
