"""A user's trainer, which saves and loads itself: its arguments, and how it is run and compared."""

import pkgutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.verify.perturb import perturb_parameters
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.attributes import Attributes, Judged, Untrained
from dcpbench.workloads.components import Component
from dcpbench.workloads.generators import ALL, RandomState, generators_of
from dcpbench.workloads.optimizers import each_of
from dcpbench.workloads.parallelisms import buckets_kept, end_passes, wrap_model
from dcpbench.workloads.saved_objects import SavedObjects
from dcpbench.workloads.stateful import TrainState
from dcpbench.workloads.trainer_reader import attributes_of, optimizer_of, optimizers_of
from dcpbench.workloads.training_run import TrainingRun, has_gradient
from dcpbench.workloads.workload import Batches, Workload
from dcpbench.workloads.world import World

_REPLICATES = ("ddp", "ddp_unused", "hsdp", "hsdp2")
"""Parallelisms that keep copies of a parameter equal."""


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
    model, which must be the same in each trainer that is built. With `replicas_differ = True` the copies of
    a parameter may differ from rank to rank.
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
        self._is_new = True
        self._read_attributes()

    def _read_attributes(self) -> None:
        """Read model and optimizer again: a trainer may replace them."""
        self.model, self.optimizer = self.trainer.model, optimizer_of(self.trainer)
        end_passes(self.model)
        not_saved = getattr(self.trainer, "not_saved", ())
        self.left_out = [one.removeprefix("model.") for one in not_saved if one.startswith("model.")]

    def state(self) -> dict[str, Any]:
        """Return the trainer, which is not a `Stateful`."""
        return {"trainer": self}

    def extra(self) -> tuple[Leaves, Leaves]:
        attributes = self._attributes()
        self.not_judged = {
            f"extra_equal of {name}": f"a {kind} has no state that can be read"
            for name, kind in attributes.unreadable.items()
        }
        if not self.optimizer.param_groups:
            self.not_judged["optim_equal"] = "not_saved of the trainer names its optimizer"
        return attributes.leaves()

    def values_of_modules(self) -> dict[str, Any]:
        return self._attributes().of_modules

    def judge(self) -> Judged:
        return self._untrained.judged(self._attributes())

    def _attributes(self) -> Attributes:
        return attributes_of(self.trainer, each_of(self.optimizer))

    def train(self, batches: Batches, until: int) -> list[float]:
        """Call the trainer's steps up to and including step `until`; return the ranks' mean losses.

        Raises:
            TypeError: a step returned no loss.
        """
        before, self._is_new = len(self.train_state.losses), False
        if self.judged is None and not before:
            self._untrained = Untrained.of(self._attributes())
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
        self._is_new = False
        with self.random.drawn_from():
            self.trainer.load(path)
        self._read_attributes()

    def is_at(self, step: int) -> None:
        self.train_state.step = step

    @property
    def why_no_replicas(self) -> str | None:
        if self.config.parallel.name not in _REPLICATES:
            return f"it is compared under {', '.join(_REPLICATES)}"
        differ = getattr(self.trainer, "replicas_differ", False)
        return "replicas_differ of the trainer is true" if differ else None

    def make_different(self, seed: int, optimizer: Leaves | None) -> None:
        super().make_different(seed, optimizer)
        perturb_parameters(self.trained, seed, but=self.model)

    def _has_gradient(self) -> bool:
        return super()._has_gradient() or has_gradient(self.trained)

    def forget(self, seed: int) -> None:
        """Build the trainer again, with other generators, if it has trained or loaded: a restarted job builds
        it once."""
        if not self._is_new:
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
