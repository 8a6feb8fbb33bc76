"""The comparison against brute force: whatever bit is flipped, it is told, and nothing else is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.records.sentences import describe
from dcpbench.verify.compare import bits, compare, same_value
from dcpbench.verify.layout import whole
from dcpbench.verify.snapshot import TensorLeaf

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
def test_one_changed_byte_is_told_at_its_index(
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


def test_bits_tell_zeros_apart_and_let_nan_equal_itself() -> None:
    nan = torch.tensor([math.nan])
    assert torch.equal(bits(nan), bits(nan.clone()))
    assert compare({"w": leaf(torch.tensor([0.0]))}, {"w": leaf(torch.tensor([-0.0]))})


@pytest.mark.parametrize(
    ("saved", "restored", "told"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype"),
        (torch.zeros(2), torch.zeros(3), "shape"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape"),
    ],
)
def test_what_is_said_about_a_tensor_counts(saved: torch.Tensor, restored: torch.Tensor, told: str) -> None:
    (found,) = compare({"w": leaf(saved)}, {"w": leaf(restored)})
    assert told in describe(found)


def test_keys_are_compared_both_ways() -> None:
    found = compare({"a": 1, "b": 2}, {"b": 2, "c": 3})
    assert [(item.name, describe(item)) for item in found] == [
        ("a", "saved, but missing after the load"),
        ("c", "there after the load, but never saved"),
    ]


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
    ],
)
def test_values_differ_by_type_and_bits(one: object, other: object) -> None:
    assert same_value(one, one)
    assert same_value(other, other)
    assert not same_value(one, other)
    assert describe(compare({"x": one}, {"x": other})[0]) == f"saved {one!r}, restored {other!r}"
