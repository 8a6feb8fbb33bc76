"""Matching of rows that are runs of one cell, in any sweep.

Rows with the same `config_digest` are runs of one cell. The address of a cell is its axes, and the other
overrides that are part of its identity: it pairs cells of different configurations.
"""

import shlex
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dcpbench.analysis.differing import cell_names, shown_by_axes
from dcpbench.analysis.frame import as_text, read_sweeps
from dcpbench.analysis.query import QueryError
from dcpbench.config.text import listed
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import CellKey, is_below
from dcpbench.records.store import RESULTS_CSV, ResultsError

_SEPARATOR = "\x1f"
_QUOTED = frozenset("'\"\\")
_LOOKED_AT = 10
_LEAST_IN_COMMON = 0.5


def override_words(overrides: object) -> list[str]:
    """Split the overrides of a row; at blanks if its quotes do not match."""
    if not isinstance(overrides, str):
        return []
    try:
        return shlex.split(overrides) if _QUOTED & set(overrides) else overrides.split()
    except ValueError:
        return overrides.split()


def override_values(overrides: object) -> dict[str, str]:
    """Return the keys and values of the overrides that are not axes."""
    pairs = (word.partition("=") for word in override_words(overrides))
    values = {key.lstrip("+~"): word_value for key, equals, word_value in pairs if equals}
    return {key: word_value for key, word_value in values.items() if not shown_by_axes(key)}


def identity_keys(frame: pd.DataFrame) -> set[str]:
    """Return the overridden keys that are part of a cell's identity: those that are, or are above or below, a
    key of the row's `config`."""
    known: set[str] = set()
    once = frame.drop_duplicates(["overrides", "config_digest"])
    for line, config in zip(once["overrides"], once["config"], strict=True):
        for key in override_values(line).keys() - known:
            if is_below(key, config) or any(is_below(config_key, [key]) for config_key in config):
                known.add(key)
    return known


def add_cell_keys(frame: pd.DataFrame, keys: Collection[str], ignored: Collection[str] = ()) -> pd.DataFrame:
    """Add three columns: `address`; `key`, equal for all runs of one cell in any sweep (the digest of its
    configuration); and `others`, the overrides of the address that are not axes. Axes become text, `-` for
    none.

    Args:
        keys: the `identity_keys` of all these rows.
        ignored: axes and overrides that do not distinguish cells.
    """
    cells = frame.assign(**{axis: _mapped(frame[axis], as_text, missing="-") for axis in AXES})
    address = set(keys) - set(ignored)
    cells["others"] = _mapped(
        frame["overrides"],
        lambda line: " ".join(
            sorted(
                f"{key}={override_value}"
                for key, override_value in override_values(line).items()
                if key in address
            )
        ),
        missing="",
    )
    parts = [cells[axis] for axis in AXES if axis not in ignored] + [cells["others"]]
    cells["address"] = [_SEPARATOR.join(values) for values in zip(*parts, strict=True)]
    cells["key"] = frame["config_digest"]
    if ignored:
        configs = frame.drop_duplicates("config_digest").set_index("config_digest")["config"]
        rest = configs.map(lambda config: CellKey(_without(config, ignored)).digest)
        cells["key"] = frame["config_digest"].map(rest.to_dict()).astype("string")
    return cells


def refuse_merged(cells: pd.DataFrame, ignored: Collection[str]) -> None:
    """Raise a QueryError if cells of one sweep differ only in what is ignored."""
    for axis in (axis for axis in AXES if axis in ignored):
        values = cells.groupby(["sweep", "key"])[axis].unique()
        several = values[values.map(len) > 1]
        if len(several):
            raise QueryError(
                f"--ignore {axis}: one sweep has cells that differ only in {axis} "
                f"({', '.join(sorted(several.iloc[0]))}); compare sweeps with one of these values each"
            )


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], ignored: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the keys in which two configurations differ, and both values as text."""
    differing = CellKey(_without(old, ignored)).differences(CellKey(_without(new, ignored)))
    return {key: (as_text(before), as_text(after)) for key, (before, after) in differing.items()}


def names_of_cells(cells: pd.DataFrame) -> list[str]:
    """Return a name for each of these rows `add_cell_keys`: the axes and overrides that distinguish them."""
    columns = {axis: [*cells[axis]] for axis in AXES if axis in cells}
    return cell_names(columns, [line.split() for line in cells["others"]])


def why_nothing_in_common(old: pd.DataFrame, new: pd.DataFrame) -> str:
    """Say why no cell or address is on both sides: the axes without a common value, else all axes that
    differ. Return an empty text if there is one."""
    if any({*old[name]} & {*new[name]} for name in ("key", "address")):
        return ""
    apart, partly = [], []
    for axis in (*AXES, "others"):
        before, after = set(old[axis]), set(new[axis])
        then, now = (
            listed(sorted(axis_value or "none" for axis_value in side), 4) for side in (before, after)
        )
        text = f"{'overrides' if axis == 'others' else axis} ({then} before, {now} now)"
        if not before & after:
            apart.append(text)
        elif before != after:
            partly.append(text)
    if apart:
        return "they differ in " + ", ".join(apart)
    return "no combination of values is on both sides; they differ in " + ", ".join(partly)


def _mapped(column: "pd.Series[Any]", text: Callable[[Any], str], missing: str) -> "pd.Series[Any]":
    """Return a column as texts; each value is converted once, as there are many rows and few values."""
    codes, values = pd.factorize(column)
    texts = np.array([*map(text, values), missing], dtype=object)
    return pd.Series(texts[codes], index=column.index)


def _without(config: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    return {key: setting for key, setting in config.items() if not is_below(key, ignored)}


def sweep_before(folder: Path, rows: pd.DataFrame) -> Path | None:
    """Return the newest earlier sweep in the same parent folder that has ended and has at least half of the
    cells of this one, whose `rows` are given; or None."""
    this_folder = folder.resolve()
    written = {path.parent: _written_ns(path) for path in this_folder.parent.glob(f"*/{RESULTS_CSV}")}
    limit = max(map(_written_ns, this_folder.glob("results.*")), default=0)
    ended = [place for place, at in written.items() if place != this_folder and at <= limit]
    frames = map(_rows_in, sorted(ended, key=written.__getitem__, reverse=True)[:_LOOKED_AT])
    for rows_of_sweep in frames if len(rows) else ():
        if not len(rows_of_sweep):
            continue
        began, then = (sweep_rows["started_at"].dropna().min() for sweep_rows in (rows, rows_of_sweep))
        keys = identity_keys(pd.concat([rows, rows_of_sweep]))
        cells, there = (
            add_cell_keys(sweep_rows, keys)["address"].drop_duplicates()
            for sweep_rows in (rows, rows_of_sweep)
        )
        if (pd.isna(began) or pd.isna(then) or then < began) and cells.isin(there).mean() >= _LEAST_IN_COMMON:
            return Path(rows_of_sweep["sweep"].iloc[0])
    return None


def _rows_in(folder: Path) -> pd.DataFrame:
    with suppress(ResultsError):  # another user may own the folder
        return read_sweeps(folder, details=False).frame
    return pd.DataFrame()


def _written_ns(path: Path) -> int:
    with suppress(OSError):  # it can be removed at any time
        return path.lstat().st_mtime_ns
    return 0
