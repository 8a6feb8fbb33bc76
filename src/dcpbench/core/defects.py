"""The contract for a known defect of torch whose effect can be recomputed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Moment = Literal["twin", "restored", "stored", "raised"]
"""The comparison that fails: with the twin after a training step, after a load, or of a checkpoint's
files; or a load that raises."""


@dataclass(frozen=True)
class Defect:
    """A known defect of torch. A mismatch is attributed to it only if the state is exactly as it predicts.

    >>> drops_buffers = Defect(("restored",), lambda config: config.model.name == "mine", lambda *_: [])
    >>> drops_buffers.moments
    ('restored',)

    Args:
        moments: the comparisons that it makes fail.
        applies: takes a cell's configuration; returns whether the defect can occur in the cell.
        expected: called as `expected(cell, moment, reference)` on every rank, after the comparison with the
            reference failed on any rank. Returns the states that the defect can produce, by check and then
            by name; none if it changes nothing. They have exactly the values of the mismatches that they
            explain. The reference is a `Differences` of `dcpbench.cell.explained`, of the twin's gradients
            `TwinGradients`, and at `raised` a `RaisedInLoad`; there it returns texts of exceptions.
        from_before: whether it needs a copy of the run's state from before the load, which costs time.
    """

    moments: tuple[Moment, ...]
    applies: Callable[[Any], bool]
    expected: Callable[[Any, Moment, Any], Iterable[Any]]
    from_before: bool = False
