"""The training loop: steps of a run, and the gradients that they use."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dcpbench.config.mesh import dp_degree
from dcpbench.core.rank_report import Compared, Skip
from dcpbench.verify.compare_layouts import compare_replicas
from dcpbench.verify.snapshot import (
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
from dcpbench.workloads.optimizers import each_of
from dcpbench.workloads.parallelisms import buckets_kept, end_passes
from dcpbench.workloads.pipeline import Pipeline
from dcpbench.workloads.saved_run import SavedRun
from dcpbench.workloads.user_step import Note, Use, each_use
from dcpbench.workloads.workload import Batches, UserStep, Workload
from dcpbench.workloads.world import World


class TrainingRun(SavedRun):
    """A run that is trained, saved and loaded.

    Attributes:
        called: the module that the loss calls.
        alive: for each step, whether this rank had a gradient that is not zero: the losses of a dead net
            prove nothing.
        draws: whether a step drew from the default generators, here or in the run that this one builds on.
        why_no_twin: why no plain model in one process can be compared with it.
        clears_gradients: whether no gradients are left after a step.
        pipeline: the schedule, if its model is a stage of one.
        computes_in: the dtypes that it computes in, in addition to those of its parameters.
        why_layout_bound: why its losses depend on how many ranks share a batch.
        accumulate, clip_grad_norm: of the workload.
        grad_norm: the norm that the gradients of the last step had before they were clipped.
        samples: the number of this rank's samples in the last step; 1 if it is unknown.
        user_step: the `step` of the workload, if it has one.
        differentiates_twice: whether a backward pass of the last step had `create_graph=True`.
    """

    draws = False
    why_no_twin: str | None = None
    clears_gradients = True
    pipeline: Pipeline | None = None
    computes_in: frozenset[torch.dtype] = frozenset()
    why_layout_bound: str | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    grad_norm: float | None = None
    samples: int = 1
    user_step: UserStep | None = None
    differentiates_twice = False
    _recorded: list[Use] | None = None
    _lives: Sequence[bool] = ()
    _parts: Parts | None = None

    def __init__(
        self, workload: Workload, world: World, sizes: dict[str, int], model: nn.Module, *options: Any
    ) -> None:
        """Build it from a workload with its wrapped model; `options` are those of `SavedRun`."""
        super().__init__(workload, world, sizes, model, *options)
        self.called = model
        self._loss_of, self._share, self.user_step = workload.loss, workload.share, workload.step
        self.accumulate, self.clip_grad_norm = workload.accumulate, workload.clip_grad_norm

    def _start_over(self, seed: int) -> None:
        super()._start_over(seed)
        self.alive: list[bool] = []

    @property
    def why_no_replicas(self) -> str | None:
        """Why the copies of its parameters need not be equal after training, if it has no twin."""
        return self.why_no_twin

    def compare_replicas(self) -> Compared:
        """Compare the parameters whose parts several ranks have; collective."""
        ignored = getattr(self.model, "parameters_to_ignore", ())
        parameters = of_kind("param", snapshot_model(self.model)).items()
        kept = {name: leaf for name, leaf in parameters if name not in ignored}
        return compare_replicas(kept, self.world.group)

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """All dtypes that it computes in."""
        return self.computes_in | {value.dtype for value in self.model.parameters()}

    def train(self, batches: Batches, until: int) -> list[float]:
        """Train up to and including step `until`; return the global batch's loss of each step."""
        losses: list[torch.Tensor] = []
        samples: list[int] = []
        while self.train_state.step < until:
            with (
                self.random.noting_draws(),
                buckets_kept(),
                self._noting_second_derivatives(),
                self._noting(each_of(self.optimizer)),
            ):
                loss = self.take_step(self.next_batch(batches))
            self.draws |= bool(self.random.drawn)
            losses.append(loss)
            samples.append(self.samples)
            needs_mean = any(isinstance(one, ReduceLROnPlateau) for one in self.schedulers)
            self.finish_step(self.world.means([loss], [self.samples])[0] if needs_mean else float(loss))
        means = self.world.means(losses, samples) if losses else []
        self.train_state.replace_last(means)
        return means

    def skip(self, batches: Batches, until: int) -> None:
        """Take the batches of steps up to and including `until`, and not the steps; their losses are NaN."""
        while self.train_state.step < until:
            self.next_batch(batches)
            self.train_state.record(math.nan)

    def next_batch(self, batches: Batches) -> Batch:
        """Prepare the model for the next step, and return its global batch."""
        self.component.prepare(self.model, self.train_state.step + 1)
        return self._batch_of_step(batches)

    def _batch_of_step(self, batches: Batches) -> Batch:
        step = self.train_state.step + 1
        with self.random.set_aside(batches.seed_of(step)):  # a DataLoader draws the seeds of its workers
            batch = batches.at(self.component.number_of_batch(step))
            return batch if self.is_users else self.noise.added(batch)

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
        end_passes(self.model)
        return loss

    def take_step(
        self, batch: Batch, note: Note | None = None, grad_norm: float | None = None
    ) -> torch.Tensor:
        """Take a step on this rank's share of a global batch; return its loss, a scalar.

        Args:
            note: is called at each use of gradients; by default they are noted while the run is recorded.
            grad_norm: clip as if the gradients had this norm.
        """
        if note is None and self._recorded is not None:
            note = partial(self._record, self._recorded)
        if self.user_step:
            with self.random.drawn_from(), ExitStack() as noting:
                share = self._begun_share(batch)
                if note:
                    each = each_of(self.optimizer)
                    noting.enter_context(each_use(each, [*self.model.parameters()], note))
                is_one = self.optimizer is self.optimizers
                optimizers = each_of(self.optimizer) if is_one else self.optimizers
                loss: torch.Tensor = self.user_step(self.called, optimizers, share)
            end_passes(self.model)
            self.component.follow(self.model)
            return loss.detach()
        loss = self.backward(batch)
        if self._lives:
            raise Skip("the optimizer steps in the backward pass; use checkpointer=trainer")
        if note:
            note("the optimizer", self.trained)
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
                norm = torch.tensor(self.grad_norm if grad_norm is None else grad_norm, dtype=torch.float64)
                clip_grads_with_norm_(self.trained, self.clip_grad_norm, norm, foreach=False)
            self.component.step(self.optimizer)
        self.component.follow(self.model)

    def _norm_of_gradients(self) -> float:
        """Return the norm of the gradients of all trained parameters together; collective. Torch computes it
        of parameters that all are on one mesh, and under FSDP1 without those of other TP ranks."""
        exchange = Exchange(self.world.training_group or self.world.group)
        if self._parts is None:
            self._parts = Parts.of(of_kind("param", snapshot_model(self.model)), exchange)
        sent, squares = self._parts.sent, 0.0
        for name, gradient in self._gradients(self.trained).items():
            if name in sent:
                squares += float(real_elements(local_gradient(gradient)).square().sum())
        return math.sqrt(summed_numbers([squares], exchange)[0])

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

    @contextmanager
    def recording(self) -> Iterator[list[Use]]:
        """Context manager: copy the gradients of a step at each use of them."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def _record(self, uses: list[Use], by: str, parameters: Iterable[nn.Parameter]) -> None:
        gradients = self._gradients(parameters).items()
        uses.append(Use(by, {name: gradient.detach().clone() for name, gradient in gradients}))

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
        """Context manager around a step: note in `alive` whether there were gradients, and in `_lives` for
        each step that an optimizer has taken."""
        self._lives = lives = list[bool]()
        with ExitStack() as hooks:
            for one in optimizers:
                noted = one.register_step_pre_hook(lambda *_: lives.append(self._has_gradient()))
                hooks.callback(noted.remove)
            yield
        self.alive.append(any(lives) or self._has_gradient())

    @contextmanager
    def _noting_second_derivatives(self) -> Iterator[None]:
        """Context manager around a step: note in `differentiates_twice` whether it has second derivatives."""
        run_backward = torch.autograd._engine_run_backward
        self.differentiates_twice = False

        def noting(outputs: Any, gradients: Any, retain: bool, create: bool, *rest: Any, **more: Any) -> Any:
            self.differentiates_twice |= create
            return run_backward(outputs, gradients, retain, create, *rest, **more)

        with mock.patch.object(torch.autograd, "_engine_run_backward", noting):
            yield

    def _has_gradient(self) -> bool:
        return has_gradient(self.model.parameters())

    def leave_gradients(self, batches: Batches) -> None:
        """Compute the gradients of the next step without taking it; ones if only a user's `step` can."""
        if self.user_step:
            for one in self.trained:
                one.grad = torch.ones_like(one)
            return
        with buckets_kept():
            self.backward(self._batch_of_step(batches))


def has_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether one of these parameters has a gradient that is not zero on this rank."""
    gradients = (value.grad for value in parameters if value.grad is not None)
    return any(bool(local_part(dense(one)).any()) for one in gradients)
