"""A model with its optimizer and what else a checkpoint holds, the data, and the training loop."""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim.lr_scheduler import LRScheduler

from dcpbench.config.groups import OptimizerStateAs
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import SEED_STRIDE, Config
from dcpbench.verify.compare import same_value
from dcpbench.verify.perturb import perturbed
from dcpbench.verify.snapshot import local_part, named_parameters
from dcpbench.workloads.components import Component, Surroundings
from dcpbench.workloads.optimizers import Optimizers, each_of
from dcpbench.workloads.own_trainer import (
    Generators,
    Setup,
    attributes_of,
    build_trainer,
    optimizer_of,
    optimizers_of,
)
from dcpbench.workloads.parallelisms import computes_in, lay_out_buckets, wrap_layers
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
from dcpbench.workloads.workload import Tensors, Workload, each_tensor, next_step, workload_of
from dcpbench.workloads.world import World

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DP_STRIDE = 7919
"""Apart by so much are the seeds of what data-parallel ranks draw."""


@dataclass(frozen=True)
class Batches:
    """The global batches of a cell: a function of the seed and the step, on whatever layout they are trained.

    They are drawn on the CPU by a generator of their own, so that neither the device nor what else
    was drawn before has a say in them.
    """

    seed: int
    draw: Callable[[torch.Generator], Tensors]
    device: torch.device

    def at(self, step: int) -> Tensors:
        """The batch of a step, counted from 1."""
        generator = torch.Generator().manual_seed(self.seed * SEED_STRIDE + step)
        return each_tensor(lambda tensor: tensor.to(self.device), self.draw(generator))


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
    pipeline: Pipeline | None = None
    """Of which its model is this rank's stage."""
    computes_in: frozenset[torch.dtype] = frozenset()
    """The dtypes that it computes in beside those of its parameters."""
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
            self.component.prepare(self.model, self.train_state.step + 1)
            drawn = self.random.states
            with self.random.drawn_from(), self._noting(each_of(self.optimizer)):
                loss = self._forward_backward(batches)
                self.component.step(self.optimizer)
            self.component.follow(self.model)
            self.draws |= any(not torch.equal(drawn[name], now) for name, now in self.random.states.items())
            self.optimizer.zero_grad()
            mean = self.world.mean(loss)
            next_step(self.scheduler, mean)
            self.tensor_object.advance()
            self.train_state.record(mean)
        return self.train_state.losses[before:]

    def forget(self, seed: int) -> None:
        """Start over with objects that hold other values; what it says of its steps is of none that was
        taken."""
        self._start_over(seed)
        self.train_state = TrainState(-1, float(seed), [float(seed)])
        self.component.forget(seed)
        if self._scheduled_later:
            self._scheduler = None
        else:
            other = {key: perturbed(value) for key, value in self.scheduler.state_dict().items()}
            self.scheduler.load_state_dict(other)

    def leave_gradients(self, batches: Batches) -> None:
        """Have gradients of the next step, and do not take it."""
        with self.random.drawn_from():
            self._forward_backward(batches)

    def fill_optimizer(self) -> None:
        """Give a fresh optimizer the state that DCP gives it."""
        OptimizerState(self.model, self.optimizer, self.options).state_dict()

    @property
    def numbers(self) -> dict[str, str]:
        """The numbers under which the optimizer's state is saved, by FQN; none where it is by these."""
        if not self.optimizer_state:
            return {}
        names = {id(value): name for name, value in reversed(named_parameters(self.model).items())}
        parameters = (value for group in self.optimizer.param_groups for value in group["params"])
        return {names[id(value)]: str(number) for number, value in enumerate(parameters)}

    def is_at(self, step: int) -> None:
        """Told after which step the state was saved that it has now; it has loaded that itself."""

    def set_again(self) -> None:
        """Set what is there."""
        for each in self.state().values():
            each.load_state_dict(each.state_dict())

    def may_be_constant(self, name: str) -> bool:
        """Whether what its `objects` have by this name may be what a run that is built anew has as well: of
        the functions of a `LambdaLR` only that they are some, of a data loader how it is laid out."""
        first, *rest = name.split(".")
        return first == "data_loader" or (first == "scheduler" and "lr_lambdas" in rest)

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
            lives[0] |= self._has_gradient()

        hooks = [one.register_step_pre_hook(note) for one in optimizers]
        yield
        for hook in hooks:
            hook.remove()
        self.alive.append(lives[0] or self._has_gradient())

    def _has_gradient(self) -> bool:
        gradients = (local_part(p.grad) for p in self.model.parameters() if p.grad is not None)
        return any(bool(gradient.any().item()) for gradient in gradients)

    def _forward_backward(self, batches: Batches) -> torch.Tensor:
        """Compute the gradients of the next step; its loss."""
        number = self.component.number_of_batch(self.train_state.step + 1)
        share = self.world.share(self.sizes, self.noise.added(batches.at(number)))
        if self.pipeline:
            return self.pipeline.forward_backward(share)
        loss = self._loss_of(self.model, share)
        self.component.backward(loss)
        return loss


