"""The parts of a tensor have the content of the full tensor, wherever it is cut."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.compare.across_layouts import _add_up, compare_across, digests
from dcpbench.compare.leaves import compare
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.sentences import describe
from dcpbench.state import snapshot
from dcpbench.state.layout import Extent, whole
from dcpbench.state.snapshot import DigestedLeaf, EmptyShard, Leaf, TensorLeaf, digested

Held = dict[int, TensorLeaf]


def leaf(part: torch.Tensor, extent: Extent | None = None) -> TensorLeaf:
    return TensorLeaf(part, extent or whole(part), None, "param")


def add_up(held: Held) -> tuple[Leaf, Mismatch | None]:
    return _add_up("w", {rank: digested({"w": part})["w"] for rank, part in held.items()})


def content_of(tensor: torch.Tensor) -> DigestedLeaf:
    return digested({"w": leaf(tensor)})["w"]


def tensor_of(shape: list[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def cut_rows(tensor: torch.Tensor, ranks: int, dimension: int) -> Held:
    """Return boxes as of a DTensor; the last ones can be smaller or empty."""
    held: Held = {}
    begin = 0
    shape = tuple(tensor.shape)
    for rank, part in enumerate(tensor.tensor_split(ranks, dimension)):
        offset = tuple(begin if index == dimension else 0 for index in range(tensor.ndim))
        held[rank] = leaf(part, Extent(shape, offset, tuple(part.shape), 0, part.numel()))
        begin += part.shape[dimension]
    return held


def cut_flat(tensor: torch.Tensor, cuts: list[int]) -> Held:
    """Return parts as of FSDP1, which cuts a flattened parameter anywhere."""
    shape = tuple(tensor.shape)
    ends = [*sorted(cut % (tensor.numel() + 1) for cut in cuts), tensor.numel()]
    held: Held = {}
    begin = 0
    for rank, end in enumerate(ends):
        part = tensor.reshape(-1)[begin:end]
        held[rank] = leaf(part, Extent(shape, (0,) * len(shape), shape, begin, end - begin))
        begin = end
    return held


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@settings(deadline=None, max_examples=100)
@given(shape=shapes, ranks=st.integers(1, 5), data=st.data())
def test_parts_of_any_cut_are_assembled(shape: list[int], ranks: int, data: st.DataObject) -> None:
    tensor = tensor_of(shape)
    dimension = data.draw(st.integers(0, len(shape) - 1))
    cuts = data.draw(st.lists(st.integers(0, 300), max_size=4))
    for held in (
        cut_rows(tensor, ranks, dimension),
        cut_flat(tensor, cuts),
        {0: leaf(tensor)},
    ):
        together, wrong = add_up(held)
        assert wrong is None
        assert together == content_of(tensor)
        # The value is its global index, which shows whether extents are right.
        for each in held.values():
            extent, part = each.extent, each.local
            assert torch.equal(extent.take(tensor), part.reshape(-1))
            for local, value in enumerate(part.reshape(-1).tolist()):
                index = extent.global_index(local)
                assert tensor[tuple(index)].item() == value


@settings(deadline=None, max_examples=50)
@given(shape=shapes, ranks=st.integers(2, 5), data=st.data())
def test_part_that_no_rank_has_is_reported(shape: list[int], ranks: int, data: st.DataObject) -> None:
    held = cut_rows(tensor_of(shape), ranks, 0)
    missing = data.draw(st.sampled_from([rank for rank, part in held.items() if part.extent.numel]))
    extent = held.pop(missing).extent
    if not held or all(not other.extent.numel for other in held.values()):
        return
    _, wrong = add_up(held)
    assert wrong is not None
    elements = math.prod(shape)
    assert describe(wrong) == f"the ranks have {elements - extent.numel} of {elements} elements"


@settings(deadline=None, max_examples=50)
@given(shape=shapes, at=st.integers(0, 10_000), victim=st.integers(0, 2))
def test_drifted_replica_is_reported(shape: list[int], at: int, victim: int) -> None:
    replicas = [tensor_of(shape) for _ in range(3)]
    flat = replicas[victim].reshape(-1)
    at %= flat.numel()
    flat.view(torch.int32)[at] ^= 1
    told = [add_up({0: leaf(one), 1: leaf(replicas[victim])})[1] for one in replicas]
    assert [wrong is None for wrong in told] == [rank == victim for rank in range(3)]
    _, wrong = add_up({rank: leaf(one) for rank, one in enumerate(replicas)})
    assert wrong is not None
    ranks = f"rank 0 and rank {max(victim, 1)}"
    assert describe(wrong) == f"replicas differ: {ranks} have different bits for the same part"
    # With the saved tensor, the rank that differs reports where.
    saved, _ = digests({"w": leaf(tensor_of(shape))}, None)
    (found,) = compare_across(saved, {"w": leaf(replicas[victim])}, None, {"w": tensor_of(shape)}.get)
    assert describe(found).startswith(f"index {whole(replicas[0]).global_index(at)}: saved")


def test_nan_and_zeros_are_distinguished() -> None:
    nan = torch.tensor([math.nan])
    assert add_up({0: leaf(nan), 1: leaf(nan.clone())})[1] is None
    zeros = torch.tensor([0.0]), torch.tensor([-0.0])
    assert add_up({rank: leaf(one) for rank, one in enumerate(zeros)})[1]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8]
)
def test_every_dtype_is_gathered(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype)
    together, wrong = add_up(cut_flat(tensor, [1, 4]))
    assert wrong is None
    assert together.dtype == dtype
    assert together.blocks == content_of(tensor).blocks


def test_disagreeing_values_are_reported() -> None:
    assert _add_up("w", {0: 0.1, 1: 0.1}) == (0.1, None)
    _, wrong = _add_up("w", {0: 0.1, 3: 0.2})
    assert wrong is not None
    assert describe(wrong) == "rank 0 has 0.1, rank 3 has 0.2"
    _, wrong = add_up({0: leaf(torch.ones(2)), 1: leaf(torch.ones(2, dtype=torch.int32))})
    assert wrong is not None
    assert describe(wrong).startswith("the ranks do not agree on shape and dtype")


def test_entries_of_empty_shards_are_ignored() -> None:
    tensor = torch.ones(2)
    everything, wrong = digests({"step": EmptyShard(leaf(tensor)), "exp_avg": leaf(tensor)}, None)
    assert list(everything) == ["exp_avg"]
    assert wrong == {}


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_full_digest_is_compared_with_a_part_of_any_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an empty part, and with one of several blocks."""
    monkeypatch.setattr(snapshot, "BLOCK", 4)
    tensor = tensor_of([rows, 2])
    full, _ = digests({"w": leaf(tensor)}, None)
    assert compare(full, {"w": leaf(tensor)}) == []
    if rows:
        assert [one.name for one in compare(full, {"w": leaf(tensor + 1)})] == ["w"]
