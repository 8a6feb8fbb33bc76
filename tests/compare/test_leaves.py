"""The comparison against brute force: exactly the flipped bits are reported."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from dcpbench.compare.leaves import (
    ABSENT_LEAF,
    AS_STORED,
    bits,
    compare,
    same_leaves,
    same_value,
    with_location,
)
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.sentences import describe
from dcpbench.state.layout import whole
from dcpbench.state.snapshot import DigestedLeaf, EmptyShard, Leaves, TensorLeaf, digested

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def leaf(tensor: torch.Tensor) -> TensorLeaf:
    return TensorLeaf(tensor, whole(tensor), None)


@settings(deadline=None, max_examples=150)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_changed_byte_is_located(
    dtype: torch.dtype, shape: list[int], seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    numel = math.prod(shape)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * width,), generator=generator)
    raw = raw.to(torch.uint8)
    saved = raw.view(dtype).reshape(shape)
    assert compare({"w": leaf(saved)}, {"w": leaf(saved.clone())}) == []
    if not numel:
        return
    byte = data.draw(st.integers(0, numel * width - 1))
    changed = raw.clone()
    changed[byte] ^= 1
    (found,) = compare({"w": leaf(saved)}, {"w": leaf(changed.view(dtype).reshape(shape))})
    index = [int(i) for i in torch.unravel_index(torch.tensor(byte // width), torch.Size(shape))]
    assert found.name == "w"
    assert f"index {index}" in describe(found)
    assert "1 of " in describe(found)


@settings(deadline=None, max_examples=60)
@given(
    drawn=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 6), st.sampled_from(["same", "bit", "strides"])),
        min_size=2,
        max_size=12,
    )
)
def test_many_small_tensors_are_compared_as_one_by_one(drawn: list[tuple[torch.dtype, int, str]]) -> None:
    saved, restored, wrong = Leaves(), Leaves(), []
    for number, (dtype, numel, change) in enumerate(drawn):
        one = torch.arange(2 * numel).to(dtype).reshape(numel, 2)
        other = one.t().contiguous().t() if change == "strides" else one.clone()
        if change == "bit" and numel:
            bits(other)[number % bits(other).numel()] ^= 1
            wrong.append(f"w{number}")
        saved[f"w{number}",], restored[f"w{number}",] = leaf(one), leaf(other)
    for closely in (True, False):
        assert [found.name for found in compare(saved, restored, closely=closely)] == wrong


def test_equal_small_tensors_are_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: Leaves = {("w", number): leaf(torch.full((4,), float(number))) for number in range(50)}
    restored = {name: replace(one, local=one.local.clone()) for name, one in saved.items()}
    calls: list[object] = []
    honest = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *both: calls.append(both) or honest(*both))
    assert compare(saved, restored) == []
    assert len(calls) == 1


def test_bits_distinguish_zeros_and_equate_nan() -> None:
    nan = torch.tensor([math.nan])
    assert torch.equal(bits(nan), bits(nan.clone()))
    assert compare({"w": leaf(torch.tensor([0.0]))}, {"w": leaf(torch.tensor([-0.0]))})


def test_local_shape_is_compared() -> None:
    saved = leaf(torch.zeros(2, 3))
    (found,) = compare({"w": saved}, {"w": replace(saved, local=torch.zeros(3, 2))})
    assert describe(found) == "local shape: saved (2, 3), restored (3, 2)"


def test_control_reports_names_only() -> None:
    saved, changed = (replace(leaf(torch.full((2,), each)), kind="param") for each in (0.0, 1.0))
    (found,) = compare({"w": saved}, {"w": changed})
    assert (found.kind, found.max_abs_diff, found.facts["share"]) == ("param", 1.0, math.inf)
    assert compare({"w": saved}, {"w": changed}, closely=False) == [Mismatch("w", Problem.differs, "param")]


def test_different_block_counts_raise() -> None:
    saved = digested({"w": leaf(torch.zeros(2))})
    with pytest.raises(ValueError, match="shorter"):
        compare(saved, {"w": replace(saved["w"], blocks=())})


ONES = leaf(torch.ones(2))


@pytest.mark.parametrize(
    ("saved", "restored", "told"),
    [
        ({"s": EmptyShard(1.0)}, {}, []),
        ({}, {"s": EmptyShard(1.0)}, []),
        ({"s": EmptyShard(ONES)}, {"s": EmptyShard(leaf(torch.ones(2)))}, []),
        ({"s": EmptyShard(ONES)}, {"s": EmptyShard(leaf(torch.zeros(2)))}, [("s", Problem.differs)]),
        ({"s": EmptyShard(0.0)}, {"s": EmptyShard(-0.0)}, [("s", Problem.value)]),
        ({"s": EmptyShard(1.0)}, {"s": 1.0}, [("s", Problem.value)]),
        ({"s": 1.0}, {"s": EmptyShard(1.0)}, [("s", Problem.value)]),
        ({"s": ONES}, {"s": 1.0}, [("s", Problem.value)]),
        ({"s": 1.0}, {"s": ONES}, [("s", Problem.value)]),
        (
            {"s": 1, "t": 2},
            {"a": 0, "s": 1, "z": 3},
            [("t", "missing"), ("a", "unexpected"), ("z", "unexpected")],
        ),
    ],
)
def test_only_idle_entries_can_be_missing(saved: Leaves, restored: Leaves, told: list) -> None:
    """Entries of parameters without elements on this rank are compared if both sides have them."""
    assert [(found.name, found.problem) for found in compare(saved, restored)] == told


@pytest.mark.parametrize(
    ("held", "restored", "told"),
    [
        (torch.ones(2), torch.tensor([1.0, 2.0]), (Problem.differs, None, False)),
        (torch.zeros(2), torch.zeros(2), (Problem.digests_differ, AS_STORED, True)),
        (torch.zeros(2), torch.tensor([0.0, 2.0]), (Problem.digests_differ, None, True)),
        (torch.ones(3), torch.zeros(2), (Problem.digests_differ, None, True)),
        (torch.ones(1), torch.zeros(2), (Problem.digests_differ, None, True)),
        (torch.ones(2, dtype=torch.float64), torch.zeros(2), (Problem.digests_differ, None, True)),
        (None, torch.zeros(2), (Problem.digests_differ, None, False)),
    ],
)
def test_checkpoint_locates_differing_digests(
    held: torch.Tensor | None, restored: torch.Tensor, told: tuple
) -> None:
    (found,) = compare(digested({"w": ONES}), {"w": leaf(restored)}, lambda _: held)
    assert (found.problem, found.by, "checkpoint_differs" in found.facts) == told
    assert found.kind == ONES.kind


def test_rank_without_a_part_has_no_mismatch() -> None:
    expected = digested({"w": ONES})["w"]
    assert isinstance(expected, DigestedLeaf)
    assert (
        with_location(("w",), Mismatch("w", Problem.replicas), expected, None, {("w",): ONES.local}.get)
        is None
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (True, 1),
        (0.0, -0.0),
        (0.1, math.nextafter(0.1, 1)),
        ((1, 2), [1, 2]),
        ([1, [2]], [1, [3]]),
        ({"a": 1}, {"a": 1, "b": 2}),
        (None, False),
        ("1", b"1"),
        ([0.0], [-0.0]),
        ((0.0, 1), (-0.0, 1)),
        ([1], [1, 2]),
        ({"a": 0.0, "b": 1, "c": 2}, {"a": -0.0, "b": 1, "c": 2}),
        ({"a": 0, "b": 1, "c": 0.0}, {"a": 0, "b": 1, "c": -0.0}),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
    ],
)
def test_values_differ_by_type_and_bits(one: object, other: object) -> None:
    assert same_value(one, one)
    assert same_value(other, other)
    assert not same_value(one, other)
    assert describe(compare({"x": one}, {"x": other})[0]) == f"saved {one!r}, restored {other!r}"


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|invariant).*")
@pytest.mark.parametrize(
    "composite",
    [
        lambda x: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged),
        lambda x: torch.nested.as_nested_tensor([x, x[:1]]),
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: TwoTensor(torch.ones_like(x), x),
    ],
)
def test_composite_tensors_are_compared(composite: Callable[[torch.Tensor], torch.Tensor]) -> None:
    eye, other = torch.eye(3), torch.eye(3)
    other[1, 1] = 2
    assert same_value(composite(eye), composite(torch.eye(3)))
    assert not same_value(composite(eye), composite(other))
    assert not same_value(composite(eye), composite(eye.double()))


def test_nan_is_compared_by_its_bits() -> None:
    def made() -> list[object]:
        return [float("nan"), {"a": float("nan")}, torch.tensor([float("nan"), 1.0])]

    assert same_value(made(), made())


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        (1, 3, 2.0),
        (0.5, 2, 1.5),
        (True, 3, None),
        (3, True, None),
        ("1", 3, None),
        (3, "1", None),
        (math.nan, 1.0, None),
    ],
)
def test_numbers_have_a_distance(one: object, other: object, distance: float | None) -> None:
    (found,) = compare({"x": one}, {"x": other})
    assert found.max_abs_diff == distance


def test_same_leaves_compares_digests_by_content() -> None:
    """An expected digest equals exactly the tensors with its bits, in any layout."""
    here = torch.arange(6.0).view(2, 3)
    expected = {
        name: replace(one, placements="(Shard(dim=0),)") for name, one in digested({"w": leaf(here)}).items()
    }
    assert same_leaves(expected, {"w": leaf(here.clone())}) == {"w"}
    assert same_leaves(expected, digested({"w": leaf(here)})) == {"w"}
    assert same_leaves(expected, {"w": leaf(here + 1)}) == set()
    assert same_leaves(expected, {"w": leaf(here.double())}) == set()
    assert same_leaves(expected, {}) == set()


def test_same_leaves_compares_absence() -> None:
    """In another process, too."""
    expected = {"gone": pickle.loads(pickle.dumps(ABSENT_LEAF)), "kept": ABSENT_LEAF, "array": np.zeros(2)}
    assert same_leaves(expected, {"kept": 1.0, "array": np.zeros(2)}) == {"gone", "array"}


def test_order_of_a_list_matters_unless_it_names_parameters() -> None:
    params, other = ("param_groups", 0, "params"), ("param_groups", 0, "betas")
    assert not compare({params: ["a", "b"]}, {params: ["b", "a"]})
    assert compare({params: ["a", "b"]}, {params: ["a", "c"]})
    assert compare({other: [1, 2]}, {other: [2, 1]})
