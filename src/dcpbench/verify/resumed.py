"""Comparison of a resumed run with the uninterrupted run and, if that failed, with a run that has a known
defect."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.verify.compare import ABSENT, same_leaves, same_value
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf, of_kind
from dcpbench.verify.tolerances import far_tensors, loss_name, losses_close, losses_equal

_DRAWN = {"loss": 0.02, "model_equal": 0.1, "optim_equal": 2.0}
"""Tolerances for a run with a known defect that draws different random numbers: of losses, as a fraction of
the loss, and of tensors, as a fraction of their largest magnitude."""

_RECORDED = {"train_state.losses", "train_state.current_loss"}
"""Names of the losses in a run's state."""


@dataclass(frozen=True)
class ResumedRule:
    """The rule by which the losses and the state of a resumed run are compared.

    Args:
        expected: losses of the uninterrupted run from step `first` on.
        exactly: True if the run must have the same bits.
        tolerance, loss_tolerance: for tensors and losses that need only be close, as fractions.
        drawn: True if a run with a known defect draws different random numbers.
    """

    expected: list[float]
    first: int
    exactly: bool
    tolerance: float
    loss_tolerance: float
    drawn: bool

    @property
    def check(self) -> str:
        """Name of the check of the losses."""
        return "loss_resume_equal" if self.exactly else "loss_resume_close"

    def wrong(self, losses: list[float]) -> list[Mismatch]:
        """Compare losses with the uninterrupted run's."""
        if self.exactly:
            return losses_equal(self.expected, losses, self.first)
        return losses_close(self.expected, losses, self.first, self.loss_tolerance)

    def compare(
        self, losses: list[float], alive: Sequence[bool], unrestored: Iterable[list[float]]
    ) -> Compared:
        """Compare losses. The control is the losses of unrestored models, which must be reported.

        A loss can show a difference if it is finite and not zero, and there was a gradient (`alive`). The
        losses of two models can be close at some steps by coincidence, so several models are tried.
        """
        usable = {
            loss_name(step): math.isfinite(loss) and loss != 0.0 and has_gradient
            for step, (loss, has_gradient) in enumerate(zip(losses, alive, strict=False), self.first)
        }
        reported: set[str] = set()
        for other in unrestored:
            reported |= {mismatch.name for mismatch in self.wrong(other)}
            if usable.keys() <= reported:
                break
        fired = {name: is_usable and name in reported for name, is_usable in usable.items()}
        names = self._names(len(self.expected))
        return Compared(self.wrong(losses), dict.fromkeys(names, True), fired)

    def same_losses(self, resumed: list[float], state: Mapping[str, Leaves]) -> set[str]:
        """Return the names of the resumed losses that are close to those of another run, which has this state
        now and can have been restored at another step."""
        theirs = state["extra_equal"]["train_state.losses"]
        theirs = theirs[len(theirs) - len(resumed) :]
        tolerance = _DRAWN["loss"] if self.drawn else self.loss_tolerance
        far = {one.name for one in losses_close(theirs, resumed, self.first, tolerance)}
        return {*self._names(max(len(resumed), len(self.expected)))} - far

    def same_state(
        self, part: str, recorded: list[float], own: Mapping[str, Leaves], state: Mapping[str, Leaves]
    ) -> set[str]:
        """Return the names in a resumed run's `own` state that equal another run's: tensors of model and
        optimizer closely, the rest bit for bit, and the losses if they are the recorded ones. Names that
        must be `ABSENT` equal if they are."""
        (tensors, objects), (own_tensors, own_objects) = map(_tensors_and_objects, (state, own))
        tolerance = _DRAWN.get(part, self.tolerance) if self.drawn else self.tolerance
        far = far_tensors(tensors, own_tensors, tolerance)
        names = tensors.keys() - far | same_leaves(objects, {**own_tensors, **own_objects})
        for check, leaves in state.items():
            names |= same_leaves(
                {name: leaf for name, leaf in leaves.items() if leaf is ABSENT}, own.get(check, {})
            )
        losses, last = (own["extra_equal"][f"train_state.{name}"] for name in ("losses", "current_loss"))
        return (
            names | _RECORDED if same_value([losses, last], [recorded, recorded[-1]]) else names - _RECORDED
        )

    def _names(self, steps: int) -> list[str]:
        return [loss_name(step) for step in range(self.first, self.first + steps)]


def _tensors_and_objects(state: Mapping[str, Leaves]) -> tuple[Leaves, Leaves]:
    """Return the tensors of model, optimizer and component, and all other leaves of a run."""
    extra = state["extra_equal"]
    trained = {**state["model_equal"], **state["optim_equal"]}
    tensors = {**trained, **of_kind("param", extra), **of_kind("buffer", extra)}
    tensors = {name: leaf for name, leaf in tensors.items() if isinstance(leaf, TensorLeaf | Idle)}
    return tensors, {name: leaf for name, leaf in {**trained, **extra}.items() if name not in tensors}
