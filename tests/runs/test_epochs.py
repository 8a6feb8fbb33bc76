"""Where the epochs of a trainer end: at the step that takes the last batch of a data loader."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from dcpbench.runs.epochs import EpochEnds


class Stream(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def loader(batches: int, **values: Any) -> DataLoader[int]:
    return DataLoader(range(2 * batches), 2, **values)  # type: ignore[arg-type]


def again(data: DataLoader[int]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from data


def ends_of(step: Callable[[int], object], steps: int = 9) -> list[int]:
    """Return where epochs end if this is called in each step."""
    ends = EpochEnds()
    for number in range(1, steps + 1):
        with ends.noting(number):
            step(number)
    return ends.steps


def test_epoch_ends_with_its_last_batch() -> None:
    batches = again(loader(4))
    assert ends_of(lambda _: next(batches)) == [4, 8]


def test_epoch_of_workers_ends_with_its_last_batch() -> None:
    batches = again(loader(2, num_workers=1))
    assert ends_of(lambda _: next(batches), 4) == [2, 4]


def test_epoch_without_a_length_ends_before_the_next_begins() -> None:
    batches = again(DataLoader(Stream(), 2))
    assert ends_of(lambda _: next(batches)) == [4, 8]


def test_two_batches_of_a_step_count_once() -> None:
    batches = again(loader(4))
    assert ends_of(lambda _: (next(batches), next(batches)), 4) == [2, 4]


def test_each_loader_has_epochs() -> None:
    few, many = again(loader(3)), again(loader(4))
    assert ends_of(lambda _: (next(few), next(many)), 8) == [3, 4, 6, 8]


def test_loader_that_is_read_within_a_step_has_no_epochs() -> None:
    batches, validation = again(loader(4)), loader(2)
    assert ends_of(lambda step: (next(batches), step % 3 or list(validation))) == [4, 8]


@pytest.mark.parametrize("batches", [1, 0])
def test_no_epoch_of_one_batch_or_none(batches: int) -> None:
    assert ends_of(lambda _: list(loader(batches)), 3) == []


def test_batches_outside_of_a_step_are_not_noted() -> None:
    batches = again(loader(2))
    next(batches)
    assert ends_of(lambda step: next(batches) if step > 4 else None, 4) == []
