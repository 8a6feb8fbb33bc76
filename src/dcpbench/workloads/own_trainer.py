"""A user's trainer, which saves and loads itself: its arguments, and how it is run and compared."""

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

from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.verify.perturb import perturb_parameters
from dcpbench.verify.snapshot import Leaves, Unreadable, persistent_tensors
from dcpbench.workloads.components import Component
from dcpbench.workloads.generators import ALL, RandomState, generators_of
from dcpbench.workloads.optimizers import Optimizers
from dcpbench.workloads.parallelisms import buckets_kept, wrap_model
from dcpbench.workloads.saved_objects import SavedObjects
from dcpbench.workloads.stateful import TrainState
from dcpbench.workloads.training_run import TrainingRun, has_gradient
from dcpbench.workloads.workload import Batches, Workload
from dcpbench.workloads.world import World


@dataclass(frozen=True)
class Setup:
    """The environment of a trainer on one rank. The process group is initialized.

    Args:
        parallel: the name of the cell's parallelism.
        device: of this rank.
        rank: of this process.
        world_size: the number of ranks.
        dp_rank: the number of the data share that this rank trains on.
        dp_size: the number of data shares.
        seed: the same for every trainer of a cell, as for a job that is restarted. The default generators are
            seeded differently for a trainer that is to load.
        wrap: `wrap(model)` puts a plain model on the device and under the parallelism of the cell. A trainer
            that does so itself need not call it.
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
    """The interface of a trainer. It also has `optimizer`, or `optimizers` if there are several.

    `model` contains every parameter that they train, or what these are copied from, such as weights in full
    precision. An optional `not_saved` names attributes that no checkpoint has to restore, such as a time of
    day, also an optimizer; `random` stands for the default generators, and `model.base` for a part of the
    model, which must be the same in each trainer that is built.
    """

    model: nn.Module

    def step(self) -> float | torch.Tensor:
        """Train one step; return this rank's loss."""

    def save(self, path: str) -> Future[Any] | None:
        """Write a checkpoint, a file or a folder, to a new path; all ranks call it. A returned future is done
        when the checkpoint is complete on all ranks; without one it is complete when all have returned."""

    def load(self, path: str) -> object:
        """Restore what was saved there; all ranks call it."""


def build_trainer(config: Config, setup: Setup) -> Trainer:
    """Return what `workload.target(setup, **workload.options)` builds.

    Raises:
        TypeError: it is not a trainer; the text names what it lacks.
    """
    made: Trainer = pkgutil.resolve_name(str(config.workload.target))(setup, **config.workload.options)
    lacks = [name for name in ("model", "step", "save", "load") if not hasattr(made, name)]
    if not (hasattr(made, "optimizer") or hasattr(made, "optimizers")):
        lacks.append("optimizer")
    if lacks:
        wrong = f"returned a {type(made).__name__} without {', '.join(lacks)}; must return a trainer"
        if isinstance(made, Workload):
            wrong = "returned a Workload; leave out checkpointer=trainer"
        raise TypeError(f"workload.target={config.workload.target}: {wrong}")
    return made


