"""Schedulers that combine several of torch's."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR


def warmup_then_cosine(optimizer: Optimizer, warmup: int, steps: int) -> SequentialLR:
    """Make a learning rate that rises in `warmup` steps, then falls along a cosine for `steps` more."""
    rising = LinearLR(optimizer, start_factor=0.25, total_iters=warmup)
    falling = CosineAnnealingLR(optimizer, T_max=steps)
    return SequentialLR(optimizer, [rising, falling], milestones=[warmup])


def by_lambda(optimizer: Optimizer, gamma: float) -> LambdaLR:
    """Make a learning rate that is computed from the step by a function."""
    return LambdaLR(optimizer, lambda epoch: gamma**epoch)


class Schedulers:
    """Several schedulers, saved as one under their keys or numbers."""

    def __init__(self, schedulers: Any) -> None:
        keyed = schedulers.items() if isinstance(schedulers, Mapping) else enumerate(schedulers)
        self.by_key = {str(key): scheduler for key, scheduler in keyed}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each."""
        return {key: scheduler.state_dict() for key, scheduler in self.by_key.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of each."""
        for key, scheduler in self.by_key.items():
            scheduler.load_state_dict(state_dict[key])
