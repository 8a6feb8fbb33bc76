"""Which rows are runs of one cell, in whatever sweep they are.

The address of a cell is its place in the matrix: its axes, and the other overrides that are part of its
identity. Rows of one address are runs of one cell if their configurations are the same too
(`config_digest`). A row that has no digest counts as one of the first
configuration that is known at its address.
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dcpbench.analysis.frame import as_text
from dcpbench.analysis.query import QueryError
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import CellKey, is_below

_SEPARATOR = "\x1f"
_QUOTED = frozenset("'\"\\")


def override_words(overrides: object) -> list[str]:
    """The overrides of a row one by one; split at blanks where its quotes do not match."""
    if not isinstance(overrides, str):
        return []
    try:
        return shlex.split(overrides) if _QUOTED & set(overrides) else overrides.split()
    except ValueError:
        return overrides.split()


def shown_by_axes(key: str) -> bool:
    """Whether the value of an override is that of an axis; a workload of one's own is the model."""
    return key in AXES or key == "workload.target"


def override_values(overrides: object) -> dict[str, str]:
    """The key and the value of each override that no axis shows."""
    pairs = (word.partition("=") for word in override_words(overrides))
    found = {key.lstrip("+~"): value for key, equals, value in pairs if equals}
    return {key: value for key, value in found.items() if not shown_by_axes(key)}


def identity_keys(overrides: Iterable[object], configs: Iterable[Mapping[str, Any]]) -> set[str]:
    """The keys of rows' overrides that are part of what a cell is: those that are keys of the row's `config`,
    or lie above or below one."""
    known: set[str] = set()
    for line, config in zip(overrides, configs, strict=True):
        for key in override_values(line).keys() - known:
            if is_below(key, config) or any(is_below(one, [key]) for one in config):
                known.add(key)
    return known


def with_cells(frame: pd.DataFrame, keys: Collection[str], ignored: Collection[str] = ()) -> pd.DataFrame:
    """The rows with three columns more: `address`; `key`, equal for all runs of one cell in any sweep; and
    `others`, the overrides of the address that no axis shows. Axes become text, `-` for none, and `repeat` a
    number.

    Args:
        keys: what `identity_keys` says of all these rows.
        ignored: axes and overrides by which cells are not to be distinguished.
    """
    cells = frame.assign(**{axis: _mapped(frame[axis], as_text, missing="-") for axis in AXES})
    address = set(keys) - set(ignored)
    cells["others"] = _mapped(
        frame["overrides"],
        lambda line: " ".join(
            sorted(f"{key}={value}" for key, value in override_values(line).items() if key in address)
        ),
        missing="",
    )
    cells["repeat"] = frame["repeat"].fillna(0).astype(int)
    parts = [cells[axis] for axis in AXES if axis not in ignored] + [cells["others"]]
    cells["address"] = [_SEPARATOR.join(values) for values in zip(*parts, strict=True)]
    digests = _digests(frame, ignored)
    first_known = digests.groupby(cells["address"]).transform("first")
    cells["key"] = cells["address"] + _SEPARATOR + digests.fillna(first_known).fillna("")
    return cells


def refuse_merged(cells: pd.DataFrame, ignored: Collection[str]) -> None:
    """Raise a QueryError if cells of one sweep differ in nothing but what is ignored."""
    for axis in (axis for axis in AXES if axis in ignored):
        values = cells.groupby(["sweep", "key"])[axis].unique()
        several = values[values.map(len) > 1]
        if len(several):
            raise QueryError(
                f"--ignore {axis}: one sweep has cells that differ in it alone ({axis}="
                f"{', '.join(sorted(several.iloc[0]))}): they are several cells, not runs of one"
            )


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], ignored: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """The keys in which two configurations differ, what is ignored aside, and both values as text."""
    found = CellKey(_without(old, ignored)).differences(CellKey(_without(new, ignored)))
    return {key: (as_text(before), as_text(after)) for key, (before, after) in found.items()}


def shown_axes(cells: pd.DataFrame) -> list[str]:
    """The axes in which these cells differ, parallelism in any case, and `others` if these differ."""
    known = [axis for axis in (*AXES, "others") if axis in cells]
    return [axis for axis in known if axis == "parallel" or cells[axis].nunique() > 1]


def cell_names(cells: pd.DataFrame) -> list[str]:
    """A name for each cell, of its `shown_axes`."""
    texts = [
        list(cells[axis]) if axis == "others" else [f"{axis}={value}" for value in cells[axis]]
        for axis in shown_axes(cells)
    ]
    return [" ".join(filter(None, parts)) for parts in zip(*texts, strict=True)]


def not_in_common(old: pd.DataFrame, new: pd.DataFrame) -> str:
    """Why no address is in both: axes without a common value, else all that differ."""
    apart, partly = [], []
    for axis in (*AXES, "others"):
        before, after = set(old[axis]), set(new[axis])
        text = f"{'overrides' if axis == 'others' else axis} ({_some(before)} before, {_some(after)} now)"
        if not before & after:
            apart.append(text)
        elif before != after:
            partly.append(text)
    if apart:
        return "they differ in " + ", ".join(apart)
    return "no value is missing in either, but no combination is in both; they differ in " + ", ".join(partly)


def _mapped(column: "pd.Series[Any]", text: Callable[[Any], str], missing: str) -> "pd.Series[Any]":
    """A column as texts; each value is looked at once, as there are many rows and few values."""
    codes, values = pd.factorize(column)
    texts = np.array([*map(text, values), missing], dtype=object)
    return pd.Series(texts[codes], index=column.index)


def _digests(frame: pd.DataFrame, ignored: Collection[str]) -> "pd.Series[Any]":
    if not ignored:
        return frame["config_digest"]
    once = frame.dropna(subset="config_digest").drop_duplicates("config_digest").set_index("config_digest")
    rest = once["config"].map(lambda config: CellKey(_without(config, ignored)).digest)
    return frame["config_digest"].map(rest.to_dict()).astype("string")


def _without(config: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not is_below(key, ignored)}


def _some(values: set[str]) -> str:
    shown = sorted(value or "none" for value in values)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
