"""A trainer of a user's own, which saves and loads by itself: what it is given, what is looked at of it."""

import dataclasses
import pkgutil
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import nn

from dcpbench.config.schema import Config
from dcpbench.verify.snapshot import persistent_tensors
from dcpbench.workloads.optimizers import Optimizers
from dcpbench.workloads.stateful import RandomState


@dataclass(frozen=True)
class Setup:
    """What a trainer is built for, on one rank; the process group is there already.

    `seed` is the same for every trainer of a cell, as for a job that is started again; the default generators
    are seeded otherwise for one that is to load. `wrap(model)` puts a plain model on the device and under the
    parallelism of the cell, whose name is `parallel`; a trainer that does that itself need not call it. Its
    data has `dp_size` shares, of which this rank trains on that of number `dp_rank`.
    """

    parallel: str
    device: torch.device
    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    seed: int
    wrap: Callable[[nn.Module], nn.Module]


@runtime_checkable
class Trainer(Protocol):
    """What a trainer has to have, beside `optimizer`, or `optimizers` where there are several.

    `model` holds every parameter that they train. `not_saved`, if there is one, names attributes that no
    checkpoint has to bring back, as a time of day; `random` among them are the default generators, and
    `model.base` a part of the model, which has to be the same in each trainer that is built.
    """

    model: nn.Module

    def step(self) -> float | torch.Tensor:
        """Train a step; this rank's loss."""

    def save(self, path: str) -> Future[Any] | None:
        """Write a checkpoint, a file or a folder, to a path where nothing is; all ranks call it. A future
        that it returns says when it is complete on all of them; else it is when all have returned."""

    def load(self, path: str) -> object:
        """Bring back what was saved there; all ranks call it."""


def build_trainer(config: Config, setup: Setup) -> Trainer:
    """What `workload.target(setup, **workload.options)` returns.

    Raises:
        TypeError: that is no trainer; says what it lacks.
    """
    made = pkgutil.resolve_name(str(config.workload.target))(setup, **config.workload.options)
    lacks = [name for name in ("model", "step", "save", "load") if not hasattr(made, name)]
    if not (hasattr(made, "optimizer") or hasattr(made, "optimizers")):
        lacks.append("optimizer")
    if lacks:
        what = f"returned a {type(made).__name__} without {', '.join(lacks)}"
        raise TypeError(f"workload.target={config.workload.target}: {what}, no trainer")
    trainer: Trainer = made
    return trainer


def optimizers_of(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """The optimizers of a trainer."""
    several = getattr(trainer, "optimizers", None)
    return list(several) if several else [trainer.optimizer]  # type: ignore[attr-defined]


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    """The optimizer of a trainer, several as one.

    Raises:
        ValueError: it trains a parameter that `model` does not hold.
    """
    several = optimizers_of(trainer)
    held = {id(parameter) for parameter in trainer.model.parameters()}
    for group in (group for one in several for group in one.param_groups):
        if not all(id(parameter) in held for parameter in group["params"]):
            raise ValueError("an optimizer of the trainer has a parameter that its model does not hold")
    return several[0] if len(several) == 1 else Optimizers(several)


class Generators(RandomState):
    """The default generators, Python's and NumPy's too: a trainer may draw from any."""

    def seed(self, seed: int) -> None:
        with self._swapped():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self.states = self._current()

    def state_dict(self) -> dict[str, Any]:
        """To be looked at: of what is long and no tensor a digest."""
        held = {
            name: each if torch.is_tensor(each) else f"{hash(each):x}" for name, each in self.states.items()
        }
        return {self.key: held}

    def _current(self) -> dict[str, Any]:
        name, keys, *rest = np.random.get_state(legacy=True)
        numpy = (name, tuple(map(int, keys)), *rest)
        return {**super()._current(), "python": random.getstate(), "numpy": numpy}

    def _set(self, states: dict[str, Any]) -> None:
        super()._set(states)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])


def attributes_of(trainer: Trainer) -> tuple[dict[str, Any], dict[str, str]]:
    """What a trainer holds beside model and optimizers, as nested dictionaries of tensors and plain values by
    the names of its attributes; and of what cannot be looked at which type it has."""
    skipped = {"model", "optimizer", "optimizers", *getattr(trainer, "not_saved", ())}
    known = {id(tensor) for tensor in persistent_tensors(trainer.model).values()}
    own = {id(trainer.model), *map(id, optimizers_of(trainer))}
    seen: dict[str, Any] = {}
    unseen: dict[str, str] = {}
    for name, value in vars(trainer).items():
        if name not in skipped and id(value) not in own:
            held = _state_of(value, name, known, unseen)
            if held is not _NOTHING:
                seen[name] = held
    return seen, unseen


_NOTHING = object()
_PLAIN = (bool, int, float, str)


def _state_of(value: Any, name: str, known: set[int], unseen: dict[str, str]) -> Any:
    """What a value holds; `_NOTHING` where that is nothing of its own."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _NOTHING if id(value) in known else value
    if isinstance(value, nn.Module):
        return {key: one for key, one in persistent_tensors(value).items() if id(one) not in known}
    if (parts := _parts(value)) is not None:
        states = {str(key): _state_of(one, f"{name}.{key}", known, unseen) for key, one in parts}
        return {key: one for key, one in states.items() if one is not _NOTHING}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    if _is_collection(value) or type(value).__module__ in ("pathlib", "enum", "datetime"):
        return repr(value)
    if not isinstance(value, torch.dtype | torch.device | type) and not callable(value):
        unseen[name] = type(value).__name__
    return _NOTHING


def _parts(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """What a value is made of, by names; None of one that is not taken apart."""
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, torch.Generator):
        return iter({"state": value.get_state()}.items())
    if isinstance(value, random.Random):
        return iter({"state": value.getstate()}.items())
    if isinstance(value, np.random.Generator):
        return iter({**value.bit_generator.state}.items())
    if callable(getattr(value, "state_dict", None)):
        return iter({**value.state_dict()}.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return iter(vars(value).items())
    if _is_collection(value) and not all(one is None or type(one) in _PLAIN for one in value):
        return iter(enumerate(value))
    return None


def _is_collection(value: Any) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, list | tuple | deque | set | frozenset | bytes)
