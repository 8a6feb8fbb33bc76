"""Workloads with state next to parameters: buffers, extra state, generators, and objects of the user."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

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
        out: torch.Tensor = self.net(x)
        return out

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
        out: torch.Tensor = self.net(self.base(x))
        return out


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