def optimizers_of(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a trainer."""
    several = getattr(trainer, "optimizers", None)
    return list(several) if several else [trainer.optimizer]  # type: ignore[attr-defined]


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    """Return the optimizer of a trainer whose state is judged, several or none as one: `not_saved` can name
    each by an attribute, or all."""
    left_out = set[int]()
    for name in {*getattr(trainer, "not_saved", ())}:
        default = optimizers_of(trainer) if name in ("optimizer", "optimizers") else None
        held = getattr(trainer, name, default)
        left_out |= {*map(id, held)} if isinstance(held, list | tuple) else {id(held)}
    several = [one for one in optimizers_of(trainer) if id(one) not in left_out]
    return several[0] if len(several) == 1 else Optimizers(several)


class TrainerRun(TrainingRun):
    """A user's trainer as a training run. It draws its batches, saves and loads itself."""

    why_no_twin = "the trainer draws its batches itself, and no plain model in one process sees the same"
    clears_gradients = False

    def __init__(self, config: Config, world: World, seed: int) -> None:
        self.config, self.world, self.sizes = config, world, config.parallel.mesh_sizes(world.size)
        self.component, self.saved = Component(), SavedObjects({})
        self.random = RandomState(
            seed, world.rank, world.device, ALL, of_model=lambda: generators_of(self.model)
        )
        self._start_over(seed)

    def _start_over(self, seed: int) -> None:
        config, world, sizes = self.config, self.world, self.sizes
        self.train_state, self.alive = TrainState(), []
        self.random.seed(seed)
        setup = Setup(
            config.parallel.name,
            world.device,
            world.rank,
            world.size,
            world.dp_rank(sizes),
            dp_degree(sizes),
            config.seed,
            lambda model: wrap_model(config, world, model.to(world.device)),
        )
        with self.random.drawn_from():
            self.trainer = build_trainer(config, setup)
        self._read_attributes()

    def _read_attributes(self) -> None:
        """Read model and optimizer again: a trainer may replace them."""
        self.model, self.optimizer = self.trainer.model, optimizer_of(self.trainer)
        not_saved = getattr(self.trainer, "not_saved", ())
        self.left_out = [one.removeprefix("model.") for one in not_saved if one.startswith("model.")]

    def state(self) -> dict[str, Any]:
        """Return the trainer, which is not a `Stateful`."""
        return {"trainer": self}

    def objects(self) -> dict[str, dict[str, Any]]:
        held, unreadable = attributes_of(self.trainer)
        self.not_judged = {
            f"extra_equal of {name}": f"a {kind} has no state that can be read"
            for name, kind in unreadable.items()
        }
        if not self.optimizer.param_groups:
            self.not_judged["optim_equal"] = "not_saved of the trainer names its optimizer"
        return held

    def train(self, batches: Batches, until: int) -> list[float]:
        """Call the trainer's steps up to and including step `until`; return the ranks' mean losses.

        Raises:
            TypeError: a step returned no loss.
        """
        before = len(self.train_state.losses)
        while self.train_state.step < until:
            noting = self._noting(optimizers_of(self.trainer))
            with buckets_kept(), self.random.noting_draws(), self.random.drawn_from(), noting:
                loss = self.trainer.step()
            if not isinstance(loss, float | torch.Tensor):
                raise TypeError(f"step() of the trainer returned a {type(loss).__name__}, not its loss")
            self._read_attributes()
            self.train_state.record(self.world.means([torch.as_tensor(loss)], [1])[0])
        return self.train_state.losses[before:]

    def save(self, path: str) -> Any:
        """Call the trainer's `save` and return what it returns."""
        with self.random.drawn_from():
            return self.trainer.save(path)

    def load(self, path: str) -> None:
        """Call the trainer's `load`."""
        with self.random.drawn_from():
            self.trainer.load(path)
        self._read_attributes()

    def is_at(self, step: int) -> None:
        self.train_state.step = step

    def make_different(self, seed: int, optimizer: Leaves | None) -> None:
        super().make_different(seed, optimizer)
        perturb_parameters(self.trained, seed, but=self.model)

    def _has_gradient(self) -> bool:
        return super()._has_gradient() or has_gradient(self.trained)

    def forget(self, seed: int) -> None:
        """Build the trainer again, as a restarted job does, with other generators."""
        self._start_over(seed)
        self.random.seed(seed)

    def fill_optimizer(self) -> None:
        """Do nothing: the trainer prepares its own load."""

    def set_again(self) -> None:
        """Do nothing: a trainer need not load more than once."""

    def may_be_constant(self, name: str) -> bool:
        return True

    @property
    def needs_random(self) -> frozenset[str]:
        not_saved = "random" in getattr(self.trainer, "not_saved", ())
        return frozenset(() if not_saved else self.random.drawn & self.random.states.keys())


def attributes_of(trainer: Trainer) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the attributes of a trainer in addition to model and optimizers, as nested dictionaries of
    tensors and plain values; and the types of those that cannot be read. A plain value of its class counts
    until the trainer has its own."""
    skipped = {"model", "optimizer", "optimizers", *getattr(trainer, "not_saved", ())}
    known = {id(tensor) for tensor in persistent_tensors(trainer.model).values()}
    own = {id(trainer.model), *map(id, optimizers_of(trainer))}
    readable: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    of_class = {
        name: value
        for kind in reversed(type(trainer).__mro__)
        for name, value in vars(kind).items()
        if not name.startswith("__")
    }
    defaults = {name: value for name, value in of_class.items() if value is None or type(value) in _PLAIN}
    for name, value in {**defaults, **vars(trainer)}.items():
        if name not in skipped and id(value) not in own:
            held = _state_of(value, name, known, unreadable)
            if held is not _NOTHING:
                readable[name] = held
    return readable, unreadable


_NOTHING = object()
_PLAIN = (bool, int, float, str)


def _state_of(value: Any, name: str, known: set[int], unreadable: dict[str, str]) -> Any:
    """Return the state of an attribute; `_NOTHING` if it has no separate one."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _NOTHING if id(value) in known else value
    if isinstance(value, set | frozenset):
        value = _in_order(value)
    if isinstance(value, nn.Module):
        return {key: one for key, one in persistent_tensors(value).items() if id(one) not in known}
    if (parts := _parts(value)) is not None:
        states = {str(key): _state_of(one, f"{name}.{key}", known, unreadable) for key, one in parts}
        return {key: one for key, one in states.items() if one is not _NOTHING}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    if _is_collection(value) or type(value).__module__ in ("pathlib", "enum", "datetime"):
        return repr(value)
    if not isinstance(value, torch.dtype | torch.device | type) and not callable(value):
        unreadable[name] = type(value).__name__
    return Unreadable(type(value).__name__)


def _parts(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the parts of a value with their names; None for a value without parts."""
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


def _in_order(value: Iterable[Any]) -> list[Any]:
    """Return the elements of a set by their texts: the order in a set depends on how it grew, and on the hash
    seed of the process."""
    in_order = [_in_order(one) if isinstance(one, set | frozenset) else one for one in value]
    return ["a set", *sorted(in_order, key=repr)]


def _is_collection(value: Any) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, list | tuple | deque | bytes)
