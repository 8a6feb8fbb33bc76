"""Workloads with state that most do not have: names that dcpbench uses itself, dtypes that nothing is trained
in, idle generators, and copies of buffers."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel

from dcpbench.workloads.workload import Workload
from support.ordinary_state import batch_norm
from support.ordinary_workloads import WIDTH, inputs, net, reversed_loss, wrongly_loaded


class Shaken(nn.Module):
    """Has a generator that is never drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.source = net(), torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def idle_generator() -> Workload:
    return Workload(Shaken(), inputs, reversed_loss)


class Counted:
    """Has, by names of dcpbench's, numbers and texts of a model."""

    def __init__(self, model: nn.Module) -> None:
        names = [name for name, _ in model.named_parameters()]
        groups = {"params": len(names), "param_groups.0.params": names}
        self.values: dict[str, Any] = {"params": sum(map(len, names)), "state": groups, "random.rank0.cpu": 1}
        self.values["nothing"] = torch.empty(0, 2)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def names_of_dcpbench() -> Workload:
    objects = ("param_groups", "requires_grad", "training")
    return Workload(
        net(), inputs, reversed_loss, state=lambda model: {name: Counted(model) for name in objects}
    )


class OnFrozen(nn.Module):
    """Trains a layer behind a frozen one, whose weights have any dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(weight, requires_grad=False), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(F.gelu(x @ self.weight.to(x.dtype).t() / 8))
        return out


def frozen(dtype: torch.dtype) -> Workload:
    weight = torch.randint(-8, 9, (2 * WIDTH, WIDTH)).to(dtype)

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer whose steps are compared within a rounding, so that a control changes all."""
        return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)

    return Workload(OnFrozen(weight), inputs, reversed_loss, fused)


def frozen_integers() -> Workload:
    return frozen(torch.int8)


def frozen_flags() -> Workload:
    return frozen(torch.bool)


def frozen_float8() -> Workload:
    return frozen(torch.float8_e4m3fn)


class Masked(nn.Module):
    """Chooses and orders inputs by frozen parameters, which mixed precision does not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.kept = nn.Parameter(torch.arange(WIDTH) % 3 > 0, requires_grad=False)
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(torch.where(self.kept, x[:, self.order], 0.0))
        return out


def masked() -> Workload:
    return Workload(Masked(), inputs, reversed_loss)


def averaged_norm(wrong: bool = False) -> Workload:
    """Saves an average of a model, with the running statistics of the model on each rank; a load of the
    average can change one of them."""
    made = dict[str, AveragedModel]()
    workload = batch_norm()

    def state(model: nn.Module) -> dict[str, Any]:
        average = AveragedModel(batch_norm().model)
        made["average"] = average
        if wrong:
            wrongly_loaded(average, lambda module: module.module[1].running_var[3].add_(1))
        return {"average": average}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        def follow(*_: Any) -> None:
            for mine, theirs in zip(made["average"].module.buffers(), model.buffers(), strict=True):
                mine.copy_(theirs)

        adam = torch.optim.AdamW(model.parameters())
        adam.register_step_post_hook(follow)
        return adam

    return Workload(workload.model, inputs, reversed_loss, optimizer, state=state)


def wrong_average_in_load() -> Workload:
    return averaged_norm(wrong=True)


class Unusual(nn.Module):
    """Has generators in a list and a dictionary, an empty list as extra state, and a buffer of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.passes = net(), 0
        self.sources = [torch.Generator().manual_seed(1)]
        self.by_name = {"second": torch.Generator().manual_seed(2)}
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("same", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        for source in (*self.sources, *self.by_name.values()):
            x = x * (1 + 0.01 * torch.rand(x.shape, generator=source))
        out: torch.Tensor = self.net(x * self.scale)
        return out

    def get_extra_state(self) -> Any:
        states = [one.get_state() for one in (*self.sources, *self.by_name.values())]
        return {"passes": self.passes, "states": states, "queue": [], "empty": ((), [None])}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]
        for source, one in zip((*self.sources, *self.by_name.values()), state["states"], strict=True):
            source.set_state(one)


def unusual() -> Workload:
    return Workload(Unusual(), inputs, reversed_loss)


def other_average() -> Workload:
    """Saves an object under a name that a component has as well."""
    return Workload(net(), inputs, reversed_loss, state=lambda model: {"ema": Counted(model)})
