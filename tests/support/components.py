"""A component that is wrong, as one's own may be."""

from torch import nn

from dcpbench.workloads.components import Freezing


class CountsForItself(Freezing):
    """It freezes by the number of steps that it has counted, which is zero when it is built again."""

    _seen = 0

    def prepare(self, model: nn.Module, step: int) -> None:
        self._seen += 1
        super().prepare(model, self._seen)
