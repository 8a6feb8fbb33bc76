"""Few cells in which every two values meet: `matrix=pairwise`."""

import itertools
import math
from typing import Any

import pytest
from hydra.core.config_loader import ConfigLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from test_blocks import cells_in, loaded, planned

from dcpbench.compose.pairwise import Combination, PairCover, Search, sentence
from dcpbench.config.errors import ConfigError

shapes = st.lists(st.integers(1, 5), min_size=2, max_size=6)
AXES = (
    *("parallel=none,ddp,fsdp2", "save=sync,async,async_cached", "overlap_saves=false,true"),
    *("model=even,uneven", "seed=range(0,3)", "optimizer=adam,sgd"),
)


def lists_of(shape: list[int]) -> list[list[str]]:
    return [[f"{axis}={value}" for value in range(number)] for axis, number in enumerate(shape)]


def pairs_of(rows: list[Combination]) -> set[tuple[str, str]]:
    return {pair for row in rows for pair in itertools.combinations(row, 2)}


def anything(_: Any, __: Any = None) -> bool:
    return True


def nothing(_: Any, __: Any = None) -> bool:
    return False


@pytest.mark.parametrize(
    ("shape", "at_most"), [([8, 3, 2, 2, 10], 80), ([5] * 10, 60), ([3] * 4 + [2] * 4, 16)]
)
def test_pairs_need_few_jobs(shape: list[int], at_most: int) -> None:
    assert len(Search(lists_of(shape), anything, nothing).found().rows) <= at_most < math.prod(shape)


@given(shapes, st.data())
@settings(deadline=None, max_examples=50)
def test_every_runnable_pair_is_in_a_job_that_runs(shape: list[int], data: st.DataObject) -> None:
    """Constraints of two values, some known before, and one of three."""
    lists = lists_of(shape)
    anywhere = st.sampled_from([value for values in lists for value in values])
    apart = data.draw(st.lists(st.frozensets(anywhere, min_size=2, max_size=3), max_size=4))
    known = {conflict for conflict in apart if len(conflict) == 2 and data.draw(st.booleans())}

    def runs(row: Combination) -> bool:
        return not any(conflict <= {*row} for conflict in apart)

    def conflicts(one: str, other: str) -> bool:
        return frozenset((one, other)) in known

    found = Search(lists, runs, conflicts).found()
    assert Search(lists, runs, conflicts).found() == found, "the same cells on every day"
    assert all(row[axis] in values for row in found.rows for axis, values in enumerate(lists))
    could = pairs_of([row for row in itertools.product(*lists) if runs(row)])
    assert pairs_of([row for row in found.rows if runs(row)]) == could
    assert not could & {*found.left_out}
    alone = {value for values in lists for value in values} - {value for pair in could for value in pair}
    assert {*found.never} == alone
    assert [row for row in found.rows if not runs(row)] == found.rows[len(found.rows) - len(alone) :]


def test_pairs_left_out_are_printed() -> None:
    lists = [["a=1", "a=2"], ["b=1", "b=2"]]
    told = sentence(lists, PairCover([("a=1", "b=1")] * 3, [("a=2", "b=2")], ["a=3"]))
    assert told.startswith("matrix=pairwise: 3 of 4 cells have every pair of values that can run; ")
    assert told.endswith("left out: a=3 with any, a=2 with b=2")
    many = PairCover([], [("a=1", f"b={number}") for number in range(9)], [])
    assert sentence(lists, many).endswith("a=1 with b=2 and 6 more")


@pytest.mark.slow
def test_pairwise_cells_have_all_runnable_pairs(hydra_loader: ConfigLoader) -> None:
    base = loaded(hydra_loader, "matrix=pairwise", *AXES)
    sentences = list[str]()
    cells = cells_in(hydra_loader, base, ("matrix=pairwise", *AXES), sentences)
    assert "left out: save=async_cached with any, save=sync with overlap_saves=True" in sentences[0]
    (skip,) = [cell.name for cell in cells if cell.skip]
    assert "save=async_cached" in skip
    met = {pair for cell in cells for pair in itertools.combinations(cell.name.split(","), 2)}
    assert {("parallel=fsdp2", "optimizer=sgd"), ("overlap_saves=true", "seed=2")} <= met
    assert len(cells) < 20, "of 216"


@pytest.mark.slow
def test_block_of_an_experiment_can_be_pairwise(hydra_loader: ConfigLoader) -> None:
    block = {key: values for key, _, values in (axis.partition("=") for axis in AXES[2:])}
    pairs = {**block, "save": "async", "matrix": "pairwise"}
    blocks = {"pairs": pairs, "all": {"parallel": "ddp,fsdp", "saves": 1}}
    by_pairs = [cell.name for cell in planned(hydra_loader, blocks)]
    assert 6 + 2 <= len(by_pairs) < 24 + 2
    assert not any("matrix" in name for name in by_pairs)
    typed = by_pairs[3].split(",")
    assert [cell.name for cell in planned(hydra_loader, blocks, *typed)] == [by_pairs[3]]
    pairs["matrix"] = "pairwse"
    with pytest.raises(ConfigError, match=r"matrix=pairwse: .* did you mean pairwise\?"):
        planned(hydra_loader, blocks)
