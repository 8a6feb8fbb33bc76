"""The axes in which cells differ, and names that distinguish the cells by them.

Cells are given by columns: the values of each axis, one of each cell. A driver names its cells before its
ranks have started, so nothing here imports pandas.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dcpbench.core.axes import AXES

Columns = Mapping[str, Sequence[Any]]

_IMPORTANT = [spec.name for spec in sorted(AXES.values(), key=lambda spec: spec.place) if spec.place]
_NONE = (None, "", "-")
_COLUMNS_AT_MOST = 24
_COLUMN_AXES_AT_MOST = 2
_AXES_AT_A_GLANCE = 2
_FULL = 0.5


def combinations(columns: Columns, axes: Sequence[str]) -> int:
    """Return how many combinations of values of these axes there are."""
    return len({*zip(*(columns[axis] for axis in axes), strict=True)}) if axes else 1


def axes_that_differ(columns: Columns) -> list[str]:
    """Return the axes with more than one value."""
    return [axis for axis in columns if combinations(columns, [axis]) > 1]


def distinguishing_axes(columns: Columns) -> list[str]:
    """Return the axes that distinguish all cells, the most important first, without those that follow from
    more important ones.

    >>> distinguishing_axes({"save": ["sync", "async"], "seed": [1, 1], "copy": ["a", "b"]})
    ['save']
    """
    telling, known = list[str](), 1
    for axis in sorted(axes_that_differ(columns), key=_place):
        if (count := combinations(columns, [*telling, axis])) > known:
            telling, known = [*telling, axis], count
    return telling


def _place(axis: str) -> int:
    return _IMPORTANT.index(axis) if axis in _IMPORTANT else len(_IMPORTANT)


def common_overrides(words: Sequence[Sequence[str]]) -> set[str]:
    """Return the overrides that all cells have."""
    return set.intersection(*map(set, words)) if words else set()


def shown_by_axes(key: str) -> bool:
    """Tell whether an override sets an axis; a custom workload is the model."""
    return key in AXES or key == "workload.target"


def other_overrides(words: Sequence[Sequence[str]]) -> list[str]:
    """Return for each cell the overrides that set no axis and that not all cells have."""
    common = common_overrides(words)
    keys = {word: word.lstrip("+~").partition("=")[0] for of_cell in words for word in of_cell}
    return [
        " ".join(word for word in of_cell if word not in common and not shown_by_axes(keys[word]))
        for of_cell in words
    ]


def cell_names(columns: Columns, words: Sequence[Sequence[str]] = ()) -> list[str]:
    """Return a name for each cell: its parallelism, the axes that distinguish all cells, and its other
    `words`. Cells without these are named by the most important axis that has a value.

    >>> cell_names({"parallel": ["ddp", "ddp"], "save": ["sync", None], "seed": [1, 2]}, [["saves=2"], []])
    ['parallel=ddp save=sync saves=2', 'parallel=ddp']
    """
    others = other_overrides(words)
    telling = distinguishing_axes({**columns, **({"": others} if others else {})})
    shown = [axis for axis in columns if axis == "parallel" or axis in telling]
    has_value = [axis for axis in sorted(columns, key=_place) if {*columns[axis]}.difference(_NONE)]
    if not {*shown}.intersection(has_value):
        shown += has_value[:1]
    named = [[_word(axis, axis_value) for axis_value in columns[axis]] for axis in shown]
    parts = zip(*named, *([others] if others else []), strict=True)
    return [" ".join(filter(None, of_cell)) for of_cell in parts]


def _word(axis: str, value: Any) -> str:
    if value in _NONE:
        return ""
    return f"{axis}={str(value).lower() if isinstance(value, bool) else value}"


def matrices(columns: Columns) -> list[dict[str, Any]]:
    """Return the matrices that show all cells: axes of their `rows` and `columns`, and `folded` axes, for
    which a square shows the worst of several cells.

    Cells with an injected fault have a separate matrix: `injected` is then true or false, else null.
    Scenarios have different axes, and in one matrix most squares would be empty: those with the same axes
    share one, which names its `scenarios`.
    """
    has_fault = [fault is not None for fault in columns["fault"]]
    apart = 0 < sum(has_fault) < len(has_fault)
    others = _where(columns, [not faulty for faulty in has_fault]) if apart else columns
    parts = [_matrix(others)]
    placed = parts[0]["rows"], parts[0]["columns"]
    most = combinations(others, placed[0]) * combinations(others, placed[1])
    if combinations(others, [*placed[0], *placed[1]]) < _FULL * most:
        alike: dict[tuple[str, ...], list[Any]] = {}
        for scenario in dict.fromkeys(others["scenario"]):
            alone = _where(others, [name == scenario for name in others["scenario"]])
            alike.setdefault(tuple(axes_that_differ(alone)), []).append(scenario)
        if len(alike) > 1:
            parts = [
                _matrix(_where(others, [name in of for name in others["scenario"]])) | {"scenarios": of}
                for of in alike.values()
            ]
    whole_matrices = [matrix | {"injected": False if apart else None} for matrix in parts]
    return (
        [*whole_matrices, _matrix(_where(columns, has_fault)) | {"injected": True}]
        if apart
        else whole_matrices
    )


def _where(columns: Columns, chosen: Sequence[bool]) -> Columns:
    return {
        axis: [axis_value for axis_value, is_chosen in zip(values, chosen, strict=True) if is_chosen]
        for axis, values in columns.items()
    }


def _matrix(columns: Columns) -> dict[str, Any]:
    """Return the best matrix that fits. Where all axes together would be too wide for any page, the least
    important ones are folded."""
    names = axes_that_differ(columns)
    kept = distinguishing_axes(columns) if len(names) > _AXES_AT_A_GLANCE else [*names]
    while True:
        rows, top, fits = _best(columns, [axis for axis in names if axis in kept])
        if fits or not kept:
            break
        kept.pop()
    placed = [*rows, *top]
    known = combinations(columns, placed)
    folded = [axis for axis in names if axis not in placed and combinations(columns, [*placed, axis]) > known]
    return {"rows": rows, "columns": top, "folded": folded, "scenarios": None}


def _best(columns: Columns, names: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return the axes of the rows and of the columns, and whether that fits on a page. Few and full rows and
    columns read best; a column costs more than a row, since pages are taller than wide."""
    down = [axis for axis in _IMPORTANT if AXES[axis].down and axis in names]
    first = [*down, *(axis for axis in names if axis not in down)]
    pairs = [
        [first_axis, second_axis]
        for at, first_axis in enumerate(first[:3])
        for second_axis in first[at + 1 : 3]
    ]
    best: tuple[list[str], list[str], bool] = [], [*names], not names
    least = True, float("inf")
    for rows in [*([axis] for axis in first), *pairs]:
        top = [axis for axis in names if axis not in rows]
        across = combinations(columns, top)
        fits = across <= _COLUMNS_AT_MOST and len(top) <= _COLUMN_AXES_AT_MOST
        cost = combinations(columns, rows) + 2 * across + 2 * (len(rows) - 1) + first.index(rows[0]) / 10
        if (not fits, cost) < least:
            best, least = (rows, top, fits), (not fits, cost)
    return best
