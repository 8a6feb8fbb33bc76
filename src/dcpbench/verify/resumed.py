"""How a resumed run is compared: with the uninterrupted one and, where that has failed, with a run that has a
known defect."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.verify.compare import same_leaves, same_value
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf, of_kind
from dcpbench.verify.tolerances import (
    TOLERANCES,
    compare_close,
    loss_name,
    loss_tolerance,
    losses_close,
    losses_equal,
)

_DRAWN = {"loss": 0.02, "model_equal": 0.1, "optim_equal": 2.0}
"""How far a run with a known defect may be from a plain one that draws other random numbers: its losses as a
part of these, its tensors of the largest magnitude in them."""

_RECORDED = {"train_state.losses", "train_state.current_loss"}
"""Losses as a run's state has them."""


@dataclass(frozen=True)
class ResumedRule:
    """How the losses and the state of a resumed run are compared.

    Args:
        expected: the uninterrupted run's losses, the first of which is that of step `first`.
        exactly: whether the run must have the same bits.
        tolerance: of tensors that need only be close, `loss_tolerance` of losses, as parts of the largest
            magnitude.
        drawn: whether a run with a known defect draws other random numbers.
    """

    expected: list[float]
    first: int
    exactly: bool
    tolerance: float
    loss_tolerance: float
    drawn: bool

    @classmethod
    def of(
        cls,
        expected: list[float],
        first: int,
        exactly: bool,
        tolerance: str,
        dtypes: Iterable[torch.dtype],
        drawn: bool,
    ) -> "ResumedRule":
        """Make it for a run that computes in these dtypes, with a tolerance of this name."""
        share = TOLERANCES[tolerance]
        return cls(expected, first, exactly, share, loss_tolerance(share, dtypes), drawn)

    @property
    def check(self) -> str:
        """The check of the losses."""
        return "loss_resume_equal" if self.exactly else "loss_resume_close"

    def wrong(self, seen: list[float]) -> list[Mismatch]:
        """Compare losses with the uninterrupted run's."""
        if self.exactly:
            return losses_equal(self.expected, seen, self.first)
        return losses_close(self.expected, seen, self.first, self.loss_tolerance, reference="uninterrupted")

    def compare(
        self, seen: list[float], alive: Sequence[bool], unrestored: Iterable[list[float]]
    ) -> Compared:
        """Compare losses. The comparison must report those of models from which nothing was restored.

        They mean something if they are finite and not zero, and a gradient was there (`alive`). Two models'
        losses may come close by chance, at a step or two: as many are tried as it takes.
        """
        telling = {
            loss_name(step): math.isfinite(loss) and loss != 0.0 and lived
            for step, (loss, lived) in enumerate(zip(seen, alive, strict=False), self.first)
        }
        reported: set[str] = set()
        for other in unrestored:
            reported |= {mismatch.name for mismatch in self.wrong(other)}
            if telling.keys() <= reported:
                break
        fired = {name: means and name in reported for name, means in telling.items()}
        names = self._names(len(self.expected))
        return Compared(self.wrong(seen), dict.fromkeys(names, True), fired)

    def same_losses(self, resumed: list[float], state: Mapping[str, Leaves]) -> set[str]:
        """Return the names of the losses of a resumed run that are close to those of another run, which is in
        this state now. It may have been restored at another step."""
        theirs = state["extra_equal"]["train_state.losses"]
        theirs = theirs[len(theirs) - len(resumed) :]
        tolerance = _DRAWN["loss"] if self.drawn else self.loss_tolerance
        far = {one.name for one in losses_close(theirs, resumed, self.first, tolerance)}
        return {*self._names(max(len(resumed), len(self.expected)))} - far

    def same_state(
        self, part: str, recorded: list[float], own: Mapping[str, Leaves], state: Mapping[str, Leaves]
    ) -> set[str]:
        """Return the names in a resumed run's `own` state that are as in another run's: tensors of model and
        optimizer closely, the rest bit for bit; and its losses, if they are those that were recorded."""
        (tensors, objects), (own_tensors, own_objects) = map(_tensors_and_objects, (state, own))
        tolerance = _DRAWN.get(part, self.tolerance) if self.drawn else self.tolerance
        far = {one.name for one in compare_close(tensors, own_tensors, tolerance)}
        names = {*tensors} - far | same_leaves(objects, own_objects)
        losses, last = (own["extra_equal"][f"train_state.{name}"] for name in ("losses", "current_loss"))
        return (
            names | _RECORDED if same_value([losses, last], [recorded, recorded[-1]]) else names - _RECORDED
        )

    def _names(self, steps: int) -> list[str]:
        return [loss_name(step) for step in range(self.first, self.first + steps)]


def _tensors_and_objects(state: Mapping[str, Leaves]) -> tuple[Leaves, Leaves]:
    """Return the tensors of model, optimizer and component, and whatever else is in a run's objects."""
    extra = state["extra_equal"]
    trained = {**state["model_equal"], **state["optim_equal"], **of_kind("param", extra)}
    tensors = {**trained, **of_kind("buffer", extra)}
    tensors = {name: leaf for name, leaf in tensors.items() if isinstance(leaf, TensorLeaf | Idle)}
    return tensors, {name: leaf for name, leaf in extra.items() if name not in tensors}
