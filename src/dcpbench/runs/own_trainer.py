"""A user's trainer, which saves and loads itself: its arguments, and how it is run and compared."""

import pkgutil
import traceback
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dcpbench.compare.leaves import compare, same_leaf, same_leaves
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.state import Name, StatePart, text_of
from dcpbench.runs.attributes import (
    ZeroOptimizer,
    inner_attributes,
    optimizer_of,
    optimizers_of,
    own_attributes,
    values_within,
)
from dcpbench.runs.epochs import EpochEnds
from dcpbench.runs.run import NO_EXCLUSIONS, Exclusions, Run, TrainingEndedError, noting_gradients
from dcpbench.runs.unsaved_values import UnsavedValues
from dcpbench.state.snapshot import Leaves, State, retained
from dcpbench.workloads.generators import ALL, RandomState
from dcpbench.workloads.optimizers import each_optimizer
from dcpbench.workloads.parallelisms import buckets_kept, end_passes, wrap_model
from dcpbench.workloads.stateful import TrainState
from dcpbench.workloads.workload import Batches, Workload
from dcpbench.workloads.world import World

_REPLICATES = ("ddp", "ddp_unused", "hsdp", "hsdp2")
"""Parallelisms that keep copies of a parameter equal."""
_NO_TWIN = "the trainer draws its batches itself, and no plain model in one process sees the same"
_NO_OPTIMIZER = "not_saved of the trainer names its optimizer"
_ENDS_WITHIN_S = 10.0
"""How long a rank whose trainer has ended waits for the others to end in the same step."""
_SCHEDULES = "lr_scheduler.py"
"""The file of torch's schedules, one of which raises at the step after its last."""


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
    precision. An optional `not_saved` names attributes that no checkpoint has to restore, also an optimizer;
    `model.base` stands for a part of the model, which must be the same in each trainer that is built. With
    `replicas_differ = True` the copies of a parameter may differ from rank to rank.
    """

    model: nn.Module

    def step(self) -> float | torch.Tensor:
        """Train one step; return this rank's loss. A trainer whose data is over raises StopIteration."""

    def save(self, path: str) -> Future[Any] | None:
        """Write a checkpoint, a file or a folder, to a new path; all ranks call it. A returned future is done
        when the checkpoint is complete on all ranks; without one it is complete when all have returned. The
        next save waits for neither."""

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


