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

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_identity import identity_keys, override_values, override_words
from dcpbench.analysis.frame import dtypes, read_frame, records, short_names, sweeps_in
from dcpbench.records.row import AXES, SCHEMA_VERSION, Row
from dcpbench.records.row_reader import upgraded
from dcpbench.records.store import RESULTS_CSV, RESULTS_JSONL, ResultsError, stored_rows

_LAST = ("cell", "status", "started_at")
_COLUMNS = (*AXES, "overrides", "config_digest", "status", "reason", "flaky", "fault_seen", "repeat")
_COLUMNS += ("torch_version", "git_commit", "started_at")
_NEEDED = frozenset({*_LAST, "overrides", "schema_version"})
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Rows:
    """The rows of sweeps.

    Args:
        frame: columns as `read_sweeps` has them, and `at`, the place of the row's sweep in `folders`.
        folders: the sweeps' folders.
        names: short ones, no two alike.
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
    wanted = list(dict.fromkeys([*_COLUMNS, *columns, "cell", "schema_version"]))
    refused: dict[int, str] = {}
    frames = [_upgraded(frame) for frame in _read_csvs(folders, wanted, refused)]
    slow, remarks = [], []
    for why in dict.fromkeys(refused.values()):
        first, *others = [folders[at] for at, other in refused.items() if other == why]
        more = f" and {len(others)} more" if others else ""
        slow.append(f"{first}{more}: {why}; read from {RESULTS_JSONL}, which takes longer")
    for at in refused:
        try:
            frame, damaged = read_frame(folders[at])
        except ResultsError as error:
            remarks.append(str(error))
        else:
            frames.append(frame[wanted].assign(at=at))
            remarks += damaged
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        why = "; ".join([f"no rows in {len(folders)} sweeps", *remarks[:1]])
        raise ResultsError(f"{', '.join(map(str, places))}: {why}")
    names = short_names(map(str, folders))
    together = pd.concat(frames, ignore_index=True)
    rows = Rows(together, folders, [names[str(folder)] for folder in folders], slow + remarks)
    return replace(rows, keys=identity_keys(_samples(rows)))


def _read_csvs(
    folders: Sequence[Path], wanted: Sequence[str], refused: dict[int, str]
) -> Iterator[pd.DataFrame]:
    """The rows of each `results.csv` that is surely the same as `results.jsonl`. Files with the same header
    are parsed as one, which takes a tenth of the time.

    Args:
        refused: gets the number of each other folder, and why its rows are not read so.
    """
    alike: dict[bytes, dict[int, bytes]] = {}
    for at, folder in enumerate(folders):
        try:
            header, lines = _csv_of(folder)
            alike.setdefault(header, {})[at] = lines
        except _NotFlatError as why:
            refused[at] = str(why)
    for header, copies in alike.items():
        for numbers, frame in _parsed(header, copies, wanted, refused):
            last = frame.drop_duplicates("at", keep="last").set_index("at")[[*_LAST]]
            ends = dict(zip(last.index, records(last), strict=True))
            for at in numbers:
                if _last_row(folders[at] / RESULTS_JSONL) != ends.get(at, dict.fromkeys(_LAST)):
                    refused[at] = f"{RESULTS_CSV} does not end with the row that {RESULTS_JSONL} ends with"
            yield frame[~frame["at"].isin(refused)]


def _csv_of(folder: Path) -> tuple[bytes, bytes]:
    """The header of `results.csv`, and the lines below.

    Raises:
        _NotFlatError: it is damaged, or older than `results.jsonl`.
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
    header, _, lines = content.partition(b"\n")
    known = header.decode(errors="replace").strip().split(",")
    if not content.endswith(b"\n") or b"\0" in content or not _NEEDED.issubset(known):
        raise _NotFlatError(f"{RESULTS_CSV} is damaged")
    return header, lines


