"""What a batch may be, and how ranks share one. Shares are never guessed: a table of batches, with the parts
of each for 2 and 3 ranks, or its refusal."""

import dataclasses
import threading
import warnings
import weakref
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from dcpbench.compare.leaves import same_value
from dcpbench.workloads.batch import leaves_of_batch, map_tensors, samples_of, share_of, to_device

Pair = namedtuple("Pair", "x y")
PARTS = {(6, 2): (range(3), range(3, 6)), (6, 3): (range(2), range(2, 4), range(4, 6))}
"""The samples of each rank, by the number of samples and of ranks."""


def rows(count: int = 6, width: int = 2) -> torch.Tensor:
    """Return a tensor whose rows are numbered."""
    return torch.arange(count)[:, None].expand(count, width).contiguous()


def ragged(counts: tuple[int, ...] = (1, 2, 3, 1, 2, 5)) -> list[torch.Tensor]:
    """Return a tensor with another number of rows for each sample."""
    return [torch.full((count, 4), number) for number, count in enumerate(counts)]


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.as_nested_tensor(ragged(), layout=layout)


@dataclass(frozen=True)
class Record:
    x: Any
    name: Any = "a"


@dataclass(slots=True)
class Slots:
    x: Any


class Movable:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Movable":
        return Movable(self.x.to(device))


class Encoding(UserDict[str, Any]):
    """As `BatchEncoding` of transformers: with another attribute, and a key that is one."""

    def __init__(self, data: dict[str, Any], encodings: list[str]) -> None:
        super().__init__(data)
        self.encodings = encodings


@dataclass
class Output(OrderedDict[str, Any]):
    """As `ModelOutput` of transformers: items that are attributes too."""

    x: Any = None
    y: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise TypeError("as ModelOutput")


