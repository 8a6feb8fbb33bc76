"""The contract for a known defect of torch whose effect can be recomputed.

A plug-in declares defects by name in `Plugin.defects`; a known failure refers to one by its key `by`. Only
`cell/known_defects.py` calls them:

1. `applies(config)`, on every rank, when a comparison of one of its `moments` ends, and before a load if the
   defect needs the state `from_before`.
2. If no rank has a mismatch, nothing more is called.
3. `expected(cell, moment, reference)`, on every rank, since it may use collectives, for one defect after the
   other. A mismatch gets the name of a defect only if its value is exactly that of a returned state.
4. The run gets the saved values of what is explained, so that its next steps are judged as usual.

The usual ways to write one: repeat the wrong calculation on the saved state
(`plugins/defects/rounded_state.py`), return what was there before the load (`own_chunks.py`), or return the
texts of exceptions (`state_of_no_gradient.py`).
"""

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
            explain. The reference is a `LoadReference` of `dcpbench.cell.known_defects`, of the twin's
            gradients `TwinGradients`, and at `raised` a `RaisedInLoad`; there it returns texts of exceptions.
        from_before: whether it needs a copy of the run's state from before the load, which costs time.
    """

    moments: tuple[Moment, ...]
    applies: Callable[[Any], bool]
    expected: Callable[[Any, Moment, Any], Iterable[Any]]
    from_before: bool = False
