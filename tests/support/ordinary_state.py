"""Workloads with state next to parameters: buffers, extra state, generators, objects of the user, names that
dcpbench uses itself, and dtypes that nothing is trained in."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import WIDTH, inputs, net, reversed_loss, wrongly_loaded


class Counting(nn.Module):
    """Keeps extra state, which each forward pass makes from its number."""

    def __init__(self, state_of: Callable[[int], Any]) -> None:
        super().__init__()
        self.net, self.state_of, self.kept, self.passes = net(), state_of, state_of(0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.kept = self.state_of(self.passes)
        return self.net(x)

    def get_extra_state(self) -> Any:
        return {"passes": self.passes, "kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.passes, self.kept = state["passes"], state["kept"]


def nested_lists() -> Workload:
    def state_of(number: int) -> Any:
        return {"a": [[torch.full((2,), number)], [{"b": number}, [torch.full((3,), number + 2.0), "text"]]]}

    return Workload(Counting(state_of), inputs, reversed_loss)


def arrays_in_extra_state() -> Workload:
    def state_of(number: int) -> Any:
        return {
            "counts": np.arange(3) + number,
            "odd": np.array([number % 2 > 0]),
            "mean": np.float32(number),
        }

    return Workload(Counting(state_of), inputs, reversed_loss)


class Drawing(nn.Module):
    """Draws from Python's and NumPy's generators, when it is built and in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor([random.random(), np.random.rand()], dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x)) * (random.random() > 0.3) * np.random.normal(1, 0.1)
        return x * self.scale.sum()


def python_random() -> Workload:
    return Workload(Drawing(), inputs, reversed_loss)


def batch_norm() -> Workload:
    """Running statistics of each rank's samples."""
    normed = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, WIDTH))
    return Workload(normed, inputs, reversed_loss)


def batch_norm_of_parts() -> Workload:
    """Several forward passes in a step, before each of which DDP replaces the running statistics."""
    return replace(batch_norm(), accumulate=2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def wrong_in_load(change: Callable[[Any], object]) -> Workload:
    """Batch normalisation, and a load that changes the model."""
    return Workload(wrongly_loaded(Normed(), change), inputs, reversed_loss)


def wrong_buffer_in_load() -> Workload:
    """A load that changes an element of a buffer on the first rank, whose buffers DDP sends to the others."""

    def change(module: Any) -> None:
        if dist.get_rank() == 0:
            module.net[1].running_var[3] += 1

    return wrong_in_load(change)


def buffer_of_no_rank() -> Workload:
    return wrong_in_load(lambda module: module.net[1].running_var.add_(1))


def running_center(samples: int = 1) -> Workload:
    """Training depends on two buffers that differ by rank, as in self-distillation."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("center", torch.zeros(samples, WIDTH))
            self.register_buffer("spread", torch.zeros(samples, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x) - self.center[0] + self.spread[0]
            self.center = self.center.lerp(x.mean(0), 0.1)
            self.spread = self.spread.lerp(x.std(0), 0.1)
            return out

    return Workload(Centered(), inputs, reversed_loss)


def large_buffers() -> Workload:
    """Buffers of more than 4 MiB, of which only digests are kept."""
    return running_center(samples=2**18)


class Average(nn.Module):
    """An exponential moving average of the parameters of a model, under its layout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = [model]
        for name, value in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), value.detach().clone())

    @torch.no_grad()
    def update(self) -> None:
        for mine, value in zip(self.buffers(), self.model[0].parameters(), strict=True):
            mine.lerp_(value, 0.1)


class Sampler:
    """Walks through an order of numbers, and draws another one at each end."""

    def __init__(self) -> None:
        self.order, self.position = np.random.permutation(4), 0

    def next(self) -> float:
        if self.position == len(self.order):
            self.order, self.position = np.random.permutation(4), 0
        self.position += 1
        return float(self.order[self.position - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order, self.position = state_dict["order"], int(state_dict["position"])


def saves_average_and_sampler(not_saved: tuple[str, ...] = ()) -> Workload:
    sampler, made = Sampler(), dict[str, Average]()

    def state(model: nn.Module) -> dict[str, Any]:
        made["average"] = Average(model)
        return {"average": made["average"], "sampler": sampler}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        adam = torch.optim.Adam(model.parameters())
        adam.register_step_post_hook(lambda *_: made["average"].update())
        return adam

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return reversed_loss(model, x) * (1 + sampler.next())

    return Workload(net(), inputs, loss, optimizer, state=state, not_saved=not_saved)


def forgets_the_sampler() -> Workload:
    return saves_average_and_sampler(not_saved=("sampler",))


def forgets_python_random() -> Workload:
    return Workload(Drawing(), inputs, reversed_loss, not_saved=("random.python",))


class HasGenerator(nn.Module):
    """Draws from a separate generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.generator = net(), np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out * float(self.generator.normal(1, 0.1))


class SavesGenerator(HasGenerator):
    def get_extra_state(self) -> Any:
        return self.generator.bit_generator.state

    def set_extra_state(self, state: Any) -> None:
        self.generator.bit_generator.state = state  # which refuses other texts


def forgets_its_generator() -> Workload:
    return Workload(HasGenerator(), inputs, reversed_loss)


def saves_its_generator() -> Workload:
    return Workload(SavesGenerator(), inputs, reversed_loss)


class OnBase(nn.Module):
    """Trains layers on a base that is the same in each build."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.net = nn.Linear(WIDTH, WIDTH), net()
        nn.init.eye_(self.base.weight)
        nn.init.zeros_(self.base.bias)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.base(x))


def base_not_saved() -> Workload:
    return Workload(OnBase(), inputs, reversed_loss, not_saved=["base.*"])


def wrong_state() -> Workload:
    return Workload(net(), inputs, reversed_loss, state={"sampler": object()})


class SetByFirstBatch(nn.Module):
    """Its first forward sets a parameter from the rank's samples, as in normalizing flows: DDP's copies drift
    apart, though no rank has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.is_set = net(), nn.Parameter(torch.ones(WIDTH)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.is_set = True
            with torch.no_grad():
                self.scale.copy_(1 + x.mean(0))
        return self.net(x * self.scale)


def set_by_first_batch() -> Workload:
    return Workload(SetByFirstBatch(), inputs, reversed_loss)


def saves_nothing() -> Workload:
    return Workload(net(), inputs, reversed_loss, state={"average": nn.ReLU()})


class Shaken(nn.Module):
    """Has a generator that is never drawn from."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.source = net(), torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


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
        return self.out(F.gelu(x @ self.weight.to(x.dtype).t() / 8))


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
        return self.net(torch.where(self.kept, x[:, self.order], 0.0))


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
        return self.net(x * self.scale)

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
