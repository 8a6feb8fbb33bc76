"""Optimizers and schedulers that combine several of torch's, or need more than plain values."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = several = list(optimizers)
        defaults = {str(number): optimizer.defaults for number, optimizer in enumerate(several)}
        self.__setstate__({"defaults": defaults})

    # Properties: loading replaces the state and the groups of each optimizer.
    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of all of them."""
        return {key: held for optimizer in self.optimizers for key, held in optimizer.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all of them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each."""
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each optimizer its part of what `state_dict` returned."""
        groups = iter(state_dict["param_groups"])
        for optimizer in self.optimizers:
            its_groups = [next(groups) for _ in optimizer.param_groups]
            numbers = {number for group in its_groups for number in group["params"]}
            state = {number: held for number, held in state_dict["state"].items() if number in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": its_groups})


SEVERAL = (Mapping, list, tuple)
"""Types in which a user's function returns several optimizers or schedulers."""


def as_list(returned: Any, what: str) -> list[Any]:
    """Return the optimizers or schedulers that a user's function returned, one or several.

    Raises:
        TypeError: one of them has no `step`.
    """
    several = returned.values() if isinstance(returned, Mapping) else returned
    several = [*several] if isinstance(returned, SEVERAL) else [returned]
    for optimizer in several:
        if not hasattr(optimizer, "step"):
            fix = f"return {what}s of torch: one, or a list or dictionary of them"
            raise TypeError(f"{what} of the Workload returned a {type(optimizer).__name__}; {fix}")
    return several


def each_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an optimizer consists of."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]


def as_one_optimizer(returned: Any) -> torch.optim.Optimizer:
    """Return the optimizers that a user's function returned as one."""
    several = as_list(returned, "optimizer")
    return Optimizers(several) if isinstance(returned, SEVERAL) else returned


def repeats_on_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step with parts of tensors is, bit for bit, the step with full ones. Two optimizers of
    torch reduce over a tensor, and others may."""
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    return of_torch and not isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor)


def adam_tensor_lr(groups: Iterable[dict[str, Any]], lr: float, **options: Any) -> torch.optim.Adam:
    """Make Adam with a tensor as its learning rate, as compiled and captured steps need it."""
    return torch.optim.Adam(groups, torch.tensor(lr), **options)


def adam_and_sgd(groups: Iterable[dict[str, Any]], lr: float, momentum: float, **options: Any) -> Optimizers:
    """Make Adam for the first group and SGD with momentum for the others."""
    first, *others = groups
    sgd = torch.optim.SGD(others, lr, momentum=momentum)
    return Optimizers([torch.optim.Adam([first], lr, **options), sgd])


def muon_and_adam(groups: Iterable[dict[str, Any]], lr: float, **options: Any) -> Optimizers:
    """Make Muon for the first group and Adam for the others: Muon trains matrices only."""
    first, *others = groups
    return Optimizers([torch.optim.Muon([first], lr), torch.optim.Adam(others, **options)])


def warmup_then_cosine(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> SequentialLR:
    """Make a learning rate that rises in `warmup` steps, then falls along a cosine for `steps` more."""
    rising = LinearLR(optimizer, start_factor=0.25, total_iters=warmup)
    falling = CosineAnnealingLR(optimizer, T_max=steps)
    return SequentialLR(optimizer, [rising, falling], milestones=[warmup])


def by_lambda(optimizer: torch.optim.Optimizer, gamma: float) -> LambdaLR:
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