def _parsed(
    header: bytes, copies: Mapping[int, bytes], wanted: Sequence[str], refused: dict[int, str]
) -> Iterator[tuple[list[int], pd.DataFrame]]:
    """The numbers of files and their rows; what cannot be parsed is halved until one file is left.

    Args:
        copies: the lines of each file, by the number of its folder.
    """
    numbers, half = list(copies), len(copies) // 2
    try:
        yield numbers, _parse(header, copies, wanted)
    except (ValueError, OverflowError):
        if not half:
            refused[numbers[0]] = f"{RESULTS_CSV} is damaged"
            return
        for part in (numbers[:half], numbers[half:]):
            yield from _parsed(header, {at: copies[at] for at in part}, wanted, refused)


# Else pandas 2 is off by the last bit; later versions are exact, and refuse to be asked for it.
_EXACT: dict[str, Any] = {"float_precision": "round_trip"} if pd.__version__.startswith("2.") else {}


def _parse(header: bytes, copies: Mapping[int, bytes], wanted: Sequence[str]) -> pd.DataFrame:
    """The rows of files, and in `at` their numbers. An empty row stands before those of each file.

    Raises:
        ValueError: one of them is damaged.
    """
    empty = b"," * header.count(b",") + b"\n"
    types = {name: "category" if dtype == "string" else dtype for name, dtype in dtypes().items()}
    frame: pd.DataFrame = pd.read_csv(
        io.BytesIO(b"\n".join([header, b""]) + b"".join(empty + lines for lines in copies.values())),
        usecols=lambda name: name in wanted,
        dtype=types,
        index_col=False,
        keep_default_na=False,
        na_values=[""],
        **_EXACT,
    )
    begins = frame.isna().all(axis=1).to_numpy()
    if begins.sum() != len(copies):
        raise ValueError("an empty row")
    frame["at"] = np.array(list(copies))[begins.cumsum() - 1]
    frame = frame[~begins]
    versions = frame["schema_version"].isin(range(1, SCHEMA_VERSION + 1))
    if not (versions & frame["cell"].notna() & frame["status"].notna()).all():
        raise ValueError("a row of another schema")
    for name in set(wanted) - set(frame):
        frame[name] = pd.Series(index=frame.index, dtype=types[name])
    return frame


def _upgraded(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of `results.csv`, those of schema version 1 as `records.row_reader` has them, unless they were so
    when the file was written."""
    old = (frame["schema_version"] < SCHEMA_VERSION) & frame["checkpointer"].isna()
    if not old.any():
        return frame
    lines = frame["overrides"].astype(object)
    words = {line: upgraded({"overrides": line})["overrides"] for line in lines[old].unique()}
    return frame.assign(
        overrides=lines.mask(old, lines.map(words)),
        checkpointer=frame["checkpointer"].astype(object).mask(old, upgraded({})["checkpointer"]),
        config_digest=frame["config_digest"].astype(object).mask(old, None),
    )


def _samples(rows: Rows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Overrides and configurations, one of the newest for each key that is overridden anywhere."""
    once = rows.frame.drop_duplicates("overrides", keep="last").dropna(subset="overrides")
    sample = {
        key: (line, at, version)
        for line, at, version in zip(once["overrides"], once["at"], once["schema_version"], strict=True)
        for key in override_values(line)
    }
    for line, at, version in dict.fromkeys(sample.values()):
        if version < SCHEMA_VERSION:
            yield line, upgraded({"overrides": " ".join(override_words(line))})["config"]
        else:
            yield line, rows.config(at, overrides=line)


def _last_row(path: Path) -> dict[str, Any] | None:
    """What identifies the last row of a file, of which no more is read than needed; None if the row is not
    whole."""
    try:
        with path.open("rb") as file:
            size, tail, start = file.seek(0, io.SEEK_END), _TAIL_BYTES, 0
            while not start:
                file.seek(max(0, size - tail))
                read = file.read()
                start = read.rstrip(b"\n").rfind(b"\n") + 1
                if tail >= size:
                    break
                tail *= 4
        row = json.loads(read[start:] or b"{}") if not read or read.endswith(b"\n") else None
    except (OSError, ValueError, RecursionError):
        return None
    return {name: row.get(name) for name in _LAST} if isinstance(row, dict) else None
