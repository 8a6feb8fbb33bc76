"""Unwrapped runs that are put into the state of a parallel one."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcpbench.verify.snapshot import (
    Leaves,
    below,
    named_parameters,
    persistent_tensors,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.verify.whole_tensors import Exchange, assembled
from dcpbench.workloads.components import Ema
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.world import World

_LARGE_BYTES = 2**26
"""A model of more bytes is exchanged between the devices of the ranks."""


def exchange_of(world: World, run: TrainingRun) -> Exchange:
    """How the ranks exchange tensors of a run: on the CPU, large ones on their devices."""
    nbytes = sum(math.prod(one.shape) * one.itemsize for one in run.model.parameters())
    if world.group is not None and world.device.type != "cpu" and nbytes > _LARGE_BYTES:
        return Exchange(dist.group.WORLD, world.device)
    return Exchange(world.group)


def copy_state(run: TrainingRun, other: TrainingRun, exchange: Exchange) -> None:
    """Give an unwrapped run the state of another one, whose parts are on the ranks; collective."""
    _set_model(other.model, assembled(snapshot_model(run.model), exchange))
    _set_optimizer(other, assembled(snapshot_optimizer(run.model, run.optimizer), exchange), run)
    other.scheduler.load_state_dict(run.scheduler.state_dict())
    other.noise.load_state_dict(run.noise.state_dict())
    other.tensor_object.load_state_dict(copy.deepcopy(run.tensor_object.state_dict()))
    _copy_component(run, other, exchange)
    other.train_state = replace(run.train_state, losses=[*run.train_state.losses])
    other.random.states = dict(run.random.states)


@torch.no_grad()
def _set_model(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in persistent_tensors(model).items():
        if name in tensors:
            value.copy_(tensors[name])


def _copy_component(run: TrainingRun, other: TrainingRun, exchange: Exchange) -> None:
    theirs, mine = run.component, other.component
    if isinstance(mine, Ema) and isinstance(theirs, Ema):
        _set_model(mine.average, assembled(snapshot_model(theirs.average), exchange))
        return
    state = theirs.state(run.options)
    for name, one in mine.state(other.options).items():
        one.load_state_dict(copy.deepcopy(state[name].state_dict()))


def _with_tensors(entries: Mapping[str, Any], tensors: Leaves, prefix: str) -> dict[str, Any]:
    """Copy what an optimizer has for a parameter, with whole tensors in place of this rank's parts."""
    return {
        key: _with_tensors(value, tensors, f"{prefix}{key}.")
        if isinstance(value, dict)
        else tensors.get(f"{prefix}{key}", copy.deepcopy(value))
        for key, value in entries.items()
    }


def _set_optimizer(other: TrainingRun, tensors: Leaves, run: TrainingRun) -> None:
    names = {id(value): name for name, value in reversed(named_parameters(other.model).items())}
    parameters = (value for group in other.optimizer.param_groups for value in group["params"])
    values = {fqn: run.optimizer.state.get(value) for fqn, value in named_parameters(run.model).items()}
    state: dict[int, Any] = {}
    for number, one in enumerate(parameters):
        prefix = f"state.{names[id(one)]}."
        of_tensors = below(tensors, prefix)
        if of_one := _with_tensors(values.get(names[id(one)]) or of_tensors, tensors, prefix):
            state[number] = of_one
    own = other.optimizer.state_dict()["param_groups"]
    theirs = run.optimizer.state_dict()["param_groups"]
    groups = [{**one, "params": mine["params"]} for mine, one in zip(own, theirs, strict=True)]
    other.optimizer.load_state_dict({"state": state, "param_groups": groups})
