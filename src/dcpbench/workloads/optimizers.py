"""Optimizers that are no class of torch's with plain values."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch


class Optimizers(torch.optim.Optimizer):
    """Several optimizers, as one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = several = list(optimizers)
        defaults = {str(number): one.defaults for number, one in enumerate(several)}
        self.__setstate__({"defaults": defaults})

    # No attributes: what they hold is replaced when they are loaded.
    @property
    def state(self) -> Any:  # type: ignore[override]
        """What all of them have for their parameters."""
        return {key: held for one in self.optimizers for key, held in one.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all of them."""
        return [group for one in self.optimizers for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each."""
        for one in self.optimizers:
            one.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each its own of what `state_dict` returned."""
        groups = iter(state_dict["param_groups"])
        for one in self.optimizers:
            own = [next(groups) for _ in one.param_groups]
            numbers = {number for group in own for number in group["params"]}
            state = {number: held for number, held in state_dict["state"].items() if number in numbers}
            one.load_state_dict({"state": state, "param_groups": own})


class InBackward(Optimizers):
    """One for each parameter, which steps in the backward pass as soon as its gradient is there, and frees
    that; or, where `in_backward` is turned off, all of them in `step`."""

    in_backward = True

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        super().__init__(optimizers)
        for one in self.optimizers:
            for parameter in one.param_groups[0]["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._step_one, one))

    def _step_one(self, one: torch.optim.Optimizer, _: torch.Tensor) -> None:
        if self.in_backward:
            one.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each, unless they have stepped already."""
        if not self.in_backward:
            super().step(closure)


def each_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of which one is made."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]


def repeats_on_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with parts of tensors is, bit for bit, that with whole ones: an optimizer that is not
    torch's may reduce over a tensor, as two of these do."""
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    return of_torch and not isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor)


def adam_tensor_lr(groups: Iterable[dict[str, Any]], lr: float, **options: Any) -> torch.optim.Adam:
    """Adam whose learning rate is a tensor, as compiled and captured steps want it."""
    return torch.optim.Adam(groups, torch.tensor(lr), **options)


def adam_and_sgd(groups: Iterable[dict[str, Any]], lr: float, momentum: float, **options: Any) -> Optimizers:
    """The first group by Adam, the others by SGD with momentum."""
    first, *others = groups
    sgd = torch.optim.SGD(others, lr, momentum=momentum)
    return Optimizers([torch.optim.Adam([first], lr, **options), sgd])


def muon_and_adam(groups: Iterable[dict[str, Any]], lr: float, **options: Any) -> Optimizers:
    """The first group, of matrices, by Muon, the others by Adam, as Muon takes nothing but matrices."""
    first, *others = groups
    return Optimizers([torch.optim.Muon([first], lr), torch.optim.Adam(others, **options)])


def adam_in_backward(groups: Iterable[dict[str, Any]], **options: Any) -> InBackward:
    """Adam, one for each parameter that is trained."""
    parameters = (one for group in groups for one in group["params"] if one.requires_grad)
    return InBackward(torch.optim.Adam([one], **options) for one in parameters)
