"""dcpbench's own run: the training loop, and everything that its checkpoints contain."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dcpbench.compare.controls import perturb_model
from dcpbench.compare.whole_tensors import (
    Exchange,
    Parts,
    local_gradient,
    real_elements,
)
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.core.rank_report import Skip
from dcpbench.core.state import StatePart
from dcpbench.runs.run import (
    NO_EXCLUSIONS,
    Exclusions,
    OnUse,
    Run,
    gradients_of,
    noting_gradients,
    noting_uses,
)
from dcpbench.runs.unsaved_values import NOTHING_UNSAVED, UnsavedValues
from dcpbench.state.layout import ParameterParts
from dcpbench.state.snapshot import (
    Leaves,
    Slot,
    State,
    TensorLeaf,
    by_parameter,
    extra_states,
    named_as_saved,
    named_parameters,
    named_parts,
    names_parameters,
    of_kind,
    snapshot_model,
    snapshot_nested,
    snapshot_optimizer,
    snapshot_parameters,
)
from dcpbench.workloads.batch import Batch, samples_of, share_of, size_of_share
from dcpbench.workloads.components import Component
from dcpbench.workloads.generators import ALL, OF_TORCH, RandomState, generators_of, reseed
from dcpbench.workloads.optimizers import SEVERAL, Schedulers, as_list, as_one_optimizer, each_optimizer
from dcpbench.workloads.parallelisms import buckets_kept, end_passes
from dcpbench.workloads.pipeline import Pipeline
from dcpbench.workloads.stateful import (
    ModelState,
    MovingObject,
    Noise,
    OptimizerState,
    SavedObjects,
    TrainState,
)
from dcpbench.workloads.workload import Batches, Workload, is_not_saved
from dcpbench.workloads.world import World

_DP_STRIDE = 7919
"""Distance between the seeds of data-parallel ranks."""


class OwnRun(Run):
    """The run of a workload.

    Attributes:
        scheduler: the learning rate scheduler, or several as one; None before a load creates it.
        optimizers: as the workload returned them: one, or a list or dictionary.
        user_step: the `step` of the workload, if it has one.
        accumulate: the number of parts of a rank's share.
        grad_norm: the norm that the gradients of the last step had before they were clipped.
        samples: the number of this rank's samples in the last step; 1 if it is unknown.
        has_user_code: whether the workload is a user's.
    """

    grad_norm: float | None = None
    samples: int = 1
    _parts: Parts[str] | None = None

    def __init__(
        self,
        config: Config,
        world: World,
        workload: Workload,
        component: Component,
        seed: int,
        *,
        called: nn.Module | None = None,
        pipeline: Pipeline | None = None,
        exclusions: Exclusions = NO_EXCLUSIONS,
        twin_bytes: int | None = None,
    ) -> None:
        """Build it on one rank.

        Args:
            workload: with the wrapped model.
            called: the module that the loss calls, if it is not the model.
            pipeline: the schedule, if the model is a stage of one.
            exclusions: what of it cannot be compared, but for what its workload leaves out of checkpoints.
        """
        self.twin_bytes = twin_bytes
        self.world, self.sizes = world, config.parallel.mesh_sizes(world.size)
        self.model, self.component, self.pipeline = workload.model, component, pipeline
        self.options = StateDictOptions(**config.state_dict.options())
        self.accumulate, self.user_step = workload.accumulate, workload.step
        self._workload, self._called = workload, called or self.model
        self.has_user_code = config.workload.target is not None
        with named_as_saved(self.model):
            objects = workload.state(self.model) if callable(workload.state) else workload.state or {}
            self.optimizers = workload.optimizer(self.model)
        if both := objects.keys() & component.objects.keys():
            raise Skip(f"state: {min(both)!r} is also a name of the component; choose another one")
        self.saved = SavedObjects({**component.objects, **objects}, partial(is_not_saved, workload))
        self.optimizer = as_one_optimizer(self.optimizers)
        self.scheduler: Any = None
        if workload.scheduler:
            made = workload.scheduler(self.optimizers)
            as_list(made, "scheduler")
            self.scheduler = Schedulers(made) if isinstance(made, SEVERAL) else made
        self.exclusions = replace(exclusions, left_out=(*self._left_out(),))
        generators = ALL if self.has_user_code else OF_TORCH  # a user's model may draw from any
        unsaved = frozenset(name for name in generators if is_not_saved(workload, f"random.{name}"))
        of_model = partial(generators_of, self.model) if self.has_user_code else dict
        self.random = RandomState(seed, world.rank, world.device, generators, unsaved, of_model)
        self._had_gradient_in_step = list[bool]()
        self._losses: list[tuple[torch.Tensor, int]] = []
        self._start_over(seed)

    def _start_over(self, seed: int) -> None:
        self.noise = Noise(seed)
        self.tensor_object = MovingObject(seed, self.world.device)
        self.train_state = TrainState()
        self.had_gradient: list[bool] = []
        # As in any trainer, only ranks with the same data draw the same.
        self.random.seed(seed + _DP_STRIDE * self.world.dp_rank(self.sizes))

    def _left_out(self) -> Iterator[str]:
        """Yield the parts of the model that no checkpoint has."""
        if self.has_user_code and self.options.ignore_frozen_params:
            parameters = named_parameters(self.model).items()
            yield from (name for name, parameter in parameters if not parameter.requires_grad)
        if self._workload.not_saved:
            names = dict.fromkeys(str(name[0]) for name in snapshot_model(self.model))
            yield from (name for name in names if is_not_saved(self._workload, name))

    @property
    def schedulers(self) -> list[Any]:
        """Each learning rate scheduler."""
        if isinstance(self.scheduler, Schedulers):
            return [*self.scheduler.by_key.values()]
        return [] if self.scheduler is None else [self.scheduler]

    def state(self) -> dict[str, Any]:
        """Return one `Stateful` for each top-level key."""
        left_out = self.exclusions.leaves_out if self.exclusions.left_out else None
        return {
            "model": ModelState(self.model, self.options, left_out),
            "optimizer": OptimizerState(self.model, self.optimizer, self.options),
            **({} if self.scheduler is None else {"scheduler": self.scheduler}),
            "noise": self.noise,
            "tensor_object": self.tensor_object,
            "train_state": self.train_state,
            **({"random": self.random} if self.exclusions.generators != frozenset() else {}),
            **self.saved.state(self.options),
        }

    def extra(self) -> State:
        objects = {
            "noise": self.noise.state_dict(),
            "tensor_object": self.tensor_object.state_dict(),
            "train_state": vars(self.train_state),
        }
        extra = snapshot_nested(objects) | self.saved.leaves()
        if self.scheduler is None:
            return {StatePart.extra: extra}
        scheduler = dict(self.scheduler.state_dict())
        return {StatePart.scheduler: snapshot_nested({"scheduler": scheduler}), StatePart.extra: extra}

    def slots(self) -> dict[StatePart, list[Slot]]:
        several = isinstance(self.scheduler, Schedulers)
        schedulers = (
            {(key,): scheduler for key, scheduler in self.scheduler.by_key.items()}
            if several
            else {(): self.scheduler}
        )
        objects = {"noise": self.noise, "tensor_object": self.tensor_object, **self.saved.others}
        modules = self.saved.modules.items()
        train_state = vars(self.train_state)
        return {
            StatePart.scheduler: [
                Slot.of(scheduler, "scheduler", *key) for key, scheduler in schedulers.items() if scheduler
            ],
            StatePart.extra: [
                *(Slot.of(holder, name) for name, holder in objects.items()),
                *(place for name, module in modules for place in extra_states(module, name)),
                Slot(("train_state",), train_state.copy, train_state.update),
            ],
            StatePart.random: [Slot.of(self.random, "random")],
        }

    def unsaved_values(self) -> UnsavedValues:
        """Read those of the user's Python modules too; dcpbench's own models have none."""
        if not self.has_user_code:
            return NOTHING_UNSAVED
        return UnsavedValues({"model": self.model}, self._workload.not_saved)

    def forget(self, seed: int) -> None:
        self._start_over(seed)
        self.train_state = TrainState(-1, float(seed), [float(seed)])
        for module in self.saved.modules.values():
            perturb_model(module, seed)
        for generator in self.random.of_model().values():
            reseed(generator, seed)

    def trained_state(self, parts: ParameterParts | None = None) -> Leaves:
        """Return the tensors of the model and of saved modules, and the state and hyperparameters of the
        optimizer; `parts` are the `named_parts` of the model, if known."""
        parts = parts or named_parts(self.model)
        model = snapshot_model(self.model, parts)
        held = {**of_kind("param", model), **of_kind("buffer", model), **self.saved.module_leaves()}
        tensors = {name: leaf for name, leaf in held.items() if isinstance(leaf, TensorLeaf)}
        optimizer = snapshot_optimizer(self.model, self.optimizer, parts)
        return tensors | {name: leaf for name, leaf in optimizer.items() if not names_parameters(name, leaf)}

    def as_saved(self, saved: State) -> State:
        """Return a state under the names of the state dicts, and without frozen parameters if these are not
        saved."""
        state = super().as_saved(saved)
        if model := state.get(StatePart.model):
            parameters = named_parameters(self.model).items() if self.options.ignore_frozen_params else ()
            frozen = {name for name, parameter in parameters if not parameter.requires_grad}
            leaves_out = self.exclusions.leaves_out
            state[StatePart.model] = {
                name: leaf
                for name, leaf in model.items()
                if name[0] not in frozen and not leaves_out(str(name[0]))
            }
        if generators := state.get(StatePart.random):
            saved_random = snapshot_nested({"random": self.random.state_dict()})
            state[StatePart.random] = {
                name: leaf for name, leaf in generators.items() if name in saved_random
            }
        if (optimizer := state.get(StatePart.optimizer)) and self.options.flatten_optimizer_state_dict:
            state[StatePart.optimizer] = by_parameter(optimizer)
        return state

    def prepare_load(self, step: int, filled: bool) -> None:
        self.component.prepare(self.model, step)
        if filled:
            self.fill_optimizer()

    def fill_optimizer(self) -> None:
        """Give an empty optimizer the state that DCP gives it."""
        OptimizerState(self.model, self.optimizer, self.options).state_dict()

    def train(self, batches: Batches, until: int, on_use: OnUse | None = None) -> list[float]:
        """Train up to and including step `until`; return the global batch's loss of each step. `on_use` is
        called at each use of gradients."""
        while self.train_state.step < until:
            self.train_step(batches, on_use)
        return self.exchange_losses()

    def train_step(self, batches: Batches, on_use: OnUse | None = None) -> None:
        """Train one step; until `exchange_losses` its loss is that of this rank's share."""
        noting = noting_gradients(each_optimizer(self.optimizer), self.model.parameters)
        with self.random.noting_draws(), buckets_kept(), noting as self._had_gradient_in_step:
            loss = self.take_step(self.next_batch(batches), on_use)
        self.had_gradient.append(any(self._had_gradient_in_step))
        self._losses.append((loss, self.samples))
        needs_mean = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.schedulers)
        self.finish_step(self.world.means([loss], [self.samples])[0] if needs_mean else float(loss))

    def exchange_losses(self) -> list[float]:
        """Replace the losses of this rank's shares by those of the global batches, and return these;
        collective."""
        means = self.world.means(*zip(*self._losses, strict=True)) if self._losses else []
        self._losses.clear()
        self.train_state.replace_last(means)
        return means

    def compute_losses(self, batches: Batches, until: int) -> None:
        if self.user_step:
            super().compute_losses(batches, until)
            return
        while self.train_state.step < until:
            batch = self.next_batch(batches)
            with self.random.drawn_from():
                loss = self.loss_of(self._begun_share(batch)).detach()
            self._losses.append((loss, self.samples))
            self.train_state.record(float(loss))
        self.exchange_losses()

    def next_batch(self, batches: Batches) -> Batch:
        """Prepare the model for the next step, and return its global batch."""
        self.component.prepare(self.model, self.train_state.step + 1)
        return self._batch_of_step(batches)

    def _batch_of_step(self, batches: Batches) -> Batch:
        step = self.train_state.step + 1
        with self.random.set_aside(batches.seed_of(step)):  # a DataLoader draws the seeds of its workers
            batch = batches.at(self.component.number_of_batch(step))
            return batch if self.has_user_code else self.noise.added(batch)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients of this rank's share of a global batch; return its loss, a scalar."""
        with self.random.drawn_from():
            share = self._begun_share(batch)
            if self.pipeline:
                loss = self.pipeline.forward_backward(share)
            else:
                losses = []
                for number in range(self.accumulate):
                    samples, parts = share, 1.0
                    if self.accumulate > 1:
                        samples = self._workload.share(share, number, self.accumulate)
                        parts = self.samples / (samples_of(samples) or self.samples / self.accumulate)
                    loss = self.loss_of(samples) / parts
                    self.component.backward(loss)
                    losses.append(loss.detach())
                loss = torch.stack(losses).sum()
        end_passes(self.model)
        return loss

    def take_step(
        self, batch: Batch, on_use: OnUse | None = None, grad_norm: float | None = None
    ) -> torch.Tensor:
        """Take a step on this rank's share of a global batch; return its loss, a scalar.

        Args:
            on_use: is called at each use of gradients.
            grad_norm: clip as if the gradients had this norm.
        """
        if self.user_step:
            with self.random.drawn_from(), ExitStack() as noting:
                share = self._begun_share(batch)
                if on_use:
                    stepped = each_optimizer(self.optimizer)
                    noting.enter_context(noting_uses(stepped, [*self.model.parameters()], on_use))
                is_one = self.optimizer is self.optimizers
                optimizers = each_optimizer(self.optimizer) if is_one else self.optimizers
                loss: torch.Tensor = self.user_step(self._called, optimizers, share)
            end_passes(self.model)
            self.component.follow(self.model)
            return loss.detach()
        loss = self.backward(batch)
        if self._had_gradient_in_step:
            raise Skip("the optimizer steps in the backward pass; use checkpointer=trainer")
        if on_use:
            on_use("the optimizer", self.trained_parameters)
        self.step(grad_norm)
        return loss

    def share_of(self, batch: Batch) -> Batch:
        """Return the samples of a global batch that this rank trains on.

        Raises:
            ValueError, TypeError: the ranks cannot share it.
        """
        of = dp_degree(self.sizes)
        if not {"pp", "ep"}.isdisjoint(self.sizes) and (samples := samples_of(batch)) and samples % of:
            raise ValueError(f"{samples} samples for {of} ranks: pipelines and experts need equal shares")
        return self._workload.share(batch, self.world.dp_rank(self.sizes), of) if of > 1 else batch

    def _begun_share(self, batch: Batch) -> Batch:
        """Return the share of a step that begins, and note how many samples it has."""
        share, number = self.share_of(batch), self.world.dp_rank(self.sizes)
        samples = samples_of(batch) if self._workload.share is share_of else None
        if samples:
            self.samples = size_of_share(samples, number, dp_degree(self.sizes))
        else:
            self.samples = samples_of(share) or 1
        return share

    def loss_of(self, samples: Batch) -> torch.Tensor:
        """Return the loss of these samples, a scalar."""
        assert self._workload.loss is not None
        loss: torch.Tensor = self._workload.loss(self._called, samples)
        return loss

    def step(self, grad_norm: float | None = None) -> None:
        """Take an optimizer step with the gradients; clip them first if the workload wants that.

        Args:
            grad_norm: clip as if they had this norm.
        """
        with self.random.drawn_from():
            if self._workload.clip_grad_norm is not None:
                self.component.unscale(self.optimizer)
                self.grad_norm = self._norm_of_gradients() if grad_norm is None else grad_norm
                norm = torch.tensor(self.grad_norm, dtype=torch.float64)
                clip_grads_with_norm_(
                    self.trained_parameters, self._workload.clip_grad_norm, norm, foreach=False
                )
            self.component.step(self.optimizer)
        self.component.follow(self.model)

    def _norm_of_gradients(self) -> float:
        """Return the norm of the gradients of all trained parameters together; collective. Torch computes it
        of parameters that all are on one mesh, and under FSDP1 without those of other TP ranks."""
        if self._parts is None:
            exchange = Exchange(self.world.group)
            self._parts = Parts.of(snapshot_parameters(named_parts(self.model)), exchange)
        sent, squares = self._parts.sent, 0.0
        for name, gradient in gradients_of(self.model, self.trained_parameters).items():
            if name in sent:
                squares += float(real_elements(local_gradient(gradient)).square().sum())
        return math.sqrt(self.world.summed([squares])[0])

    def finish_step(self, loss: float) -> None:
        """Clear the gradients and advance everything else; `loss` is the global batch's."""
        self.model.zero_grad()  # the optimizer need not have all parameters
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()
        self.tensor_object.advance()
        self.train_state.record(loss)

    def leave_gradients(self, batches: Batches) -> None:
        """Compute the gradients of the next step without taking it; ones if only a user's `step` can."""
        if self.user_step:
            for parameter in self.trained_parameters:
                parameter.grad = torch.ones_like(parameter)
            return
        with buckets_kept():
            self.backward(self._batch_of_step(batches))
