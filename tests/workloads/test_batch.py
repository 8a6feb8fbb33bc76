"""What a batch may be, and how ranks share one."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.workloads.batch import leaves, map_tensors, samples_of, share_of, to_device

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    name: str = "a"


class Own:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Own":
        return Own(self.x.to(device))


def numbers(count: int = 4) -> torch.Tensor:
    return torch.arange(count)


CONTAINERS: dict[str, Any] = {
    "tensor": numbers(),
    "dict": {"x": numbers(), "name": "kept"},
    "ordered": OrderedDict(x=numbers()),
    "user_dict": UserDict(x=numbers()),
    "pair": Pair(numbers(), {"y": numbers()}),
    "dataclass": Record(numbers()),
    "array": np.arange(4),
    "nested": [{"x": Pair(numbers(), None)}, UserDict(y=Record(numbers()))],
}


def values(batch: Any) -> list[list[int]]:
    return [leaf.tolist() for leaf in leaves(batch) if isinstance(leaf, torch.Tensor | np.ndarray)]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_keep_their_types(kind: str) -> None:
    batch = CONTAINERS[kind]
    doubled = map_tensors(lambda value: value * 2, batch)
    assert type(doubled) is type(batch)
    assert {tuple(value) for value in values(doubled)} == {(0, 2, 4, 6)}
    assert {tuple(value) for value in values(share_of(batch, 1, 2))} == {(2, 3)}
    assert {tuple(value) for value in values(batch)} == {(0, 1, 2, 3)}, "the batch itself does not change"


@given(count=st.integers(1, 40), of=st.integers(1, 8))
def test_shares_are_the_batch_in_order(count: int, of: int) -> None:
    batch = {"x": numbers(count), "names": [str(number) for number in range(count)]}
    if count < of:
        with pytest.raises(ValueError, match=f"{count} samples? for {of} shares: each needs one"):
            share_of(batch, 0, of)
        return
    shares = [share_of(batch, number, of) for number in range(of)]
    assert torch.cat([share["x"] for share in shares]).tolist() == list(range(count))
    assert [name for share in shares for name in share["names"]] == batch["names"]
    sizes = [samples_of(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": numbers(), "level": torch.tensor(2.0), "step": 3, "lr": np.float32(1)}, [2, 3]),
        ({"x": numbers(), "positions": torch.zeros(1, 5)}, [2, 3]),
        ({"x": numbers(), "boxes": [torch.zeros(number + 1) for number in range(4)]}, [2, 3]),
        (([torch.zeros(3)] * 4, numbers()), [0, 0, 0]),
    ],
)
def test_samples_of_lists_and_numbers(batch: Any, expected: list[int]) -> None:
    assert samples_of(batch) == 4
    assert values(share_of(batch, 1, 2))[0] == expected


def test_list_for_each_sample_is_shared_by_its_items() -> None:
    boxes = [torch.zeros(number + 1) for number in range(4)]
    share = share_of({"x": numbers(), "boxes": boxes}, 0, 2)
    assert [len(item) for item in share["boxes"]] == [1, 2]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"x": numbers(4), "edges": numbers(7)}, ValueError, r"shapes \(4,\), \(7,\) .* pass share"),
        ({"x": Own(numbers())}, TypeError, "contains a Own, in which dcpbench finds no tensors"),
        ({"x": {1, 2}}, TypeError, "contains a set"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        share_of(batch, 0, 2)


def test_unknown_objects_move_themselves() -> None:
    moved = to_device({"own": Own(numbers()), "x": numbers(), "a": np.arange(2)}, torch.device("meta"))
    assert moved["own"].x.device == moved["x"].device == torch.device("meta")
    assert moved["a"].tolist() == [0, 1]
