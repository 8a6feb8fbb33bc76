"""A model with its optimizer and what else a checkpoint holds, the data, and the training loop."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dcpbench.config.groups import CompileScope, dp_degree
from dcpbench.config.schema import SEED_STRIDE, Config
from dcpbench.verify.perturb import perturbed
from dcpbench.verify.snapshot import local_part
from dcpbench.workloads.parallelisms import layers
from dcpbench.workloads.stateful import (
    ModelState,
    MovingObject,
    Noise,
    OptimizerState,
    RandomState,
    TrainState,
)
from dcpbench.workloads.workload import Tensors, Workload, each_tensor, workload_of
from dcpbench.workloads.world import World

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
    draw next belongs to the ranks of one layout: under another one it cannot be restored (`keeps_random`).
    """

    def __init__(
        self, workload: Workload, world: World, sizes: dict[str, int], model: nn.Module, seed: int
    ) -> None:
        self.model, self.world, self.sizes = model, world, sizes
        self._loss_of = workload.loss
        self.optimizer = workload.optimizer(model)
        self.scheduler = workload.scheduler(self.optimizer)
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

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint: one `Stateful` for each top-level key."""
        return {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "scheduler": self.scheduler,
            "noise": self.noise,
            "tensor_object": self.tensor_object,
            "train_state": self.train_state,
            **({"random": self.random} if self.keeps_random else {}),
        }

    def objects(self) -> dict[str, dict[str, Any]]:
        """What is saved beside model and optimizer, as a comparison looks at it."""
        return {
            "scheduler": dict(self.scheduler.state_dict()),
            "noise": self.noise.state_dict(),
            "tensor_object": self.tensor_object.state_dict(),
            "train_state": self.train_state.contents(),
        }

    def train(self, batches: Batches, until: int) -> list[float]:
        """Train up to and including step `until`; the global batch's loss of each step taken here."""
        before = len(self.train_state.losses)
        while self.train_state.step < until:
            drawn = self.random.states
            with self.random.drawn_from():
                loss = self._loss(batches, self.train_state.step + 1)
                loss.backward()
                self.alive.append(self._has_gradient())
                self.optimizer.step()
            self.draws |= any(not torch.equal(drawn[name], now) for name, now in self.random.states.items())
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.tensor_object.advance()
            self.train_state.record(self.world.mean(loss))
        return self.train_state.losses[before:]

    def forget(self, seed: int) -> None:
        """Start over with objects that hold other values, and no steps taken."""
        self._start_over(seed)
        other = {key: perturbed(value) for key, value in self.scheduler.state_dict().items()}
        self.scheduler.load_state_dict(other)

    def _has_gradient(self) -> bool:
        gradients = (local_part(p.grad) for p in self.model.parameters() if p.grad is not None)
        return any(bool(gradient.any().item()) for gradient in gradients)

    def _loss(self, batches: Batches, step: int) -> torch.Tensor:
        return self._loss_of(self.model, self.world.share(self.sizes, self.noise.added(batches.at(step))))


def build(config: Config, world: World, seed: int) -> TrainingRun:
    """The model of a cell under its parallelism, compiled if the cell says so, and its optimizer."""
    sizes = config.parallel.mesh_sizes(world.size)
    workload = _workload(config, world.device, seed)
    by_layer = config.compile_scope is CompileScope.layer
    if config.compile and by_layer:
        for holder, name, layer in layers(workload.model):
            compiled: Any = torch.compile(layer, dynamic=False)
            holder.register_module(name, compiled)
    wrap = pkgutil.resolve_name(config.parallel.target)
    model = wrap(workload.model, world.mesh(sizes), config.parallel)
    if isinstance(model, DistributedDataParallel):
        first = Batches(config.seed, workload.batch, world.device).at(1)
        _lay_out_buckets(model, workload, world.share(sizes, first))
    if config.compile and not by_layer:
        model = torch.compile(model, dynamic=False)
    return TrainingRun(workload, world, sizes, model, seed)


def build_plain(config: Config, world: World, seed: int) -> TrainingRun:
    """The same model from the same seed, unwrapped and uncompiled, trained on the whole batch."""
    workload = _workload(config, world.device, seed)
    return TrainingRun(workload, World(0, 1, world.device, None), {}, workload.model, seed)


def build_replica(config: Config, world: World, seed: int) -> TrainingRun:
    """The same, trained on this rank's share of the batch, its gradients divided by the number of shares but
    never summed; its losses are the ranks' mean."""
    sizes = config.parallel.mesh_sizes(world.size)
    workload = _workload(config, world.device, seed)
    run = TrainingRun(workload, world, sizes, workload.model, seed)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / dp_degree(sizes, world.size))
    return run


def build_stranger(config: Config, world: World, seed: int) -> TrainingRun:
    """A plain run from another seed that draws what the cell's draw: at each step it differs from a run that
    was restored there in nothing but what is restored."""
    stranger = build_plain(config, world, seed)
    stranger.noise = Noise(config.seed)
    return stranger


def batches(config: Config, device: torch.device) -> Batches:
    """The data of a cell; its workload, of which nothing else is needed here, says what it is."""
    # One's own may hold tensors that its batches are made of.
    with device if config.workload.target else torch.device("meta"):
        return Batches(config.seed, workload_of(config).batch, device)


def _workload(config: Config, device: torch.device, seed: int) -> Workload:
    torch.manual_seed(seed)
    with device:
        workload = workload_of(config)
    return replace(workload, model=workload.model.to(device))


def _lay_out_buckets(model: nn.Module, workload: Workload, share: Tensors) -> None:
    """Have DDP lay its gradient buckets out anew, which it does after its first backward, and from then on
    sum in another order: a resumed run would differ from the uninterrupted one by that alone. Buffers and
    generators stay as they are."""
    before = {name: value.clone() for name, value in model.named_buffers()}
    with torch.random.fork_rng():
        workload.loss(model, share).backward()
    model.zero_grad()
    for name, value in model.named_buffers():
        value.copy_(before[name])
