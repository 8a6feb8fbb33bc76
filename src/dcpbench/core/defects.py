"""The contract for a defect of torch whose effect can be recomputed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Moment = Literal["twin", "restored", "resumed", "stored"]
"""When a comparison is made: of a training step with the twin's, after a load, after training on from it, and
of a checkpoint's files."""


@dataclass(frozen=True)
class Defect:
    """A known defect of torch. A mismatch is attributed to it only if the state is exactly the expected one.

    Args:
        moments: when it shows.
        applies: whether a cell may be subject to it, by its configuration.
        expected: called as `expected(cell, moment, reference)` on every rank, after a comparison with the
            reference has failed on any of them. Returns the states that the defect may make of it, by check
            and then by name, none if it makes nothing of it. `dcpbench.cell.explained` has a class of
            references for each moment.
    """

    moments: tuple[Moment, ...]
    applies: Callable[[Any], bool]
    expected: Callable[[Any, Moment, Any], Iterable[Mapping[Any, Any]]]
