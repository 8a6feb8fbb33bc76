"""Cells are named, and laid out in matrices, by the axes in which they differ."""

from itertools import product
from typing import Any

import pytest

from dcpbench.analysis.differing import cell_names, matrices
from dcpbench.core.axes import AXES


@pytest.mark.parametrize(
    ("axes", "words", "names"),
    [
        (
            {"save": ["sync", "async", "async"], "seed": [1, 2, 2], "parallel": ["ddp", "ddp", "fsdp"]},
            [],
            ["save=sync parallel=ddp", "save=async parallel=ddp", "save=async parallel=fsdp"],
        ),
        ({"parallel": ["ddp", "ddp"], "seed": [1, None]}, [], ["parallel=ddp seed=1", "parallel=ddp"]),
        (
            {"parallel": ["ddp", "ddp"], "compile": [False, True]},
            [],
            ["parallel=ddp compile=false", "parallel=ddp compile=true"],
        ),
        ({"parallel": ["ddp"], "seed": [1]}, [["parallel=ddp", "seed=1", "saves=2"]], ["parallel=ddp"]),
        (
            {"parallel": ["ddp", "ddp"]},
            [["saves=1", "repeat=1", "parallel=ddp"], ["+saves=2", "repeat=1"]],
            ["parallel=ddp saves=1", "parallel=ddp +saves=2"],
        ),
        ({"seed": [1], "scenario": ["script"], "parallel": [None]}, [], ["scenario=script"]),
        ({"parallel": [], "save": []}, [], []),
    ],
)
def test_names_have_what_distinguishes_cells(
    axes: dict[str, list[Any]], words: list[list[str]], names: list[str]
) -> None:
    assert cell_names(axes, words) == names


def columns(*cells: dict[str, Any]) -> dict[str, list[Any]]:
    return {axis: [cell.get(axis) for cell in cells] for axis in AXES}


def laid_out(*cells: dict[str, Any]) -> list[tuple[list[str], list[str]]]:
    return [(one["rows"], one["columns"]) for one in matrices(columns(*cells))]


def every(**lists: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def test_matrix_has_its_important_axes_at_the_side() -> None:
    assert laid_out(*every(save=["sync", "async"], parallel=["ddp", "fsdp2", "hsdp2"])) == [
        (["parallel"], ["save"])
    ]
    assert laid_out({"parallel": "ddp"}) == [([], [])]


def test_axes_that_do_not_fit_are_folded() -> None:
    cells = every(parallel=["ddp", "fsdp2"], save=["sync", "async"], compile=[True, False], seed=[*range(30)])
    (one,) = matrices(columns(*({**cell, "device": f"of {cell['parallel']}"} for cell in cells)))
    assert {*one["rows"], *one["columns"]} == {"parallel", "save", "compile"}
    assert one["folded"] == ["seed"], "the device follows from the parallelism"


def test_faults_and_scenarios_have_separate_matrices() -> None:
    values = [f"value {number}" for number in range(9)]
    chains = every(scenario=["chain"], parallel=values)
    others = every(scenario=["convert", "twice"], load_parallel=values, save=["sync"])
    saves = every(scenario=["save"], save=values)
    faults = every(scenario=["chain"], parallel=["ddp"], fault=["lr", "lost"])
    found = matrices(columns(*chains, *others, *saves, *faults))
    assert [(one["rows"], one["scenarios"], one["injected"]) for one in found] == [
        (["parallel"], ["chain"], False),
        (["load_parallel"], ["convert", "twice"], False),
        (["save"], ["save"], False),
        (["fault"], None, True),
    ]
    assert [one["injected"] for one in matrices(columns(*faults))] == [None]
