"""Rows of many sweeps from their `results.csv`, in one go.

`results.jsonl` is what counts, but most of it is `details`: a thousand sweeps are gigabytes of JSON. Its
flat copy is taken where it is surely one: not older, whole, and ending with the same row. All copies with
the same header are parsed as one text, with an empty row before each, which tells them apart; where that
text is damaged, it is halved until it is known which of them it was.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dcpbench.analysis.frame import DTYPES
from dcpbench.records.store import RESULTS_CSV, RESULTS_JSONL, SCHEMA_VERSION

_LAST = ("cell", "status", "started_at")
_NEEDED = {*_LAST, "schema_version"}
_TAIL_BYTES = 1 << 16
_NO_MORE_BYTES = 1 << 26


class NotFlatError(Exception):
    """Why the rows of a sweep are not to be taken from its `results.csv`, in a few words."""


@dataclass(frozen=True)
class _Copy:
    """A `results.csv`: the sweep's number, the names in its header, and the lines below."""

    number: int
    names: tuple[str, ...]
    lines: bytes


def read_flat(folders: Sequence[Path], columns: Sequence[str]) -> tuple[list[pd.DataFrame], dict[int, str]]:
    """The rows of those of these sweeps whose `results.csv` can be relied on.

    Returns:
        frames with these columns (texts as categories, else the dtypes of `read_sweeps`; missing where a
        file has no such column yet) and `at`, the number of the folder; and why not, for each other folder.
    """
    refused: dict[int, str] = {}
    alike: dict[tuple[str, ...], list[_Copy]] = {}
    for number, folder in enumerate(folders):
        try:
            copy = _copy(number, folder)
            alike.setdefault(copy.names, []).append(copy)
        except NotFlatError as why:
            refused[number] = str(why)
    wanted = tuple(dict.fromkeys([*columns, *_NEEDED]))
    frames = [one for copies in alike.values() for one in _parsed(copies, wanted, folders, refused)]
    checked = (frame[~frame["at"].isin(refused)].reset_index(drop=True) for frame in frames)
    return [frame for frame in checked if len(frame)], refused


def _copy(number: int, folder: Path) -> _Copy:
    path = folder / RESULTS_CSV
    try:
        if path.stat().st_mtime_ns < (folder / RESULTS_JSONL).stat().st_mtime_ns:
            raise NotFlatError(f"{RESULTS_CSV} is older than {RESULTS_JSONL}")
        content = path.read_bytes()
    except FileNotFoundError:
        raise NotFlatError(f"no {RESULTS_CSV}") from None
    except OSError as error:
        raise NotFlatError(f"{RESULTS_CSV} cannot be read: {error.strerror}") from None
    head, _, lines = content.partition(b"\n")
    names = tuple(head.decode("ascii", "replace").strip().split(","))
    torn = not content.endswith(b"\n") or b"\0" in content
    if torn or not names or len(set(names)) < len(names) or not set(names) >= _NEEDED:
        raise NotFlatError(f"{RESULTS_CSV} is damaged")
    return _Copy(number, names, lines)


def _parsed(
    copies: list[_Copy], wanted: tuple[str, ...], folders: Sequence[Path], refused: dict[int, str]
) -> list[pd.DataFrame]:
    """The rows of copies with the same names; halved where they cannot be parsed."""
    try:
        frame = _parse(copies, wanted)
    except (ValueError, OverflowError):
        if len(copies) == 1:
            refused[copies[0].number] = f"{RESULTS_CSV} is damaged"
            return []
        half = len(copies) // 2
        parts = (_parsed(part, wanted, folders, refused) for part in (copies[:half], copies[half:]))
        return [frame for part in parts for frame in part]
    _refuse_other_ends(frame, copies, folders, refused)
    return [frame]


def _parse(copies: list[_Copy], wanted: tuple[str, ...]) -> pd.DataFrame:
    """The rows of copies with the same names.

    Raises:
        ValueError: one of them is damaged.
    """
    names = copies[0].names
    before_each = b"," * (len(names) - 1) + b"\n"
    known = [name for name in wanted if name in names]
    frame = pd.read_csv(
        io.BytesIO(before_each + before_each.join(copy.lines for copy in copies)),
        names=list(names),
        usecols=known,
        dtype={name: _dtype(name) for name in known},
        index_col=False,
        keep_default_na=False,
        na_values=[""],
        encoding_errors="strict",
    )
    starts = frame[known].isna().all(axis=1).to_numpy()
    frame["at"] = np.array([-1, *(copy.number for copy in copies)])[_counted(starts, len(copies))]
    frame = frame[~starts]
    whole = frame["schema_version"].eq(SCHEMA_VERSION).fillna(False) & frame[["cell", "status"]].notna().all(
        axis=1
    )
    if not whole.all():
        raise ValueError("a row that is none of this schema")
    for name in wanted:
        if name not in frame:
            frame[name] = pd.Series(index=frame.index, dtype=_dtype(name))
    return frame[[*wanted, "at"]]


def _dtype(name: str) -> Any:
    return "category" if DTYPES[name] == "string" else DTYPES[name]


def _counted(starts: "np.ndarray[Any, np.dtype[np.bool_]]", expected: int) -> "np.ndarray[Any, Any]":
    if starts.sum() != expected:
        raise ValueError("an empty row")
    return starts.cumsum()


def _refuse_other_ends(
    frame: pd.DataFrame, copies: Sequence[_Copy], folders: Sequence[Path], refused: dict[int, str]
) -> None:
    """A copy of a folder may have younger files with older content: then its last row is another one."""
    ends = frame.drop_duplicates("at", keep="last")
    last = ends[list(_LAST)].astype(object).where(ends[list(_LAST)].notna(), None)
    flat = dict(zip(ends["at"], last.to_numpy().tolist(), strict=True))
    for number in (copy.number for copy in copies if copy.number not in refused):
        if _last_row(folders[number] / RESULTS_JSONL) != flat.get(number):
            refused[number] = f"{RESULTS_CSV} does not end with the row that {RESULTS_JSONL} ends with"


def _last_row(path: Path) -> list[Any] | None:
    """What tells the last row of a file apart; None if it has none."""
    try:
        if not path.stat().st_size:
            return None
        row = json.loads(_last_line(path))
    except (OSError, ValueError, RecursionError):
        return ["no row"]
    return [row.get(name) for name in _LAST] if isinstance(row, dict) else ["no row"]


def _last_line(path: Path) -> bytes:
    """The last line of a file, of which no more is read than needed; nothing if it was broken off."""
    with path.open("rb") as file:
        size, tail = file.seek(0, io.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(0, size - tail))
            read = file.read()
            start = read.rstrip(b"\n").rfind(b"\n") + 1
            if start or tail >= min(size, _NO_MORE_BYTES):
                return read[start:] if read.endswith(b"\n") else b""
            tail *= 4