class Attributes(dict[str, Any]):
    """A dictionary that is its own attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Rows(list[torch.Tensor]):
    pass


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.full((count, 4), number)} for number, count in enumerate(counts)]


TEXTS = list("abcdef")
X = rows()
SHARED: dict[str, tuple[Any, Any]] = {
    # Structure at the top: the batch, and where its rows or items are.
    "tensor": (X, lambda s: [s]),
    "array": (X.numpy(), lambda s: [s]),
    "tuple": ((X, X), lambda s: [*s]),
    "list of tensors": ([X, X], lambda s: [*s]),
    "list of two arrays": ([X.numpy(), X], lambda s: [*s]),
    "list of a tensor and a dictionary": ([X, {"mask": X}], lambda s: [s[0], s[1]["mask"]]),
    "list of dictionaries with other keys": ([{"x": X}, {"y": X}], lambda s: [s[0]["x"], s[1]["y"]]),
    "named tuple": (Pair(X, X), lambda s: [s.x, s.y]),
    "dictionary in a tuple": (({"x": X}, X), lambda s: [s[0]["x"], s[1]]),
    "dictionary in a dictionary": ({"in": {"x": X}}, lambda s: [s["in"]["x"]]),
    "dataclass": (Record(X, TEXTS), lambda s: [s.x, s.name]),
    "dataclass with slots": (Slots(X), lambda s: [s.x]),
    "list subclass": (Rows([X, X]), lambda s: [*s]),
    "ordered dictionary": (OrderedDict(x=X), lambda s: [s["x"]]),
    "encoding": (Encoding({"x": X, "data": X}, TEXTS[:2]), lambda s: [s["x"], s["data"]]),
    "output": (Output(X, X), lambda s: [s["x"], s.x, s.y, s["y"]]),
    "attributes": (Attributes(x=X, name="a"), lambda s: [s["x"], s.x]),
    # Items of inner lists.
    "texts": ({"x": X, "names": TEXTS}, lambda s: [s["x"], s["names"]]),
    "tuple of texts, as the default collate has it": ([X, tuple(TEXTS)], lambda s: [*s]),
    "numbers": ({"x": X, "ids": [*range(6)]}, lambda s: [s["x"], s["ids"]]),
    "tensors of other lengths": ({"x": X, "boxes": ragged()}, lambda s: [s["x"], s["boxes"]]),
    "tensors without dimensions": ({"x": X, "y": [*torch.arange(6)]}, lambda s: [s["x"], s["y"]]),
    "dictionaries": ({"x": X, "targets": boxes(1, 2, 1, 3, 6, 6)}, lambda s: [s["x"], s["targets"]]),
    "objects": ({"x": X, "y": [Movable(torch.tensor(n)) for n in range(6)]}, lambda s: [s["x"], s["y"]]),
    "lists": ({"x": X, "words": [[text] for text in TEXTS]}, lambda s: [s["x"], s["words"]]),
    # A list of samples.
    "samples": (boxes(1, 2, 3, 1, 2, 5), lambda s: [s]),
    "samples in tuples": ([(box, n) for n, box in enumerate(ragged())], lambda s: [s]),
    "samples in dataclasses": ([Record(box) for box in ragged()], lambda s: [s]),
}
FOR_ALL: dict[str, Any] = {
    "number": 3,
    "text": "a",
    "numpy number": np.float32(2),
    "no dimension": torch.tensor(2.0),
    "array without a dimension": np.array(2.0),
    "mask of one row": torch.zeros(1, 5),
    "array of one row": np.zeros((1, 5)),
    "other number of texts": ["cat", "dog"],
    "tensors of one row in a list": [torch.zeros(1, 4), torch.zeros(1, 3)],
    "none": None,
    "empty list": [],
    "empty dictionary": {},
    "empty tuple": (),
}
REFUSED: dict[str, Any] = {
    "other first dimension": (X, rows(4)),
    "ragged that divides": {"values": rows(12), "ends": torch.tensor([3, 5, 6, 12])},
    "no rows": {"x": X, "negatives": torch.zeros(0, 4)},
    "as many boxes as images": boxes(6, 6, 6, 6, 6, 6),
    "equal images": [{"image": torch.zeros(3, 6, 6), "label": n} for n in range(6)],
    "one image": boxes(4),
    "samples with a key more": [{"image": torch.zeros(6, 2)}, {"image": torch.zeros(6, 2), "label": 1}],
    "views in dictionaries": [{"x": X}, {"x": X}],
    "views in tuples": [(X, X), (X, X)],
    "images in tuples": ([torch.zeros(3, 4, 4)] * 6, [*range(6)]),
    "images of a mean": {"images": [torch.zeros(6, 4, 4)] * 4, "mean": torch.zeros(6)},
    "views": {"x": X, "views": [X, X]},
    "views in a tuple": ((X, X), X),
    "list of six rows for each": {"x": X, "boxes": [X] * 6},
    "list of six rows for most": {"x": X, "boxes": [{"boxes": X, "id": torch.tensor(n)} for n in range(6)]},
    "objects with six rows": {"x": X, "boxes": [Movable(X) for _ in range(6)]},
    "texts alone": TEXTS,
    "texts in a dictionary": {"texts": TEXTS, "labels": [0] * 6},
    "sparse": torch.eye(6).to_sparse(),
    "jagged": {"x": X, "boxes": nested(torch.jagged)},
    "nested": {"x": X, "boxes": [nested(torch.strided)]},
    "one row": torch.zeros(1, 4),
    "one row and a mask": {"x": torch.zeros(1, 4), "mask": torch.zeros(1, 4)},
    "packed": pack_sequence(ragged((5, 3, 2, 2, 1, 1))),
    "object": {"x": Movable(X)},
    "set": {"x": X, "names": {"a"}},
    "set in a list": {"x": X, "names": [{"a"}] * 6},
}


def arrays(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of_batch(batch) if isinstance(leaf, torch.Tensor)]


def numbers_in(part: Any) -> list[int]:
    """Return the number of each sample in a part, of which each has one."""
    numbers = []
    for item in part:
        tensors = [leaf for leaf in leaves_of_batch(item) if not isinstance(leaf, str)]
        if not tensors:
            numbers.append("abcdef".index(leaves_of_batch(item)[0]))
        else:
            number = np.unique(np.concatenate([np.ravel(np.asarray(one)) for one in tensors]))
            numbers.append(int(number.item()))
    return numbers


class Graph:
    """Contains itself, references that are equal by identity alone, and what has no tensors."""

    __slots__ = ("__weakref__", "buffer", "lock", "moment", "nodes", "parent")

    def __init__(self, x: torch.Tensor) -> None:
        self.nodes, self.parent = [{"x": x}, self], weakref.ref(self)
        self.lock, self.moment, self.buffer = threading.Lock(), object(), np.ones(2)


def test_tensors_in_objects_are_compared() -> None:
    first, again, other = Graph(X), Graph(rows()), Graph(rows() + 1)
    assert len(leaves_of_batch(first)) == 2
    assert same_value(leaves_of_batch(first), leaves_of_batch(again))
    assert not same_value(leaves_of_batch(first), leaves_of_batch(other))
    packed = pack_sequence(ragged((3, 2)))
    assert same_value(leaves_of_batch(packed), leaves_of_batch(pack_sequence(ragged((3, 2)))))
    assert not same_value(leaves_of_batch(packed), leaves_of_batch(pack_sequence(ragged((2, 2)))))


@pytest.mark.parametrize("of", [2, 3])
@pytest.mark.parametrize("name", SHARED)
def test_samples_are_divided(name: str, of: int) -> None:
    batch, places = SHARED[name]
    assert samples_of(batch) == 6
    for number, samples in enumerate(PARTS[6, of]):
        share = share_of(batch, number, of)
        assert type(share) is type(batch)
        assert {tuple(numbers_in(part)) for part in places(share)} == {(*samples,)}
    assert {tuple(numbers_in(part)) for part in places(batch)} == {(*range(6),)}, "it does not change"


@pytest.mark.parametrize("name", FOR_ALL)
def test_the_rest_is_for_all(name: str) -> None:
    value = FOR_ALL[name]
    for number in range(3):
        share = share_of({"x": X, "rest": value}, number, 3)
        assert numbers_in(share["x"]) == [*PARTS[6, 3][number]]
        assert str(share["rest"]).removeprefix("torch.Size") == str(value).removeprefix("torch.Size")


@pytest.mark.parametrize("of", [2, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_in_one_line(name: str, of: int) -> None:
    batch = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match="share") as error:
        share_of(batch, 0, of)
    assert "\n" not in str(error.value)
    shapes = ["nested" if one.is_nested else str(tuple(one.shape)) for one in arrays(batch)]
    assert isinstance(error.value, TypeError) or all(shape in str(error.value) for shape in shapes)


@given(count=st.integers(1, 40), of=st.integers(1, 8))
def test_shares_are_the_batch_in_order(count: int, of: int) -> None:
    batch = {"x": rows(count), "names": [str(number) for number in range(count)]}
    if count < of:
        with pytest.raises(ValueError, match=f"{count} samples? for {of} shares: each needs one"):
            share_of(batch, 0, of)
        return
    shares = [share_of(batch, number, of) for number in range(of)]
    assert torch.equal(torch.cat([share["x"] for share in shares]), batch["x"])
    assert [name for share in shares for name in share["names"]] == batch["names"]
    sizes = [samples_of(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_tensors_are_mapped_and_objects_move_themselves() -> None:
    doubled = map_tensors(lambda value: value * 2, [{"x": Pair(X, None)}, UserDict(y=Record(X.numpy()))])
    assert torch.equal(doubled[0]["x"].x, 2 * X)
    assert doubled[1]["y"].x.tolist() == (2 * X).tolist()
    batches = [batch for name, (batch, _) in SHARED.items() if name != "objects"]
    assert [type(map_tensors(torch.as_tensor, batch)) for batch in batches[2:]] == [*map(type, batches[2:])]
    moved = to_device({"own": Movable(X), "x": X, "a": np.arange(2)}, torch.device("meta"))
    assert moved["own"].x.device == moved["x"].device == torch.device("meta")
    assert moved["a"].tolist() == [0, 1]
