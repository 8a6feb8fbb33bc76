"""Schedulers that combine several of torch's."""

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
