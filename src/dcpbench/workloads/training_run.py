"""A model with its optimizer and what else a checkpoint holds, the data, and the training loop."""

import pkgutil
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import StepLR

from dcpbench.config.groups import dp_degree
from dcpbench.config.schema import SEED_STRIDE, Config
from dcpbench.verify.perturb import perturbed
from dcpbench.verify.snapshot import local_part
from dcpbench.workloads.stateful import (
    ModelState,
    MovingObject,
    Noise,
    OptimizerState,
    RandomState,
    TrainState,
)
from dcpbench.workloads.world import World

_DP_STRIDE = 7919
"""Apart by so much are the seeds of what data-parallel ranks draw."""


@dataclass(frozen=True)
class Batches:
    """The global batches of a cell, `size` samples each: a function of the seed and the step, on whatever
    layout they are trained.

    They are drawn on the CPU by a generator of their own, so that neither the device nor what else
    was drawn before has a say in them. Targets lie in [1, 2): away from zero, so that the loss is.
    """

    seed: int
    size: int
    input_size: int
    output_size: int
    device: torch.device

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of shape (size, input_size) and targets of shape (size, output_size)."""
        generator = torch.Generator().manual_seed(self.seed * SEED_STRIDE + step)
        inputs = torch.rand(self.size, self.input_size, generator=generator)
        targets = 1 + torch.rand(self.size, self.output_size, generator=generator)
        return inputs.to(self.device), targets.to(self.device)


class TrainingRun:
    """What is trained and saved.

    `world` are the ranks that train it, on a mesh of these `sizes`. `alive` says for each step trained here
    whether this rank saw a gradient that is not zero: a dead net's losses say nothing. `draws` says whether a
    step took random numbers from the default generators, or those of a run that it builds on did. What they
    draw next belongs to the ranks of one layout: under another one it cannot be restored (`keeps_random`).
    """

    def __init__(
        self, config: Config, world: World, sizes: dict[str, int], model: nn.Module, seed: int
    ) -> None:
        self.model, self.world, self.sizes = model, world, sizes
        groups = pkgutil.resolve_name(config.optimizer.groups)(model)
        hyperparameters = config.optimizer.hyperparameters()
        self.optimizer = pkgutil.resolve_name(config.optimizer.target)(groups, **hyperparameters)
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.95)
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
        inputs, targets = batches.at(step)
        inputs = inputs + self.noise.like(inputs)
        inputs, targets = (self.world.share(self.sizes, part) for part in (inputs, targets))
        # In one dtype: torch 2.11 has no gradient of a loss of two.
        return F.mse_loss(self.model(inputs).to(targets.dtype), targets)


def build(config: Config, world: World, seed: int) -> TrainingRun:
    """The model of a cell under its parallelism, compiled if the cell says so, and its optimizer."""
    sizes = config.parallel.mesh_sizes(world.size)
    wrap = pkgutil.resolve_name(config.parallel.target)
    model = wrap(_model(config, world.device, seed), world.mesh(sizes), config.parallel)
    if config.compile:
        model = torch.compile(model, dynamic=False)
    return TrainingRun(config, world, sizes, model, seed)


def build_plain(config: Config, world: World, seed: int) -> TrainingRun:
    """The same model from the same seed, unwrapped and uncompiled, trained on the whole batch."""
    alone = World(0, 1, world.device, None)
    return TrainingRun(config, alone, {}, _model(config, world.device, seed), seed)


def build_replica(config: Config, world: World, seed: int) -> TrainingRun:
    """The same, trained on this rank's share of the batch, its gradients divided by the number of shares but
    never summed; its losses are the ranks' mean."""
    sizes = config.parallel.mesh_sizes(world.size)
    run = TrainingRun(config, world, sizes, _model(config, world.device, seed), seed)
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
    """The data of a cell; the model says of what size."""
    with torch.device("meta"):
        model = pkgutil.resolve_name(config.model.target)(**config.model.options)
    return Batches(config.seed, config.model.batch_size, model.input_size, model.output_size, device)


def _model(config: Config, device: torch.device, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with device:
        model: nn.Module = pkgutil.resolve_name(config.model.target)(**config.model.options)
    return model.to(device)