class TrainerRun(TrainingRun):
    """A trainer of a user's own, which draws its batches, saves and loads by itself."""

    why_no_twin = "the trainer draws its batches itself, and no plain model in one process sees the same"
    clears_gradients = False

    def __init__(self, config: Config, world: World, seed: int) -> None:
        self.config, self.world, self.sizes = config, world, config.parallel.mesh_sizes(world.size)
        self.keeps_random, self.draws, self.component = True, False, Component()
        self._drawn: set[str] = set()
        self._start_over(seed)

    def _start_over(self, seed: int) -> None:
        self.train_state, self.alive = TrainState(), []
        self.random = Generators(seed, self.world.rank, self.world.device)
        setup = Setup(
            self.config.parallel.name,
            self.world.device,
            self.world.rank,
            self.world.size,
            self.world.dp_rank(self.sizes),
            dp_degree(self.sizes),
            self.config.seed,
            lambda model: _wrapped(self.config, self.world, model.to(self.world.device)),
        )
        with self.random.drawn_from():
            self.trainer = build_trainer(self.config, setup)
        self._look()
        lay_out_buckets(self.model)

    def _look(self) -> None:
        """A trainer may have put other ones into their places."""
        self.model, self.optimizer = self.trainer.model, optimizer_of(self.trainer)

    def state(self) -> dict[str, Any]:
        """The trainer, which is no `Stateful`."""
        return {"trainer": self}

    def objects(self) -> dict[str, dict[str, Any]]:
        """What the trainer holds beside model and optimizer."""
        held, self.not_looked_at = attributes_of(self.trainer)
        return held

    def train(self, batches: Batches, until: int) -> list[float]:
        """Have the trainer take its steps up to and including step `until`; the ranks' mean loss of each.

        Raises:
            TypeError: a step returned no loss.
        """
        before = len(self.train_state.losses)
        while self.train_state.step < until:
            drawn = self.random.states
            with self.random.drawn_from(), self._noting(optimizers_of(self.trainer)):
                loss = self.trainer.step()
            if not isinstance(loss, float | torch.Tensor):
                raise TypeError(f"step() of the trainer returned a {type(loss).__name__}, not its loss")
            self._look()
            now = self.random.states
            self._drawn |= {name for name, state in drawn.items() if not same_value(state, now[name])}
            self.train_state.record(self.world.mean(torch.as_tensor(loss, device=self.world.device)))
        return self.train_state.losses[before:]

    def save(self, path: str) -> Any:
        """Have the trainer save; what it returns."""
        with self.random.drawn_from():
            return self.trainer.save(path)

    def load(self, path: str) -> None:
        """Have the trainer load what it saved."""
        with self.random.drawn_from():
            self.trainer.load(path)
        self._look()

    def is_at(self, step: int) -> None:
        self.train_state.step = step

    def forget(self, seed: int) -> None:
        """Build the trainer anew, as a job that is started again does; it goes on with other generators."""
        self._start_over(seed)
        self.random.seed(seed)

    def fill_optimizer(self) -> None:
        """What is to be loaded is the trainer's to prepare."""

    def set_again(self) -> None:
        """A trainer need not load more than once."""

    def may_be_constant(self, name: str) -> bool:
        return True

    @property
    def needs_random(self) -> frozenset[str]:
        return frozenset(() if "random" in getattr(self.trainer, "not_saved", ()) else self._drawn)

    def random_state(self) -> dict[str, Any]:
        held = super().random_state()[self.random.key]
        kept = held if self.keeps_random is True else self.keeps_random or ()
        return {self.random.key: {name: each for name, each in held.items() if name in kept}}


