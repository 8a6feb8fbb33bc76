"""Where the epochs of a trainer end, as torch's data loaders show."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from dcpbench.torch_private import LOADER_ITERATOR, NUM_YIELDED


class EpochEnds:
    """The steps that took the last batch of a `DataLoader`. A loader that is read within one step, such as
    one for validation, has no epochs.

    Attributes:
        steps: in their order.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._read: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """The steps that took the first and the newest batch of an iterator."""

    @contextmanager
    def noting(self, step: int) -> Iterator[None]:
        """Context manager around a step with this number."""
        take = LOADER_ITERATOR.value.__next__

        def noted(iterator: Any) -> Any:
            try:
                batch = take(iterator)
            except StopIteration:  # the length of an iterable data set is not known before
                self._end(iterator)
                raise
            first, _ = self._read.get(iterator, (step, step))
            self._read[iterator] = first, step
            if NUM_YIELDED.of(iterator) == _length(iterator):
                self._end(iterator)
            return batch

        with mock.patch.object(LOADER_ITERATOR.value, "__next__", noted):
            yield

    def _end(self, iterator: Any) -> None:
        first, newest = self._read.pop(iterator, (0, 0))
        if first < newest and newest not in self.steps:
            self.steps.append(newest)


def _length(iterator: Any) -> int | None:
    try:
        return len(iterator)
    except TypeError:
        return None
