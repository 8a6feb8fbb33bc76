"""The attributes of a trainer that are compared, and where a load may put their values instead."""

import itertools
import random
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from dcpbench.compare.leaves import same_leaves
from dcpbench.runs.attributes import (
    changed_by_training,
    inner_attributes,
    is_plain,
    own_attributes,
)
from dcpbench.state.snapshot import Leaves, retained
from support.names import by_text


class Holder:
    """A trainer with these attributes."""

    of_the_class: ClassVar[int] = 1

    def __init__(self, **attributes: Any) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.__dict__ |= attributes

    @property
    def computed(self) -> int:
        raise AssertionError("no method of a trainer is called")


@dataclass
class Progress:
    step: int = 0
    inner: Any = None


class Slotted:
    __slots__ = ("calls",)


class Loader:
    """Has a state, and a way to fail."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.reads = fails, 0

    def state_dict(self) -> dict[str, Any]:
        self.reads += 1
        if self.fails:
            raise ValueError("not begun")
        return {"position": 3, "handle": object()}


def numpy_generator(draws: int) -> np.random.Generator:
    generator = np.random.default_rng(1)
    generator.random(draws)
    return generator


PAIRS: dict[str, tuple[Any, Any]] = {
    "integer": (1, 2),
    "integer or float": (1, 1.0),
    "text": ("a", "b"),
    "bytes": (b"a", b"b"),
    "NumPy scalar": (np.float32(1), np.float32(2)),
    "complex number": (1j, 2j),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "array": (np.zeros(2), np.ones(2)),
    "complex array": (np.zeros(2, np.complex64), np.full(2, 1j, np.complex64)),
    "array of texts": (np.array(["a"]), np.array(["b"])),
    "array of objects": (np.array([None, 0]), np.array([None, 1])),
    "list": ([1, "a"], [1, "b"]),
    "list of tensors": ([torch.zeros(1)], [torch.ones(1)]),
    "deque": (deque([1]), deque([2])),
    "nested": ({"a": [{"b": (1, 2)}]}, {"a": [{"b": (1, 3)}]}),
    "set": ({1, 2}, {1, 3}),
    "torch generator": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "Python generator": (random.Random(1), random.Random(2)),
    "NumPy generator": (numpy_generator(0), numpy_generator(1)),
    "old NumPy generator": (np.random.RandomState(1), np.random.RandomState(2)),
}
"""Two plain values of each kind."""


@pytest.mark.parametrize("kind", PAIRS)
def test_plain_attributes_are_compared(kind: str) -> None:
    first, again, other = (own_attributes(Holder(value=PAIRS[kind][number])) for number in (0, 0, 1))
    assert first
    assert same_leaves(retained(first), again) == first.keys()
    assert same_leaves(retained(first), other) < first.keys()


def test_order_of_a_set_is_none() -> None:
    names = [f"word-{number}" for number in range(40)]
    grown, other = (own_attributes(Holder(read=set(order))) for order in (names, names[::-1]))
    assert grown == other


NOT_PLAIN: dict[str, Any] = {
    "object": object(),
    "object of the user's": Progress(),
    "function": lambda: 1,
    "class": Progress,
    "iterator": itertools.count(),
    "parameter": nn.Parameter(torch.zeros(1)),
    "namespace": SimpleNamespace(step=1),
    "list of objects": [1, Progress()],
    "dictionary under objects": {Progress: 1},
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_other_attributes_are_not_read(kind: str) -> None:
    assert not is_plain(NOT_PLAIN[kind])
    assert own_attributes(Holder(value=NOT_PLAIN[kind])) == {}


def test_list_in_itself_is_not_plain() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert own_attributes(Holder(endless=endless)) == {}


def test_named_attributes_and_the_models_are_left_out() -> None:
    trainer = Holder(step=1, path="a", not_saved=("path",))
    trainer.__dict__["weight"] = trainer.model.weight.data
    trainer.__dict__["first"] = trainer.model.get_parameter("weight")
    names = {name[0] for name in own_attributes(trainer)}
    assert {"step"} <= names <= {"step", "not_saved", "weight"}, names


def test_objects_are_read_one_level_deep() -> None:
    trainer = Holder(
        step=1,
        progress=Progress(4, Progress(5)),
        several={"a": Progress(6)},
        slotted=Slotted(),
        namespace=SimpleNamespace(step=1),
        bound=Progress().__eq__,
        average=nn.Linear(2, 2),
    )
    leaves, unread = inner_attributes(trainer)
    assert by_text(leaves).keys() == {"progress.step", "several.a.step", "several.a.inner"} | {
        "average.weight",
        "average.bias",
    }
    assert (leaves["progress", "step"], leaves["several", "a", "step"]) == (4, 6)
    assert unread == {}


def test_state_that_cannot_be_read_is_named() -> None:
    trainer = Holder(right=Loader(), wrong=Loader(fails=True), batches=iter(range(3)))
    assert own_attributes(trainer) == {}
    assert trainer.__dict__["right"].reads == 0, "read before a step"
    leaves, unread = inner_attributes(trainer)
    assert leaves == {("right", "position"): 3}
    assert unread == {
        "wrong": "Loader (state_dict() raised ValueError: not begun)",
        "batches": "range_iterator",
    }


def test_bookkeeping_of_schedulers_is_none() -> None:
    trainer = Holder()
    parts: list[Any] = [LambdaLR(trainer.optimizer, lambda _: 1.0) for _ in range(2)]
    trainer.__dict__["scheduler"] = SequentialLR(trainer.optimizer, parts, [3])
    leaves, _ = inner_attributes(trainer)
    assert leaves["scheduler", "last_epoch"] == 0
    assert not [name for name in leaves if name[-1] in ("_step_count", "_get_lr_called_within_step")]


class SeededLoader(Loader):
    """Has a seed of its workers deep in its state, as torchdata's loader has."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"snapshot": {"main": {"_base_seed": 7, "yielded": 1}}}


def test_seed_of_a_loaders_workers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = ("loader", "snapshot", "main", "_base_seed")
    assert inner_attributes(Holder(loader=SeededLoader()))[0][name] == 7
    monkeypatch.setattr(SeededLoader, "__module__", "torchdata.stateful_dataloader.stateful_dataloader")
    leaves, _ = inner_attributes(Holder(loader=SeededLoader()))
    assert leaves == {("loader", "position"): 3, (*name[:-1], "yielded"): 1}


def test_attributes_that_training_changes_are_compared() -> None:
    first: Leaves = {("constant",): 1, ("best",): None, ("progress", "step"): 1, ("gone",): 3}
    trained: Leaves = {("constant",): 1, ("best",): 0.5, ("progress", "step"): 9, ("late",): 2}
    assert changed_by_training(first, trained) == {("best",), ("progress", "step"), ("gone",), ("late",)}


class Sums(torch.optim.SGD):
    """Keeps statistics in addition to its state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.sums, self.calls, self.hook = {0: 1.5}, 3, print


def test_attributes_of_own_optimizers_are_read() -> None:
    trainer = Holder()
    trainer.optimizer = Sums(trainer.model)
    leaves, _ = inner_attributes(trainer)
    assert (leaves["optimizer", 0, "sums", "0"], leaves["optimizer", 0, "calls"]) == (1.5, 3)
    trainer.optimizers = [trainer.optimizer, Sums(trainer.model)]
    assert inner_attributes(trainer)[0]["optimizer", 1, "calls"] == 3
    trainer.not_saved = ("optimizers",)
    assert inner_attributes(trainer)[0] == {}
