"""Workloads that torch refuses or changes, and others that look like them."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW, Optimizer

from dcpbench.workloads.workload import Workload
from support.healthy_workloads import HasNothing, NamesState
from support.ordinary_workloads import WIDTH, Blocks, blocks, inputs, net, reversed_loss
from support.user_steps import averaged_model


def groups_by_dimension() -> Workload:
    """Has weight decay for matrices only."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [one for one in model.parameters() if one.ndim > 1]
        others = [one for one in model.parameters() if one.ndim <= 1]
        groups = {"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}
        return torch.optim.AdamW([group for group in groups if group["params"]], 0.01)

    return Workload(net(), inputs, reversed_loss, optimizer)


def groups_by_type() -> Workload:
    """Has weight decay in a wrapped model only."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        decay = 0.0 if type(model) is nn.Sequential else 0.1
        return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=decay)

    return Workload(net(), inputs, reversed_loss, optimizer)


def average_of_a_model_without_copies() -> Workload:
    """Has a model that cannot be copied without FSDP either."""
    made = averaged_model()
    made.model.functions = math  # type: ignore[assignment]
    return made


def two_dtypes() -> Workload:
    """Has a layer in float64."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.double = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.double(self.single(x).double())

    return Workload(Mixed(), inputs, reversed_loss)


def shards_its_optimizer() -> Workload:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    return Workload(net(), inputs, reversed_loss, optimizer)


def steps_by_indices() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: torch.optim.Rprop(model.parameters(), 0.01))


def text_key_on_one_rank() -> Workload:
    """Torch refuses the state of rank 1 alone."""

    class OnOneRank(NamesState):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if not dist.get_rank():
                del self.state["global"]

    return Workload(net(), inputs, reversed_loss, lambda model: OnOneRank(model.parameters()))


class Unready(torch.optim.SGD):
    """Raises what an optimizer raises that needs a closure, for another reason."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["lr"] < 0


def unready_optimizer() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: Unready(model.parameters(), 0.1))


class CallsWrongly(torch.optim.SGD):
    """Passes a closure on, and too many arguments with it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._update(closure, self.param_groups)  # type: ignore[call-arg]

    def _update(self, closure: Any) -> None:
        raise AssertionError(closure)


def wrong_call_with_a_closure() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: CallsWrongly(model.parameters(), 0.1))


class LosesKey(NamesState):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}["global"]}


def own_key_error() -> Workload:
    """Has state that belongs to no parameter, and raises torch's words itself."""
    return Workload(net(), inputs, reversed_loss, lambda model: LosesKey(model.parameters()))


def raising(model: nn.Module, words: str) -> Workload:
    """Return a workload whose loss raises these words itself."""

    def loss(model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        model(share)
        raise RuntimeError(words)

    return Workload(model, inputs, loss)


def own_error_in_the_loss() -> Workload:
    """Raises the words that torch has for a parameter without elements, and has one."""
    return raising(HasNothing(), "_chunk_cat expects non-empty tensor")


def own_storage_error() -> Workload:
    """Raises the words that torch has for second derivatives under `fully_shard`."""
    return raising(net(), "setStorage: sizes [4] are out of bounds for storage of size 0")


def own_error_in_optimizer() -> Workload:
    """Raises the words that Python has for a copy of FSDP1."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        raise TypeError("cannot pickle 'module' object")

    return Workload(net(), inputs, reversed_loss, optimizer)


def frozen_in_the_plan() -> Workload:
    """Has a frozen block that its TP plan names."""
    model = Blocks()
    model.get_submodule("model.layers.0").requires_grad_(False)
    return replace(blocks(), model=model)


class Tied(nn.Module):
    """Has a layer under two names, and can refuse a state dict because of another name."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder, self.head, self.other = self.encoder, nn.Linear(WIDTH, WIDTH), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.decoder(F.gelu(self.encoder(x)))))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.other:
            args[2].append(f"{prefix}{self.other}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def tied_module() -> Workload:
    return Workload(Tied(), inputs, reversed_loss)


def tied_norm() -> Workload:
    layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return Workload(nn.Sequential(layer, nn.GELU(), layer), inputs, reversed_loss)


def tied_and_other_key() -> Workload:
    return Workload(Tied("forgotten"), inputs, reversed_loss)


def by_kind(model: nn.Module) -> list[Optimizer]:
    first, *others = model.parameters()
    return [SGD([first], 0.05), AdamW(others, 0.01)]


def stateless_beside_adamw() -> Workload:
    return Workload(net(), inputs, reversed_loss, by_kind)


def momentum_in_one_group() -> Workload:
    def optimizer(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        return SGD([{"params": [first]}, {"params": others, "momentum": 0.9}], 0.05)

    return Workload(net(), inputs, reversed_loss, optimizer)


class Forgetful(AdamW):
    """Saves no state of its first parameter."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["state"].pop(0, None)
        return state


def forgets_a_parameter() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: Forgetful(model.parameters(), 0.01))
