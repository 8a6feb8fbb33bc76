"""A model with its optimizer and everything else that a checkpoint contains, and the training loop."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dcpbench.config.groups import OptimizerStateAs
from dcpbench.config.mesh import dp_degree
from dcpbench.verify.compare import same_value
from dcpbench.verify.perturb import FUNCTION_IF_NONE, perturb_model, perturb_optimizer, perturbed
from dcpbench.verify.snapshot import (
    Leaves,
    local_part,
    named_parts,
    of_kind,
    parts_of_each,
    snapshot_model,
)
from dcpbench.verify.whole_tensors import (
    Exchange,
    Parts,
    dense,
    local_gradient,
    real_elements,
    summed_numbers,
)
from dcpbench.workloads.batch import Batch, part_of, samples_of, share_of
from dcpbench.workloads.components import Component
from dcpbench.workloads.generators import (
    ALL,
    OF_TORCH,
    RandomState,
    generators_of,
    reseed,
    state_of_generator,
)
from dcpbench.workloads.optimizers import Optimizers, each_of
from dcpbench.workloads.parallelisms import buckets_kept
from dcpbench.workloads.pipeline import Pipeline
from dcpbench.workloads.saved_objects import SavedObjects
from dcpbench.workloads.stateful import (
    ModelState,
    MovingObject,
    Noise,
    OptimizerState,
    PlainOptimizerState,
    SchedulerMadeByLoad,
    TrainState,
)
from dcpbench.workloads.user_step import Note, Use, each_use
from dcpbench.workloads.workload import Batches, UserStep, Workload, is_not_saved, next_step, objects_of
from dcpbench.workloads.world import World

_DP_STRIDE = 7919
"""Distance between the seeds of data-parallel ranks."""


class TrainingRun:
    """A run that is trained, saved and loaded.

    Attributes:
        world: the ranks that train it.
        sizes: the sizes of their mesh.
        called: the module that the loss calls.
        alive: for each step, whether this rank had a gradient that is not zero: the losses of a dead net
            prove nothing.
        draws: whether a step drew from the default generators, here or in the run that this one builds on.
        keeps_random: whether the state of the default generators is saved and compared, or the names of those
            that are. Another layout draws other numbers, so it cannot be restored there.
        why_no_twin: why no plain model in one process can be compared with it.
        clears_gradients: whether no gradients are left after a step.
        optimizer_state: how the state of its optimizer is saved.
        unreadable: the types of its `objects` that cannot be compared, by name.
        left_out: the parts of the model that no checkpoint has, by FQN.
        pipeline: the schedule, if its model is a stage of one.
        computes_in: the dtypes that it computes in, in addition to those of its parameters.
        why_layout_bound: why its losses depend on how many ranks share a batch.
        accumulate, clip_grad_norm: of the workload.
        grad_norm: the norm that the gradients of the last step had before they were clipped.
        samples: the number of this rank's samples in the last step; 1 if it is unknown.
        user_step: the `step` of the workload, if it has one.
        uses: the uses of gradients in the last step that was recorded, if the workload has `step`.
        options: of torch's state-dict functions for model and optimizer.
        comes_after: the last save or load of it, for people.
    """

    keeps_random: bool | frozenset[str]
    why_no_twin: str | None = None
    clears_gradients = True
    optimizer_state: OptimizerStateAs | None = None
    unreadable: Mapping[str, str] = MappingProxyType({})
    left_out: Collection[str] = ()
    _unchanged: Collection[str] = ()
    pipeline: Pipeline | None = None
    computes_in: frozenset[torch.dtype] = frozenset()
    why_layout_bound: str | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    grad_norm: float | None = None
    samples: int = 1
    user_step: UserStep | None = None
    uses: Sequence[Use] = ()
    options = StateDictOptions()
    comes_after = "before the first save"
    _recorded: dict[str, torch.Tensor] | None = None
    _parts: Parts | None = None
    _generators: tuple[tuple[str, ...], frozenset[str]] = ALL, frozenset()

    def __init__(
        self,
        workload: Workload,
        world: World,
        sizes: dict[str, int],
        model: nn.Module,
        seed: int,
        scheduler: bool = True,
        component: Component | None = None,
        generators: tuple[str, ...] = OF_TORCH,
    ) -> None:
        self.model, self.world, self.sizes = model, world, sizes
        self.called = model
        self.component = component or Component()
        self._loss_of, self._make_scheduler, self._share = workload.loss, workload.scheduler, workload.share
        self.user_step = workload.step
        self.accumulate, self.clip_grad_norm = workload.accumulate, workload.clip_grad_norm
        self.saved = SavedObjects(objects_of(workload, model), partial(is_not_saved, workload))
        made = workload.optimizer(model)
        self.optimizer = Optimizers(made) if isinstance(made, list) else made
        self._scheduled_later = not scheduler
        self._scheduler = workload.scheduler(self.optimizer) if scheduler and workload.scheduler else None
        self.keeps_random, self.draws, self._drawn = True, False, set[str]()
        unsaved = frozenset(name for name in generators if is_not_saved(workload, f"random.{name}"))
        self._generators = generators, unsaved
        self._start_over(seed)

    def _start_over(self, seed: int) -> None:
        self.noise = Noise(seed)
        self.tensor_object = MovingObject(seed, self.world.device)
        self.train_state = TrainState()
        # As in any trainer, only ranks with the same data draw the same.
        own = seed + _DP_STRIDE * self.world.dp_rank(self.sizes)
        self.random = RandomState(own, self.world.rank, self.world.device, *self._generators)
        self.alive: list[bool] = []

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a learning rate scheduler."""
        return self._make_scheduler is not None

    @property
    def scheduler(self) -> LRScheduler:
        """The learning rate scheduler."""
        assert self._scheduler is not None, "a load creates it"
        return self._scheduler

    def _make_later(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        assert self._make_scheduler is not None
        made = self._make_scheduler(optimizer)
        if optimizer is self.optimizer:
            self._scheduler = made
        return made

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """All dtypes that it computes in."""
        return self.computes_in | {value.dtype for value in self.model.parameters()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint contains: one `Stateful` for each top-level key."""
        optimizer = PlainOptimizerState if self.optimizer_state else OptimizerState
        made_later = SchedulerMadeByLoad(self._make_later, self.optimizer)
        return {
            "model": ModelState(self.model, self.options, self.is_left_out if self.left_out else None),
            "optimizer": optimizer(self.model, self.optimizer, self.options),
            **({"scheduler": self._scheduler or made_later} if self.has_scheduler else {}),
            "noise": self.noise,
            "tensor_object": self.tensor_object,
            "train_state": self.train_state,
            **({"random": self.random} if self.keeps_random else {}),
            **self.component.state(self.options),
            **self.saved.state(self.options),
        }

    def objects(self) -> dict[str, dict[str, Any]]:
        """Return the state in addition to model and optimizer, for comparison."""
        scheduler = dict(self._scheduler.state_dict()) if self._scheduler else {}
        return {
            **({"scheduler": scheduler} if self.has_scheduler else {}),
            "noise": self.noise.state_dict(),
            "tensor_object": self.tensor_object.state_dict(),
            "train_state": self.train_state.contents(),
        }

    def train(self, batches: Batches, until: int) -> list[float]:
        """Train up to and including step `until`; return the global batch's loss of each step."""
        losses: list[torch.Tensor] = []
        samples: list[int] = []
        while self.train_state.step < until:
            before = self._random_states()
            with buckets_kept(), self._noting(each_of(self.optimizer)):
                batch = self.next_batch(batches)
                if self.user_step:
                    loss = self.take_user_step(batch)
                else:
                    loss = self.backward(batch)
                    self.step()
            after = self._random_states()
            self._drawn |= {name for name in before if not same_value(before[name], after.get(name))}
            self.draws |= bool(self._drawn)
            losses.append(loss)
            samples.append(self.samples)
            needs_mean = isinstance(self._scheduler, ReduceLROnPlateau)
            self.finish_step(self.world.means([loss], [self.samples])[0] if needs_mean else float(loss))
        means = self.world.means(losses, samples) if losses else []
        self.train_state.replace_last(means)
        return means

    def next_batch(self, batches: Batches) -> Batch:
        """Prepare the model for the next step, and return its global batch."""
        self.component.prepare(self.model, self.train_state.step + 1)
        return self._batch_of_step(batches)

    def _batch_of_step(self, batches: Batches) -> Batch:
        with self.random.drawn_from():
            number = self.component.number_of_batch(self.train_state.step + 1)
            return self.noise.added(batches.at(number))

    def backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients of this rank's share of a global batch; return its loss, a scalar."""
        with self.random.drawn_from():
            share = self._begun_share(batch)
            if self.pipeline:
                loss = self.pipeline.forward_backward(share)
            else:
                losses = []
                for number in range(self.accumulate):
                    part, parts = share, 1.0
                    if self.accumulate > 1:
                        part = self._share(share, number, self.accumulate)
                        parts = self.samples / (samples_of(part) or self.samples / self.accumulate)
                    loss = self.loss_of(part) / parts
                    self.component.backward(loss)
                    losses.append(loss.detach())
                loss = torch.stack(losses).sum()
        self._record()
        return loss

    def take_user_step(self, batch: Batch, note: Note | None = None) -> torch.Tensor:
        """Take the step of a workload with `step` on this rank's share of a global batch; return its loss, a
        scalar. Each use of gradients is noted, by default in `uses` while the run is recorded."""
        assert self.user_step is not None
        uses: list[Use] = []

        def copy(by: str, parameters: list[nn.Parameter]) -> None:
            of = self._gradients(parameters).items()
            uses.append(Use(by, {name: gradient.detach().clone() for name, gradient in of}))

        if note is None and self._recorded is not None:
            note, self.uses = copy, uses
        optimizers = each_of(self.optimizer)
        with self.random.drawn_from(), ExitStack() as noting:
            share = self._begun_share(batch)
            if note:
                noting.enter_context(each_use(optimizers, [*self.model.parameters()], note))
            loss: torch.Tensor = self.user_step(self.called, optimizers, share)
        self.component.follow(self.model)
        return loss.detach()

    def share_of(self, batch: Batch) -> Batch:
        """Return the samples of a global batch that this rank trains on.

        Raises:
            ValueError, TypeError: the ranks cannot share it.
        """
        of = dp_degree(self.sizes)
        if not {"pp", "ep"}.isdisjoint(self.sizes) and (samples := samples_of(batch)) and samples % of:
            raise ValueError(f"{samples} samples for {of} ranks: pipelines and experts need equal shares")
        return self._share(batch, self.world.dp_rank(self.sizes), of) if of > 1 else batch

    def _begun_share(self, batch: Batch) -> Batch:
        """Return the share of a step that begins, and note how many samples it has."""
        share, of = self.share_of(batch), dp_degree(self.sizes)
        samples = samples_of(batch) if of == 1 or self._share is share_of else None
        if samples:
            self.samples = len(part_of(samples, self.world.dp_rank(self.sizes), of))
        else:
            self.samples = samples_of(share) or 1
        return share

    def loss_of(self, samples: Batch) -> torch.Tensor:
        """Return the loss of these samples, a scalar."""
        assert self._loss_of is not None
        loss: torch.Tensor = self._loss_of(self.called, samples)
        return loss

    def step(self, grad_norm: float | None = None) -> None:
        """Take an optimizer step with the gradients; clip them first if the workload wants that.

        Args:
            grad_norm: clip as if they had this norm.
        """
        with self.random.drawn_from():
            if self.clip_grad_norm is not None:
                self.component.unscale(self.optimizer)
                self.grad_norm = self._norm_of_gradients()
                self.clip(self.grad_norm if grad_norm is None else grad_norm)
            self.component.step(self.optimizer)
        self.component.follow(self.model)

    def clip(self, grad_norm: float) -> None:
        """Scale the gradients, which have this norm, down to the workload's."""
        assert self.clip_grad_norm is not None
        norm = torch.tensor(grad_norm, dtype=torch.float64)
        clip_grads_with_norm_(self._trained, self.clip_grad_norm, norm, foreach=False)

    def _norm_of_gradients(self) -> float:
        """Return the norm of the gradients of all trained parameters together; collective. Torch computes it
        of parameters that all are on one mesh, and under FSDP1 without those of other TP ranks."""
        exchange = Exchange(self.world.training_group or self.world.group)
        if self._parts is None:
            self._parts = Parts.of(of_kind("param", snapshot_model(self.model)), exchange)
        sent, squares = self._parts.sent, 0.0
        for name, gradient in self._gradients(self._trained).items():
            if name in sent:
                squares += float(real_elements(local_gradient(gradient)).square().sum())
        return math.sqrt(summed_numbers([squares], exchange)[0])

    def finish_step(self, loss: float) -> None:
        """Clear the gradients and advance everything else; `loss` is the global batch's."""
        self.model.zero_grad()  # the optimizer need not have all parameters
        if self.has_scheduler:
            next_step(self.scheduler, loss)
        self.tensor_object.advance()
        self.train_state.record(loss)

    @contextmanager
    def recording(self) -> Iterator[dict[str, torch.Tensor]]:
        """Context manager: copy the gradients of a step, by FQN, after its backward pass."""
        recorded: dict[str, torch.Tensor] = {}
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def _record(self) -> None:
        if self._recorded is None or self.user_step:
            return
        for name, gradient in self._gradients(self._trained).items():
            if name not in self._recorded:
                self._recorded[name] = gradient.detach().clone()

    @property
    def _trained(self) -> list[nn.Parameter]:
        """The parameters of the optimizer."""
        return [value for group in self.optimizer.param_groups for value in group["params"]]

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return this rank's gradients of these parameters, by FQN."""
        wanted = {id(value) for value in parameters}
        return {
            name: part.of(part.parameter.grad)
            for parts in parts_of_each(named_parts(self.model)).values()
            for name, part in parts.items()
            if part.parameter.grad is not None and id(part.parameter) in wanted
        }

    @contextmanager
    def _noting(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """Context manager around a step: note in `alive` whether there were gradients."""
        lives = [False]

        def note(*_: Any) -> None:
            self._record()  # an optimizer that steps in the backward pass clears them
            lives[0] |= self._has_gradient()

        with ExitStack() as hooks:
            for one in optimizers:
                hooks.callback(one.register_step_pre_hook(note).remove)
            yield
        self.alive.append(lives[0] or self._has_gradient())

    def _has_gradient(self) -> bool:
        gradients = (value.grad for value in self.model.parameters() if value.grad is not None)
        return any(bool(local_part(dense(one)).any()) for one in gradients)

    def forget(self, seed: int) -> None:
        """Start over with other values in all objects."""
        self._start_over(seed)
        self.train_state = TrainState(-1, float(seed), [float(seed)])
        self.component.forget(seed)
        self.saved.forget(seed)
        for generator in generators_of(self.model).values():
            reseed(generator, seed)
        if self._scheduled_later:
            self._scheduler = None
        elif self.has_scheduler:
            self.scheduler.load_state_dict(perturbed(self.scheduler.state_dict()))

    def make_different(self, seed: int, optimizer: Leaves | None) -> None:
        """Change everything that a load restores; `optimizer` is the saved optimizer state."""
        self.forget(seed)
        self._unchanged = perturb_model(self.model, seed, self.is_left_out)
        perturb_optimizer(self.optimizer, seed, optimizer)

    def leave_gradients(self, batches: Batches) -> None:
        """Compute the gradients of the next step without taking it; ones if only a user's `step` can."""
        if self.user_step:
            for one in self._trained:
                one.grad = torch.ones_like(one)
            return
        with buckets_kept():
            self.backward(self._batch_of_step(batches))

    def fill_optimizer(self) -> None:
        """Give an empty optimizer the state that DCP gives it."""
        OptimizerState(self.model, self.optimizer, self.options).state_dict()

    @property
    def numbers(self) -> dict[str, str]:
        """The numbers under which the optimizer state is saved, by FQN; empty if it is saved by FQN."""
        if not self.optimizer_state:
            return {}
        parts = parts_of_each(named_parts(self.model))
        parameters = (value for group in self.optimizer.param_groups for value in group["params"])
        return {name: str(number) for number, value in enumerate(parameters) for name in parts[id(value)]}

    def is_at(self, step: int) -> None:
        """Note the step after which the loaded checkpoint was saved, if the load has not restored it."""

    def set_again(self) -> None:
        """Load its own state dicts."""
        for each in self.state().values():
            each.load_state_dict(each.state_dict())

    def may_be_constant(self, name: str) -> bool:
        """Return whether an entry of `objects` may be the same in a new run: functions of a scheduler, which
        compare as equal, and the layout of a data loader."""
        first, *rest = name.split(".")
        functions = first == "scheduler" and not {"lr_lambdas", FUNCTION_IF_NONE}.isdisjoint(rest)
        return first == "data_loader" or first in self.saved.others or functions

    def is_left_out(self, name: str) -> bool:
        """Return whether no checkpoint has this part of the model, so that each new run must have it."""
        return _is_within(name, self.left_out)

    def may_be_constant_in_model(self, name: str) -> bool:
        """Return whether a part of the model may be the same in a new run: it is left out, or is extra state
        that refuses other values."""
        return _is_within(name, (*self.left_out, *self._unchanged))

    @property
    def needs_random(self) -> frozenset[str] | None:
        """The generators that a load has to restore; None means the default ones. A step that draws from
        another one, or from one that is not saved, needs that."""
        every = self._random_states().keys()
        if not self.random.not_saved and every == self.random.states.keys():
            return None
        return frozenset(self._drawn | (self.random.states.keys() - self.random.not_saved))

    def random_state(self) -> dict[str, Any]:
        """Return the state of the generators that a load has to restore, for comparison."""
        states = self._random_states()
        needed = states if self.keeps_random is True else self.keeps_random or ()
        return {self.random.key: {name: state for name, state in states.items() if name in needed}}

    def _random_states(self) -> dict[str, Any]:
        """Return the states of the default generators, and of those that the model has."""
        of_model = {f"model.{name}": state_of_generator(one) for name, one in self.model_generators.items()}
        return {**of_model, **self.random.states}

    @property
    def model_generators(self) -> dict[str, Any]:
        """The generators that a user's model has, by name; dcpbench's own models have none."""
        return generators_of(self.model) if "python" in self._generators[0] else {}


def _is_within(name: str, parts: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in parts)
