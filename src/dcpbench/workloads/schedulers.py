"""Schedulers that are made of several of torch's."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR


def warmup_then_cosine(optimizer: Optimizer, warmup: int, steps: int) -> SequentialLR:
    """A learning rate that rises to its own in `warmup` steps, then falls along a cosine for `steps` more."""
    rising = LinearLR(optimizer, start_factor=0.25, total_iters=warmup)
    falling = CosineAnnealingLR(optimizer, T_max=steps)
    return SequentialLR(optimizer, [rising, falling], milestones=[warmup])


def by_lambda(optimizer: Optimizer, gamma: float) -> LambdaLR:
    """A learning rate that is made of the number of the step by a function."""
    return LambdaLR(optimizer, lambda epoch: gamma**epoch)
