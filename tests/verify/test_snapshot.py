"""What outlives its moment: copies of small parts, digests of large ones, and what can still be told."""

import math
from dataclasses import replace

import pytest
import torch

from dcpbench.records.sentences import describe
from dcpbench.verify import snapshot
from dcpbench.verify.compare import compare
from dcpbench.verify.compare_layouts import compare_across
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.perturb import made_different
from dcpbench.verify.snapshot import DigestedLeaf, Leaves, TensorLeaf, retained

WHOLE = torch.arange(4000, dtype=torch.float32).reshape(50, 80)
COLUMNS = Extent((50, 80), (0, 20), (50, 40), 0, 2000)
"""Half of the columns of it."""


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 1000)
    monkeypatch.setattr(snapshot, "BLOCK", 300)


def live() -> Leaves:
    return {
        "w": TensorLeaf(WHOLE[:, 20:60].clone(), COLUMNS, "[Shard(1)]", "param"),
        "b": TensorLeaf(torch.ones(3), whole(torch.ones(3)), None, "buffer"),
        "lr": 0.1,
    }


def test_small_parts_are_copied_and_large_ones_digested() -> None:
    state = live()
    before = retained(state)
    assert isinstance(before["w"], DigestedLeaf)
    assert len(before["w"].blocks) == math.ceil(2000 / 300)
    assert compare(before, state) == []
    for name in ("w", "b"):
        state[name].local[0] += 1
    assert [found.name for found in compare(before, state)] == ["w", "b"]


@pytest.mark.parametrize("at", [0, 299, 300, 1999])
def test_without_the_elements_it_is_told_between_which_they_differ(at: int) -> None:
    state = live()
    before = retained(state)
    state["w"].local.view(-1).view(torch.int32)[at] ^= 1
    (found,) = compare(before, state)
    first, last = at // 300 * 300, min(at // 300 * 300 + 299, 1999)
    between = f"between index {COLUMNS.global_index(first)} and {COLUMNS.global_index(last)}"
    assert describe(found) == f"digests differ in 1 of 7 blocks, first {between}"


def test_the_checkpoint_is_asked_what_it_was() -> None:
    state = live()
    before = retained(state)
    state["w"].local[7, 3] = -1.0
    (found,) = compare(before, state, {"w": WHOLE}.get)
    assert "index [7, 23]: saved 583.0 (0x4411c000), restored -1.0 (0xbf800000); 1 of 2000" in describe(found)
    assert (found.kind, found.facts["index"], found.facts["differing"]) == ("param", [7, 23], 1)
    (found,) = compare(before, state, {"w": WHOLE + 1}.get)
    assert describe(found).endswith("; what the checkpoint holds is not what was saved")


def test_digests_are_compared_across_layouts() -> None:
    before = retained({"w": TensorLeaf(WHOLE, whole(WHOLE), None, "param")})
    one, two = WHOLE.clone(), WHOLE.clone()
    two[3, 4] = 0.5
    same, other = ({"w": TensorLeaf(tensor, whole(tensor), "elsewhere")} for tensor in (one, two))
    assert compare_across(before, same, None) == []
    (found,) = compare_across(before, other, None, {"w": WHOLE}.get)
    assert "index [3, 4]: saved 244.0" in describe(found)
    (found,) = compare_across(before, other, None)
    assert describe(found) == "its digests differ"


def test_what_else_is_said_of_a_large_part_counts() -> None:
    state = live()
    before = retained(state)
    leaf = state["w"]
    for changed, told in (
        (replace(leaf, local=leaf.local.double()), "dtype"),
        (replace(leaf, extent=replace(COLUMNS, offset=(0, 0))), "extent"),
        (replace(leaf, placements="[Replicate()]"), "placements"),
    ):
        (found,) = compare(before, {**state, "w": changed})
        assert describe(found).startswith(told)


def test_every_control_differs() -> None:
    for leaves in (live(), retained(live())):
        for name, leaf in leaves.items():
            if isinstance(leaf, DigestedLeaf):
                assert made_different(leaf).blocks != leaf.blocks
            else:
                assert compare({name: leaf}, {name: made_different(leaf)})
