"""The state that a known defect restores is distinguished from any other."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import Comparison, same_leaves
from dcpbench.compare.stored import StoredChunk
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import StatePart, text_of
from dcpbench.plugins.defects import as_list, one_replica
from dcpbench.plugins.defects._slices import slices
from dcpbench.plugins.defects.own_chunks import loaded_alone
from dcpbench.plugins.defects.sliced_by_shard import is_cut, set_again
from dcpbench.plugins.defects.state_of_frozen import without_frozen
from dcpbench.state.layout import Extent, whole
from dcpbench.state.snapshot import DigestedLeaf, EmptyShard, Leaves, TensorLeaf, digested
from dcpbench.workloads.world import World
from support.alone import bare_cell, config, world


def restored(check: str, saved: Leaves, actual: Leaves) -> LoadReference:
    """Return the reference of a load in which all names differ."""
    checkpoint = Checkpoint(1, "", {check: saved})
    found = [Mismatch(text_of(name), Problem.differs) for name in actual]
    return LoadReference(checkpoint, {check: Comparison(saved, actual, Compared(found, {}, {}))})


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    shards=st.integers(2, 3),
    large=st.booleans(),
    data=st.data(),
)
def test_slices_by_tp_shard_are_computed(
    shape: list[int], shards: int, large: bool, data: st.DataObject
) -> None:
    """TP shards any dimension, and FSDP1 splits anywhere; only digests of `large` parts are retained."""
    tensor = torch.rand(shape)
    dimension = data.draw(st.integers(0, len(shape) - 1))
    cuts = tensor.chunk(shards, dimension)
    rank = data.draw(st.integers(0, len(cuts) - 1))
    offset = [0] * len(shape)
    offset[dimension] = sum(cut.shape[dimension] for cut in cuts[:rank])
    start = data.draw(st.integers(0, cuts[rank].numel() - 1))
    numel = data.draw(st.integers(1, cuts[rank].numel() - start))
    extent = Extent(tuple(shape), tuple(offset), tuple(cuts[rank].shape), start, numel)
    own = slice(start, start + numel)

    flat = tensor.reshape(-1)
    again = torch.cat([flat[: cut.numel()].reshape(cut.shape) for cut in cuts], dimension)
    wrong = extent.take(tensor).clone()
    wrong[-1] = 2.0
    restored = {"once": flat[own], "again": again.reshape(-1)[own], "wrong": wrong}
    live = {name: TensorLeaf(extent.take(tensor), extent, None) for name in restored}
    saved = digested(live) if large else live
    actual: Leaves = {name: TensorLeaf(each, extent, None) for name, each in restored.items()}
    by_shard = partial(slices, saved, actual, is_sliced=is_cut, set_again=partial(set_again, shards=shards))
    once, again = by_shard(read_saved=lambda name: tensor)
    assert same_leaves(once, actual) | same_leaves(again, actual) == {"once", "again"}
    others = tensor + 1, tensor.view(torch.int32), torch.cat([tensor, tensor]), None
    for other in others:
        made = by_shard(read_saved=lambda name, held=other: held)
        assert made == ({}, {}), "the checkpoint does not hold what was saved"


def test_state_without_tp_shards_has_no_slices() -> None:
    tensor = torch.arange(8.0)
    half, all_of_it = Extent((8,), (4,), (4,), 0, 4), Extent((8,), (0,), (8,), 4, 4)
    saved: Leaves = {
        "w": TensorLeaf(tensor[4:], half, None),
        "plain": TensorLeaf(tensor[4:], all_of_it, None),
    }
    saved |= {"lr": 0.1}
    actual: Leaves = {name: replace(saved[name], local=tensor[:4]) for name in ("w", "plain")}
    actual |= {"lr": 0.2, "unknown": actual["w"]}
    once, _ = slices(saved, actual, lambda name: tensor, is_cut, partial(set_again, shards=2))
    assert same_leaves(once, actual) == {"w"}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("large", [False, True])
def test_values_of_any_replica_are_explained(
    monkeypatch: pytest.MonkeyPatch, place: int, large: bool, tmp_path: Path
) -> None:
    """The peer whose values were restored is the first, the second or the last rank."""

    def leaves(value: float) -> Leaves:
        tensor = torch.full((2,), value)
        leaf = TensorLeaf(tensor, whole(tensor), None)
        return {
            "first": leaf,
            "idle": EmptyShard(leaf),
            "lr": value,
            "dtype": leaf,
            "none": leaf,
            "last": leaf,
        }

    saved, actual = leaves(1.0), leaves(2.0)
    actual["none"] = replace(actual["none"], local=torch.full((2,), 3.0))
    actual["dtype"] = replace(actual["dtype"], local=actual["dtype"].local.double())

    def gathered(_: World, mine: Any) -> list[Any]:
        if not isinstance(mine[StatePart.optimizer], dict):  # the names
            return [mine]
        assert mine[StatePart.optimizer].keys() == {"first", "dtype", "none", "last"}
        theirs = digested(leaves(2.0))
        peers = {name: leaf for name, leaf in theirs.items() if isinstance(leaf, DigestedLeaf)}
        ranks = [mine, mine]
        ranks.insert(place, {StatePart.optimizer: peers})
        return ranks

    monkeypatch.setattr(World, "gathered", gathered)
    cell = bare_cell(tmp_path, config(model="short", parallel="hsdp", world_size=2), world(0, 2))
    reference = restored(StatePart.optimizer, digested(saved) if large else saved, actual)
    states = one_replica.defect.expected(cell, "restored", reference)
    equal = [same_leaves(one[StatePart.optimizer], actual) for one in states]
    assert set().union(*equal) == {"first", "last"}


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    start=st.integers(0, 3),
    share=st.floats(0, 1),
    changed=st.booleans(),
    data=st.data(),
)
def test_load_of_own_chunks_is_computed(
    shape: list[int], start: int, share: float, changed: bool, data: st.DataObject
) -> None:
    """The part is anywhere in a tensor, of which this rank has stored some boxes that can overlap."""
    saved = torch.rand(shape) + 1
    size = saved.numel()
    start = min(start, size - 1)
    part = Extent(tuple(shape), (0,) * len(shape), tuple(shape), start, max(1, int(share * (size - start))))
    before = -torch.rand(part.numel) - 1
    expected, chunks = -torch.ones(shape) * 9, []
    expected.view(-1)[start : start + part.numel] = before
    for _ in range(data.draw(st.integers(0, 2))):
        offsets = [data.draw(st.integers(0, each - 1)) for each in shape]
        sizes = [data.draw(st.integers(1, each - at)) for each, at in zip(shape, offsets, strict=True)]
        box = tuple(slice(at, at + long) for at, long in zip(offsets, sizes, strict=True))
        expected[box] = saved[box]
        chunks.append(StoredChunk(tuple(offsets), tuple(sizes), saved[box].clone))
    local = part.take(expected).clone()
    if changed:
        local.view(-1)[data.draw(st.integers(0, part.numel - 1))] = 5
    was, here = TensorLeaf(before, part, None), TensorLeaf(local.view(-1), part, None)
    kept = before.clone()
    made = {"w": loaded_alone(was, here, chunks)}
    assert same_leaves(made, {"w": here}) == (set() if changed else {"w"})
    assert torch.equal(kept, was.local), "what is retained stays"


def test_list_equal_to_the_tuple_is_explained() -> None:
    saved = {"betas": (0.8, 0.9), "eps": (None, 1.0), "lr": [0.1], "weight": 1.0}
    actual = {"betas": [0.8, 0.9], "eps": [None, 2.0], "lr": (0.1,), "weight": 2.0}
    made = as_list.defect.expected(None, "restored", restored(StatePart.optimizer, saved, actual))
    assert [same_leaves(one[StatePart.optimizer], actual) for one in made] == [{"betas"}]


@pytest.mark.parametrize(
    ("present", "absent"),
    [
        ({}, {("state", "w", "step"), ("state", "w", "sum")}),
        ({("state", "w", "step"): 1.0}, set()),  # restored in part
        ({("state", "w", "step"): EmptyShard(1.0)}, {("state", "w", "step"), ("state", "w", "sum")}),
        ({("state", "ww", "step"): 1.0}, {("state", "w", "step"), ("state", "w", "sum")}),
    ],
)
def test_all_state_of_a_frozen_parameter_is_dropped(present: Leaves, absent: set[str]) -> None:
    saved = dict.fromkeys(
        (("state", "w", "step"), ("state", "w", "sum"), ("state", "ww", "step"), ("param_groups", 0, "lr")),
        1.0,
    )
    flags = {
        ("requires_grad", "w"): False,
        ("requires_grad", "ww"): True,
        ("training", "model.w"): False,
    }
    assert without_frozen(saved, {StatePart.flags: flags, StatePart.optimizer: present}).keys() == absent
