"""A model with its optimizer and what else a checkpoint holds, and the training loop."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim.lr_scheduler import LRScheduler

from dcpbench.config.groups import OptimizerStateAs
from dcpbench.verify.flags import snapshot_gradients
from dcpbench.verify.perturb import FUNCTION_IF_NONE, perturb_model, perturb_optimizer, perturbed
from dcpbench.verify.snapshot import Leaves, named_parts, parts_of_each
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.components import Component
from dcpbench.workloads.optimizers import Optimizers, each_of
from dcpbench.workloads.pipeline import Pipeline
from dcpbench.workloads.stateful import (
    ModelState,
    MovingObject,
    Noise,
    OptimizerState,
    PlainOptimizerState,
    RandomState,
    SchedulerMadeByLoad,
    TrainState,
)
from dcpbench.workloads.workload import Tensors, Workload, next_step
from dcpbench.workloads.world import World

_DP_STRIDE = 7919
"""Apart by so much are the seeds of what data-parallel ranks draw."""


class TrainingRun:
    """What is trained and saved.

    `world` are the ranks that train it, on a mesh of these `sizes`. `alive` says for each step trained here
    whether this rank saw a gradient that is not zero: a dead net's losses say nothing. `draws` says whether a
    step took random numbers from the default generators, or those of a run that it builds on did. What they
    draw next belongs to the ranks of one layout: under another one it cannot be restored (`keeps_random`, or
    the names of those that are).
    """

    keeps_random: bool | frozenset[str]

    why_no_twin: str | None = None
    """Why no plain model in one process can be held against it."""
    clears_gradients = True
    """Whether no gradients are left after a step."""
    optimizer_state: OptimizerStateAs | None = None
    """How its optimizer's state is saved."""
    not_looked_at: Mapping[str, str] = MappingProxyType({})
    """What of its `objects` cannot be looked at, and of which type that is."""
    left_out: Collection[str] = ()
    """The parts of the model that no checkpoint has, by FQN."""
    pipeline: Pipeline | None = None
    """Of which its model is this rank's stage."""
    computes_in: frozenset[torch.dtype] = frozenset()
    """The dtypes that it computes in beside those of its parameters."""
    why_layout_bound: str | None = None
    """Why its losses depend on how many ranks share a batch."""
    _recorded: dict[str, torch.Tensor] | None = None
    options = StateDictOptions()
    """What torch's state-dict functions are asked for when model and optimizer are saved and loaded."""

    def __init__(
        self,
        workload: Workload,
        world: World,
        sizes: dict[str, int],
        model: nn.Module,
        seed: int,
        scheduler: bool = True,
        component: Component | None = None,
    ) -> None:
        self.model, self.world, self.sizes = model, world, sizes
        self.called = model  # by the loss
        self.component = component or Component()
        self._loss_of, self._make_scheduler = workload.loss, workload.scheduler
        made = workload.optimizer(model)
        self.optimizer = Optimizers(made) if isinstance(made, list) else made
        self._scheduled_later = not scheduler
        self._scheduler = workload.scheduler(self.optimizer) if scheduler else None
        self.keeps_random, self.draws = True, False
        self._start_over(seed)

    def _start_over(self, seed: int) -> None:
        self.noise = Noise(seed)
        self.tensor_object = MovingObject(seed, self.world.device)
        self.train_state = TrainState()
        # As in any trainer, ranks with the same data, and no others, draw the same.
        own = seed + _DP_STRIDE * self.world.dp_rank(self.sizes)
        self.random = RandomState(own, self.world.rank, self.world.device)
        self.alive: list[bool] = []

    @property
    def scheduler(self) -> LRScheduler:
        """What changes the learning rate with the steps."""
        assert self._scheduler is not None, "it is made when it is loaded"
        return self._scheduler

    def _make_later(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        made = self._make_scheduler(optimizer)
        if optimizer is self.optimizer:
            self._scheduler = made
        return made

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Those of its parameters, and what else it computes in."""
        return self.computes_in | {value.dtype for value in self.model.parameters()}

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint: one `Stateful` for each top-level key."""
        optimizer = PlainOptimizerState if self.optimizer_state else OptimizerState
        return {
            "model": ModelState(self.model, self.options),
            "optimizer": optimizer(self.model, self.optimizer, self.options),
            "scheduler": self._scheduler or SchedulerMadeByLoad(self._make_later, self.optimizer),
            "noise": self.noise,
            "tensor_object": self.tensor_object,
            "train_state": self.train_state,
            **({"random": self.random} if self.keeps_random else {}),
            **self.component.state(self.options),
        }

    def objects(self) -> dict[str, dict[str, Any]]:
        """What is saved beside model and optimizer, as a comparison looks at it."""
        return {
            "scheduler": dict(self._scheduler.state_dict()) if self._scheduler else {},
            "noise": self.noise.state_dict(),
            "tensor_object": self.tensor_object.state_dict(),
            "train_state": self.train_state.contents(),
        }

    def train(self, batches: Batches, until: int) -> list[float]:
        """Train up to and including step `until`; the global batch's loss of each step taken here."""
        before = len(self.train_state.losses)
        while self.train_state.step < until:
            drawn = self.random.states
            with self._noting(each_of(self.optimizer)):
                loss = self.backward(self.next_batch(batches))
                self.step()
            self.draws |= any(not torch.equal(drawn[name], now) for name, now in self.random.states.items())
            self.finish_step(self.world.mean(loss))
        return self.train_state.losses[before:]

    def next_batch(self, batches: Batches) -> Tensors:
        """Prepare the model for the next step, and return the global batch of that."""
        self.component.prepare(self.model, self.train_state.step + 1)
        return self._batch_of_step(batches)

    def backward(self, batch: Tensors) -> torch.Tensor:
        """Compute the gradients of this rank's share of a global batch; return its loss, a scalar."""
        with self.random.drawn_from():
            share = self.world.share(self.sizes, batch)
            if self.pipeline:
                loss = self.pipeline.forward_backward(share)
            else:
                loss = self.loss_of(share)
                self.component.backward(loss)
        self._record()
        return loss

    def loss_of(self, samples: Tensors) -> torch.Tensor:
        """Return the loss of these samples, a scalar."""
        return self._loss_of(self.called, samples)

    def step(self) -> None:
        """Take an optimizer step with the gradients."""
        with self.random.drawn_from():
            self.component.step(self.optimizer)
        self.component.follow(self.model)

    def finish_step(self, loss: float) -> None:
        """Clear the gradients, and move everything else on; `loss` is the global batch's."""
        self.model.zero_grad()  # some may be of parameters that the optimizer does not have
        next_step(self.scheduler, loss)
        self.tensor_object.advance()
        self.train_state.record(loss)

    @contextmanager
    def recording(self) -> Iterator[dict[str, torch.Tensor]]:
        """Context manager: copy the gradients of a step, by FQN, as they are after the backward pass."""
        recorded: dict[str, torch.Tensor] = {}
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def _record(self) -> None:
        if self._recorded is None:
            return
        trained = {id(value) for group in self.optimizer.param_groups for value in group["params"]}
        for parts in parts_of_each(named_parts(self.model)).values():
            for name, part in parts.items():
                value = part.parameter
                if value.grad is not None and id(value) in trained and name not in self._recorded:
                    self._recorded[name] = part.of(value.grad).detach().clone()

    def forget(self, seed: int) -> None:
        """Start over with objects that hold other values; what it says of its steps is of none that was
        taken."""
        self._start_over(seed)
        self.train_state = TrainState(-1, float(seed), [float(seed)])
        self.component.forget(seed)
        if self._scheduled_later:
            self._scheduler = None
        else:
            self.scheduler.load_state_dict(perturbed(self.scheduler.state_dict()))

    def make_different(self, seed: int, optimizer: Leaves | None) -> None:
        """Change everything that a load restores; `optimizer` is the saved state of that."""
        self.forget(seed)
        perturb_model(self.model, seed, self.is_left_out)
        perturb_optimizer(self.optimizer, seed, optimizer)

    def leave_gradients(self, batches: Batches) -> None:
        """Have gradients of the next step, and do not take it."""
        self.backward(self._batch_of_step(batches))

    def fill_optimizer(self) -> None:
        """Give a fresh optimizer the state that DCP gives it."""
        OptimizerState(self.model, self.optimizer, self.options).state_dict()

    @property
    def numbers(self) -> dict[str, str]:
        """The numbers under which the optimizer's state is saved, by FQN; none where it is by these."""
        if not self.optimizer_state:
            return {}
        parts = parts_of_each(named_parts(self.model))
        parameters = (value for group in self.optimizer.param_groups for value in group["params"])
        return {name: str(number) for number, value in enumerate(parameters) for name in parts[id(value)]}

    def is_at(self, step: int) -> None:
        """Told after which step the state was saved that it has now; it has loaded that itself."""

    def set_again(self) -> None:
        """Set what is there."""
        for each in self.state().values():
            each.load_state_dict(each.state_dict())

    def may_be_constant(self, name: str) -> bool:
        """Whether what its `objects` have by this name may be what a run that is built anew has as well: of
        the functions of a scheduler only that they are some, of a data loader how it is laid out."""
        first, *rest = name.split(".")
        functions = first == "scheduler" and not {"lr_lambdas", FUNCTION_IF_NONE}.isdisjoint(rest)
        return first == "data_loader" or functions

    def is_left_out(self, name: str) -> bool:
        """Whether no checkpoint has what the model has by this name, so that it has to be the same in each
        run that is built."""
        return any(name == one or name.startswith(f"{one}.") for one in self.left_out)

    @property
    def needs_random(self) -> frozenset[str] | None:
        """The generators that have to come back; None are all of them."""
        return None

    def random_state(self) -> dict[str, Any]:
        """What of the default generators has to come back, as a comparison looks at it."""
        return self.random.state_dict()

    @contextmanager
    def _noting(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """Within, these take a step: note whether they had gradients, which they may clear, or there are some
        left."""
        lives = [False]

        def note(*_: Any) -> None:
            self._record()  # an optimizer that steps in the backward pass clears them
            lives[0] |= self._has_gradient()

        hooks = [one.register_step_pre_hook(note) for one in optimizers]
        yield
        for hook in hooks:
            hook.remove()
        self.alive.append(lives[0] or self._has_gradient())

    def _has_gradient(self) -> bool:
        return any(
            bool(leaf.local.any().item()) for leaf in snapshot_gradients(named_parts(self.model)).values()
        )

    def _batch_of_step(self, batches: Batches) -> Tensors:
        with self.random.drawn_from():
            number = self.component.number_of_batch(self.train_state.step + 1)
            return self.noise.added(batches.at(number))
