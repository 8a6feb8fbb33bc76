"""A model with its optimizer and everything else that a checkpoint contains."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpbench.config.groups import OptimizerStateAs
from dcpbench.core.rank_report import Skip
from dcpbench.verify.compare import same_leaves
from dcpbench.verify.perturb import perturb_model, perturb_optimizer, perturbed
from dcpbench.verify.snapshot import (
    Leaves,
    named_as_saved,
    named_parts,
    parts_of_each,
    retained,
    snapshot_nested,
)
from dcpbench.workloads.attributes import Judged
from dcpbench.workloads.components import Component
from dcpbench.workloads.generators import RandomState, generators_of, reseed
from dcpbench.workloads.optimizers import SEVERAL, Schedulers, as_one, listed
from dcpbench.workloads.stateful import (
    ModelState,
    MovingObject,
    Noise,
    OptimizerState,
    PlainOptimizerState,
    SavedObjects,
    SchedulerMadeByLoad,
    TrainState,
)
from dcpbench.workloads.unsaved_values import UnsavedValues
from dcpbench.workloads.workload import Workload, is_not_saved
from dcpbench.workloads.world import World

_DP_STRIDE = 7919
"""Distance between the seeds of data-parallel ranks."""

Unchanged = Mapping[str, Collection[str]]
"""Names, by check, of what cannot be changed in a load target."""


class SavedRun:
    """A run that is saved and loaded. `TrainingRun` trains it.

    Attributes:
        world: the ranks that have it.
        sizes: the sizes of their mesh.
        optimizers: as the workload returned them: one, or a list or dictionary.
        optimizer: all of them as one.
        optimizer_state: how the state of its optimizer is saved.
        not_judged: by check, or part of one, why its state is not compared.
        left_out: the parts of the model that no checkpoint has, by FQN.
        options: of torch's state-dict functions for model and optimizer.
        judged: when each attribute of a trainer is compared; None until training has shown it, and of a
            workload, which says itself what is saved.
        comes_after: the last save or load of it, for people.
        is_users: whether the workload is a user's.
    """

    optimizer_state: OptimizerStateAs | None = None
    not_judged: Mapping[str, str] = MappingProxyType({})
    left_out: Collection[str] = ()
    options = StateDictOptions()
    judged: Judged | None = None
    comes_after = "before the first save"

    def __init__(
        self,
        workload: Workload,
        world: World,
        sizes: dict[str, int],
        model: nn.Module,
        seed: int,
        scheduler: bool,
        component: Component,
        generators: tuple[str, ...],
    ) -> None:
        self.model, self.world, self.sizes = model, world, sizes
        self.component = component
        with named_as_saved(model):
            objects = workload.state(model) if callable(workload.state) else workload.state or {}
            self.optimizers = workload.optimizer(model)
        if both := objects.keys() & component.saved.state(self.options).keys():
            raise Skip(f"state: {min(both)!r} is also a name of the component; choose another one")
        self.saved = SavedObjects(objects, partial(is_not_saved, workload))
        self.optimizer = as_one(self.optimizers)
        self._make_scheduler, self._scheduled_later = workload.scheduler, not scheduler
        self._scheduler = self._scheduler_made() if scheduler and workload.scheduler else None
        unsaved = frozenset(name for name in generators if is_not_saved(workload, f"random.{name}"))
        # Only a user's model has generators; it may draw from Python's too.
        self.is_users = "python" in generators
        of_model = partial(generators_of, model) if self.is_users else dict
        self.random = RandomState(seed, world.rank, world.device, generators, unsaved, of_model)
        self._start_over(seed)

    def _start_over(self, seed: int) -> None:
        self.noise = Noise(seed)
        self.tensor_object = MovingObject(seed, self.world.device)
        self.train_state = TrainState()
        # As in any trainer, only ranks with the same data draw the same.
        self.random.seed(seed + _DP_STRIDE * self.world.dp_rank(self.sizes))

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a learning rate scheduler."""
        return self._make_scheduler is not None

    @property
    def scheduler(self) -> Any:
        """The learning rate scheduler, or several as one."""
        assert self._scheduler is not None, "a load creates it"
        return self._scheduler

    @property
    def schedulers(self) -> list[Any]:
        """Each learning rate scheduler; none before a load creates them."""
        if isinstance(self._scheduler, Schedulers):
            return [*self._scheduler.by_key.values()]
        return [] if self._scheduler is None else [self._scheduler]

    def _scheduler_made(self) -> Any:
        assert self._make_scheduler is not None
        made = self._make_scheduler(self.optimizers)
        listed(made, "scheduler")
        return Schedulers(made) if isinstance(made, SEVERAL) else made

    def _make_later(self) -> Any:
        self._scheduler = self._scheduler_made()
        return self._scheduler

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint contains: one `Stateful` for each top-level key."""
        optimizer = PlainOptimizerState if self.optimizer_state else OptimizerState
        made_later = SchedulerMadeByLoad(self._scheduler_made, self._make_later, self.optimizer)
        return {
            "model": ModelState(self.model, self.options, self.is_left_out if self.left_out else None),
            "optimizer": optimizer(self.model, self.optimizer, self.options),
            **({"scheduler": self._scheduler or made_later} if self.has_scheduler else {}),
            "noise": self.noise,
            "tensor_object": self.tensor_object,
            "train_state": self.train_state,
            **({"random": self.random} if self.random.kept else {}),
            **self.component.saved.state(self.options),
            **self.saved.state(self.options),
        }

    def objects(self) -> dict[str, dict[str, Any]]:
        """Return the state in addition to model and optimizer, for comparison."""
        scheduler = dict(self._scheduler.state_dict()) if self._scheduler else {}
        return {
            **({"scheduler": scheduler} if self.has_scheduler else {}),
            "noise": self.noise.state_dict(),
            "tensor_object": self.tensor_object.state_dict(),
            "train_state": asdict(self.train_state),
        }

    def extra(self) -> tuple[Leaves, Leaves]:
        """Return the state in addition to model and optimizer that is always compared, and that which is
        compared only if training changes it."""
        return snapshot_nested(self.objects()) | self.component.saved.leaves() | self.saved.leaves(), {}

    def unsaved_values(self) -> UnsavedValues:
        """Read plain values that are in no state dict, those of the user's Python modules too; dcpbench's own
        models have none."""
        return UnsavedValues({"model": self.model} if self.is_users else {})

    def forget(self, seed: int) -> set[str]:
        """Start over with other values in all objects. Return the names of those that cannot be changed, such
        as the functions of a scheduler, or what an object refuses."""
        before = retained(self.extra()[0])
        self._start_over(seed)
        self.train_state = TrainState(-1, float(seed), [float(seed)])
        self.component.forget(seed)
        self.saved.forget(seed)
        for generator in self.random.of_model().values():
            reseed(generator, seed)
        if self._scheduled_later:
            self._scheduler = None
        elif self.has_scheduler:
            self.scheduler.load_state_dict(perturbed(self.scheduler.state_dict()))
        return same_leaves(before, self.extra()[0])

    def make_different(self, seed: int, optimizer: Leaves | None) -> Unchanged:
        """Change everything that a load restores; `optimizer` is the saved optimizer state."""
        return {
            "extra_equal": self.forget(seed),
            "model_equal": perturb_model(self.model, seed, self.is_left_out),
            "optim_equal": perturb_optimizer(self.optimizer, seed, optimizer),
        }

    def fill_optimizer(self) -> None:
        """Give an empty optimizer the state that DCP gives it."""
        OptimizerState(self.model, self.optimizer, self.options).state_dict()

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the optimizer."""
        return [value for group in self.optimizer.param_groups for value in group["params"]]

    @property
    def numbers(self) -> dict[str, str]:
        """The numbers under which the optimizer state is saved, by FQN; empty if it is saved by FQN."""
        if not self.optimizer_state:
            return {}
        parts = parts_of_each(named_parts(self.model))
        return {name: str(number) for number, value in enumerate(self.trained) for name in parts[id(value)]}

    def is_at(self, step: int) -> None:
        """Note the step after which the loaded checkpoint was saved, if the load has not restored it."""

    def set_again(self) -> None:
        """Load its own state dicts."""
        for each in self.state().values():
            each.load_state_dict(each.state_dict())

    def is_left_out(self, name: str) -> bool:
        """Return whether no checkpoint has this part of the model, so that each new run must have it."""
        return any(name == one or name.startswith(f"{one}.") for one in self.left_out)

    @property
    def needs_random(self) -> frozenset[str] | None:
        """The generators that a load has to restore; None means the default ones. A step that draws from
        another one, or from one that is not saved, needs that."""
        random = self.random
        if not random.not_saved and not random.of_model():
            return None
        return frozenset(random.drawn | (random.states.keys() - random.not_saved))