def build(config: Config, world: World, seed: int, scheduler: bool = True) -> TrainingRun:
    """The model of a cell under its parallelism, compiled if the cell says so, and its optimizer; or the
    trainer that it has instead. Without its `scheduler` that is made when it is loaded."""
    if config.own_trainer:
        return TrainerRun(config, world, seed)
    sizes = config.parallel.mesh_sizes(world.size)
    workload = _workload(config, world.device, seed)
    wrap_layers(workload.model, config.activation_checkpointing, config.compiles_layers)
    model = _wrapped(config, world, workload.model)
    lay_out_buckets(model)
    if config.compile and not config.compiles_layers:
        model = torch.compile(model, dynamic=False)
    component = _component(config, world, seed, partial(_wrapped, config, world))
    run = TrainingRun(workload, world, sizes, model, seed, scheduler, component)
    if "pp" in sizes:
        stages = world.submesh(sizes, "pp")
        run.pipeline = Pipeline(model, stages, config.parallel, workload.loss)
    run.computes_in = computes_in(config.parallel)
    if dp_degree(sizes) > 1 and any(isinstance(one, _BATCH_NORM) for one in model.modules()):
        run.why_no_twin = "batch normalisation sees a rank's share of each batch, and one process all of it"
    run.why_no_twin = getattr(workload.model, "why_no_twin", run.why_no_twin)
    run.options = StateDictOptions(**config.state_dict.options())
    run.optimizer_state = config.optimizer_state
    return run


def build_plain(config: Config, world: World, seed: int) -> TrainingRun:
    """The same model from the same seed, unwrapped and uncompiled, trained on the whole batch."""
    workload = _workload(config, world.device, seed)
    alone, component = World(0, 1, world.device, None, None), _component(config, world, seed)
    return TrainingRun(workload, alone, {}, workload.model, seed, component=component)


def build_replica(config: Config, world: World, seed: int) -> TrainingRun:
    """The same, trained on this rank's share of the batch, its gradients divided by the number of shares but
    never summed; its losses are the ranks' mean."""
    sizes = config.parallel.mesh_sizes(world.size)
    workload = _workload(config, world.device, seed)
    component = _component(config, world, seed)
    run = TrainingRun(workload, world, sizes, workload.model, seed, component=component)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / dp_degree(sizes))
    return run


def build_stranger(config: Config, world: World, seed: int) -> TrainingRun:
    """A plain run from another seed that draws what the cell's draw: at each step it differs from a run that
    was restored there in nothing but what is restored. A trainer as it is built anew, with other weights."""
    if config.own_trainer:
        other = TrainerRun(config, world, seed)
        with torch.no_grad():
            for parameter in other.model.parameters():
                local_part(parameter).mul_(1.0625).add_(0.0625)
        return other
    stranger = build_plain(config, world, seed)
    stranger.noise = Noise(config.seed)
    return stranger


def batches(config: Config, device: torch.device) -> Batches:
    """The data of a cell; its workload, of which nothing else is needed here, says what it is."""
    if config.own_trainer:
        return Batches(config.seed, lambda _: None, device)
    # One's own may hold tensors that its batches are made of.
    with device if config.workload.target else torch.device("meta"):
        return Batches(config.seed, workload_of(config).batch, device)


def _component(
    config: Config, world: World, seed: int, wrap: Callable[[nn.Module], Any] = lambda plain: plain
) -> Component:
    """That of a run from this seed; `wrap` puts a plain model under the parallelism of the run."""
    made_for = Surroundings(
        world.device, config.seed, lambda: _workload(config, world.device, seed).model, wrap
    )
    component: Component = pkgutil.resolve_name(config.component.target)(made_for, **config.component.options)
    return component


def _workload(config: Config, device: torch.device, seed: int) -> Workload:
    torch.manual_seed(seed)
    with device:
        workload = workload_of(config)
    return replace(workload, model=workload.model.to(device))


def _wrapped(config: Config, world: World, model: nn.Module) -> Any:
    """A plain model on its device under the parallelism of the cell."""
    wrap = pkgutil.resolve_name(config.parallel.target)
    return wrap(model, world.mesh(config.parallel.mesh_sizes(world.size)), config.parallel)
