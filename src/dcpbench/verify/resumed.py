"""Comparison of the losses of a resumed run with the uninterrupted run's."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.verify.tolerances import loss_name, losses_close, losses_equal


@dataclass(frozen=True)
class ResumedRule:
    """The rule by which the losses of a resumed run are compared.

    Args:
        expected: losses of the uninterrupted run from step `first` on.
        exactly: True if the run must have the same bits.
        tolerance: for losses that need only be close, as a fraction.
    """

    expected: list[float]
    first: int
    exactly: bool
    tolerance: float

    @property
    def check(self) -> str:
        """Name of the check of the losses."""
        return "loss_resume_equal" if self.exactly else "loss_resume_close"

    def wrong(self, losses: list[float]) -> list[Mismatch]:
        """Compare losses with the uninterrupted run's."""
        if self.exactly:
            return losses_equal(self.expected, losses, self.first)
        return losses_close(self.expected, losses, self.first, self.tolerance)

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
        return Compared(self.wrong(losses), dict.fromkeys(self.by_name(self.expected), True), fired)

    def by_name(self, losses: list[float]) -> dict[str, float]:
        """Return losses from step `first` on by their names in mismatches."""
        return {loss_name(step): loss for step, loss in enumerate(losses, self.first)}