class TrainerRun(Run):
    """A user's trainer as a run. It draws its batches, saves and loads itself.

    Attributes:
        epochs: where its epochs end.
    """

    def __init__(
        self, config: Config, world: World, seed: int, exclusions: Exclusions = NO_EXCLUSIONS
    ) -> None:
        """Build it on one rank; `exclusions` are those that an earlier run has shown."""
        self.config, self.world, self.sizes = config, world, config.parallel.mesh_sizes(world.size)
        self.random = RandomState(seed, world.rank, world.device, ALL)
        self._start_over(seed)
        names = [*getattr(self.trainer, "not_saved", ())]
        self.exclusions = replace(
            exclusions,
            why_no_twin=_NO_TWIN,
            why_layout_bound=_NO_TWIN,
            why_no_replicas=self._why_no_replicas(),
            not_compared={} if self.optimizer.param_groups else {"optim_equal": _NO_OPTIMIZER},
            left_out=tuple(name.removeprefix("model.") for name in names if name.startswith("model.")),
            leaves_gradients=True,
            generators=frozenset(),
        )

    def _start_over(self, seed: int) -> None:
        config, world, sizes = self.config, self.world, self.sizes
        self.train_state, self.epochs = TrainState(), EpochEnds()
        self.had_gradient: list[bool] = []
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
        self._is_new, self._has_stepped, self._unreadable = True, False, dict[str, str]()
        self._read_attributes()
        self._initial_attributes: set[Name] = {
            name for name, leaf in own_attributes(self.trainer).items() if leaf is not None
        }
        self._built, self._loaded = retained(values_within(self.trainer)), Leaves()

    def _why_no_replicas(self) -> str | None:
        if self.config.parallel.name not in _REPLICATES:
            return f"it is compared under {', '.join(_REPLICATES)}"
        differ = getattr(self.trainer, "replicas_differ", False)
        return "replicas_differ of the trainer is true" if differ else None

    def _read_attributes(self) -> None:
        """Read model and optimizer again: a trainer may replace them."""
        self.model, self.optimizer = self.trainer.model, optimizer_of(self.trainer)
        end_passes(self.model)

    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters of model and optimizers, each once."""
        every = (*self.model.parameters(), *self.trained_parameters)
        return [*{id(parameter): parameter for parameter in every}.values()]

    def state(self) -> dict[str, Any]:
        """Return the trainer, which is not a `Stateful`."""
        return {"trainer": self}

    def extra(self) -> State:
        return {StatePart.extra: {}}

    def attributes(self) -> Leaves:
        """Return the attributes of the trainer. Objects that it holds are read after a step alone: to read a
        new one, such as a loader, can change it."""
        inner, self._unreadable = inner_attributes(self.trainer) if self._has_stepped else ({}, {})
        return own_attributes(self.trainer) | inner

    def added_attributes(self) -> Leaves:
        """Return those of its own attributes that are compared, and that a new trainer lacks."""
        due = (self.exclusions.changing or frozenset()) - self._initial_attributes
        return {name: leaf for name, leaf in own_attributes(self.trainer).items() if name in due}

    def not_held_elsewhere(
        self, mismatches: Iterable[Mismatch], saved: Leaves, before_a_step: bool = False
    ) -> list[Mismatch]:
        """Return the mismatches of attributes whose saved value is not held elsewhere: where the load has put
        it, and the run that was saved has another value. Before a step a number may be held as the next."""
        texts, now = {text_of(name): leaf for name, leaf in saved.items()}, values_within(self.trainer)
        restored, built, kept = (same_leaves(leaves, now) for leaves in (saved, self._built, self._loaded))
        elsewhere = [now[name] for name in kept - built if restored.isdisjoint((name, name[:-1]))]

        def is_held(name: str) -> bool:
            value = texts.get(name)
            values = [value, value + 1] if before_a_step and type(value) is int else [value]
            return name in texts and any(
                same_leaf((name,), candidate, leaf) for candidate in values for leaf in elsewhere
            )

        return [mismatch for mismatch in mismatches if not is_held(mismatch.name)]

    def unrestored_values(self, saved: Leaves) -> dict[str, str]:
        """Return both values of each attribute of an object in the trainer that a load has not restored."""
        names, now = {name[0] for name in own_attributes(self.trainer)}, values_within(self.trainer)
        inner = {name: leaf for name, leaf in saved.items() if name[0] not in names and name in now}
        mismatches = self.not_held_elsewhere(compare(inner, {name: now[name] for name in inner}), saved)
        texts = {
            mismatch.name: (mismatch.facts.get("expected"), mismatch.facts.get("actual"))
            for mismatch in mismatches
        }
        return {name: f"{before}, after the load {after}" for name, (before, after) in texts.items()}

    def unsaved_values(self) -> UnsavedValues:
        held = {
            name: attribute
            for name, attribute in vars(self.trainer).items()
            if isinstance(attribute, nn.Module)
        }
        values = UnsavedValues({"model": self.model, **held}, getattr(self.trainer, "not_saved", ()))
        values.unreadable |= self._unreadable
        return values

    def train(self, batches: Batches, until: int) -> list[float]:
        """Call the trainer's steps up to and including step `until`; return the ranks' mean losses.

        Raises:
            TypeError: a step returned no loss.
            TrainingEndedError: the trainer ended before, on all ranks.
            RuntimeError: it ended on this rank alone.
        """
        before, self._is_new = len(self.train_state.losses), False
        while self.train_state.step < until:
            step = self.train_state.step + 1
            noting = noting_gradients(optimizers_of(self.trainer), self._parameters)
            with buckets_kept(), self.random.drawn_from(), self.epochs.noting(step), noting as had_gradient:
                try:
                    loss = self.trainer.step()
                except (StopIteration, ValueError) as error:
                    if not _is_end(error):
                        raise
                    why = f"{type(error).__name__} {error}".strip()
                    if not self.world.all_meet(_ENDS_WITHIN_S):
                        alone = f"the trainer ended in step {step} on this rank, and not on all: {why}"
                        raise RuntimeError(alone) from error
                    raise TrainingEndedError(step - 1, why) from error
            if not isinstance(loss, float | torch.Tensor):
                raise TypeError(f"step() of the trainer returned a {type(loss).__name__}, not its loss")
            self.had_gradient.append(any(had_gradient))
            self._has_stepped = True
            self._read_attributes()
            self.train_state.record(self.world.means([torch.as_tensor(loss)], [1])[0])
        return self.train_state.losses[before:]

    def save(self, path: str) -> Any:
        """Call the trainer's `save` and return what it returns."""
        with self.random.drawn_from():
            return self.trainer.save(path)

    def load(self, path: str) -> None:
        """Call the trainer's `load`."""
        self._is_new = self._has_stepped = False
        with self.random.drawn_from():
            self.trainer.load(path)
        self._read_attributes()
        self._loaded = retained(values_within(self.trainer))

    def made_by_first_step(self, state: State) -> dict[StatePart, Collection[Name]]:
        """Return these names, those of attributes that a new trainer lacks, and of groups of its ZeRO
        optimizer."""
        made = super().made_by_first_step(state)
        optimizers = (self.optimizer, *each_optimizer(self.optimizer))
        if any(isinstance(optimizer, ZeroOptimizer) for optimizer in optimizers):
            made[StatePart.optimizer] = [name for name in state[StatePart.optimizer] if name[0] != "state"]
        made[StatePart.extra] = state.get(StatePart.extra, {}).keys() - self._initial_attributes
        return made

    def forget(self, seed: int) -> None:
        """Build the trainer again, with other generators, if it has trained or loaded: a restarted job builds
        it once."""
        if not self._is_new:
            self._start_over(seed)
        self.random.seed(seed)


def _is_end(error: BaseException) -> bool:
    """Return whether an exception of a step says that there is no further one: its data is over, or a
    schedule of torch has no rate for it."""
    if isinstance(error, StopIteration):
        return True
    raised_in = traceback.extract_tb(error.__traceback__)[-1]
    return raised_in.name == "get_lr" and raised_in.filename.endswith(f"torch/optim/{_SCHEDULES}")
