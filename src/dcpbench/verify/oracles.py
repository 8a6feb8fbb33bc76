"""What a cell is held against: the uninterrupted run, and an unwrapped twin on the same batches."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from dcpbench.verify.compare import Mismatch, same_value
from dcpbench.verify.snapshot import Leaves, TensorLeaf, snapshot_model, snapshot_optimizer

TOLERANCES = {"strict": 1e-6, "standard": 1e-4}
"""The largest difference that still counts as close, as a part of the largest magnitude in the
tensor. An absolute tolerance would pass anything on second moments of 1e-8."""


def losses_equal(expected: list[float], actual: list[float], first: int) -> list[Mismatch]:
    """Steps, the first of which is `first`, whose losses are not the uninterrupted run's bits."""
    return [
        Mismatch(step, f"uninterrupted {one!r}, resumed {other!r}", _distance(one, other))
        for step, one, other in _by_step(expected, actual, first)
        if not same_value(one, other)
    ]


def losses_close(
    expected: list[float], actual: list[float], first: int, tolerance: float, whose: str = "twin"
) -> list[Mismatch]:
    """Steps whose losses differ from the expected ones by more than `tolerance` of those."""
    return [
        Mismatch(step, f"{whose} {one!r}, here {other!r}", _distance(one, other))
        for step, one, other in _by_step(expected, actual, first)
        if one is None or other is None or not _close(one, other, tolerance)
    ]


def loss_name(step: int) -> str:
    """What a step's loss is called in a mismatch and in a control."""
    return f"loss of step {step}"


def _by_step(
    expected: list[float], actual: list[float], first: int
) -> Iterator[tuple[str, float | None, float | None]]:
    """A run that took another number of steps has None where the other has a loss."""
    for step, (one, other) in enumerate(itertools.zip_longest(expected, actual), start=first):
        yield loss_name(step), one, other


def _close(one: float, other: float, tolerance: float) -> bool:
    """Not-a-number equals itself here: that it proves nothing is for the negative control to say."""
    return same_value(one, other) or abs(one - other) <= tolerance * abs(one)


def _distance(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else abs(one - other)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The whole model and optimizer state as plain tensors by name, gathered on every rank."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    tensors: dict[str, Any] = dict(get_model_state_dict(model, options=options))
    for name, value in get_optimizer_state_dict(model, optimizer, options=options).items():
        if name.startswith("state."):
            tensors[name] = value
    return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def twin_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The same of an unwrapped model, read from the model itself."""
    leaves: Leaves = {**snapshot_model(model), **snapshot_optimizer(model, optimizer)}
    return {name: leaf.local for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}


def compare_close(
    twin: dict[str, torch.Tensor], actual: dict[str, torch.Tensor], tolerance: float
) -> list[Mismatch]:
    """Names whose largest difference is more than `tolerance` of the twin's largest magnitude."""
    found = [
        Mismatch(name, "the twin has it, the parallel model does not") for name in twin if name not in actual
    ]
    found += [
        Mismatch(name, "the parallel model has it, the twin does not") for name in actual if name not in twin
    ]
    for name, expected in twin.items():
        if name not in actual:
            continue
        value = actual[name].to(expected.device)
        if value.shape != expected.shape:
            found.append(Mismatch(name, f"shape: twin {tuple(expected.shape)}, here {tuple(value.shape)}"))
            continue
        if not expected.numel():
            continue
        both_nan = expected.isnan() & value.isnan()
        apart = (expected.double() - value.double()).abs().masked_fill(both_nan, 0.0)
        distance = float(apart.max().item())
        scale = float(expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item())
        if not distance <= tolerance * scale:
            found.append(
                Mismatch(
                    name,
                    f"differs from the twin by up to {distance:.3g} "
                    f"({distance / scale if scale else math.inf:.3g} of its largest magnitude)",
                    distance,
                )
            )
    return found
