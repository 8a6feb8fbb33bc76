"""A trainer of a user's own as a run that is trained and saved."""

from typing import Any

import torch

from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.verify.compare import same_value
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.components import Component
from dcpbench.workloads.own_trainer import (
    Generators,
    Setup,
    attributes_of,
    build_trainer,
    optimizer_of,
    optimizers_of,
)
from dcpbench.workloads.parallelisms import lay_out_buckets, wrap_model
from dcpbench.workloads.stateful import TrainState
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.world import World


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
            lambda model: wrap_model(self.config, self.world, model.to(self.world.device)),
        )
        with self.random.drawn_from():
            self.trainer = build_trainer(self.config, setup)
        self._look()
        lay_out_buckets(self.model)

    def _look(self) -> None:
        """A trainer may have put other ones into their places."""
        self.model, self.optimizer = self.trainer.model, optimizer_of(self.trainer)
        not_saved = getattr(self.trainer, "not_saved", ())
        self.left_out = [one.removeprefix("model.") for one in not_saved if one.startswith("model.")]

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
