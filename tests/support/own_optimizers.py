"""Trainers with several optimizers, one that no checkpoint has, or one of main weights."""

import copy
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from dcpbench.runs.own_trainer import Setup
from support.own_trainer import SavesInTheBackground, Trainer


class Two(Trainer):
    """Its layers have optimizers of their own; `optimizer` is the first one's."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.second = torch.optim.SGD(self.model[3].parameters(), lr=0.1, momentum=0.9)
        self.optimizer = torch.optim.AdamW(self.model[0].parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.optimizer.register_step_post_hook(lambda *_: self.second.step())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, self.second]

    def save(self, path: str) -> None:
        states = [one.state_dict() for one in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizers": states, "own": self.own()}, path)

    def load(self, path: str) -> None:
        held = torch.load(path)
        self.model.load_state_dict(held["model"])
        for one, state in zip(self.optimizers, held["optimizers"], strict=True):
            one.load_state_dict(state)
        self.restore(held["own"])


class ForgetsTheSecond(Two):
    def load(self, path: str) -> None:
        before = copy.deepcopy(self.second.state_dict())
        super().load(path)
        self.second.load_state_dict(before)


class Counting(torch.optim.SGD):
    """Counts its steps in addition to its state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class ForgetsItsCount(SavesInTheBackground):
    """Its optimizer counts its steps in no state dict, and uses the count later."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.optimizer = Counting(self.model.parameters(), lr=0.01)  # type: ignore[assignment]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)


class SavesWithinZero(Trainer):
    """Saves the optimizer inside ZeRO, whose groups each step sets."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        parameters = self.model.parameters()
        self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)  # type: ignore[assignment]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)

    def step(self) -> float:
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + self.progress.step)
        return super().step()

    def state(self) -> dict[str, Any]:
        inner = self.optimizer.optim.state_dict()  # type: ignore[attr-defined]
        return {"model": self.model.state_dict(), "optimizer": inner, "own": self.own()}

    def save(self, path: str) -> None:
        torch.save(self.state(), path)

    def load(self, path: str) -> None:
        held = torch.load(path)
        self.model.load_state_dict(held["model"])
        self.optimizer.optim.load_state_dict(held["optimizer"])  # type: ignore[attr-defined]
        self.restore(held["own"])


class ForgetsItsRate(SavesWithinZero):
    """Sets the rate for the next step, and loses it."""

    def step(self) -> float:
        return Trainer.step(self)


class SavesNoOptimizer(Trainer):
    """Sets the rate of plain SGD in each step, so that no checkpoint has to restore it."""

    not_saved = ("optimizer", "scheduler")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # type: ignore[assignment]

    def step(self) -> float:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.progress.step)
        return super().step()

    def save(self, path: str) -> None:
        torch.save({"model": self.model.state_dict(), "own": self.own()}, path)

    def load(self, path: str) -> None:
        held = torch.load(path)
        self.model.load_state_dict(held["model"])
        self.restore(held["own"])


class LeavesOutTheSecond(Two):
    """Its second optimizer has a state that changes nothing."""

    not_saved = ("second",)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.second.param_groups[0]["lr"] = 0.0

    def load(self, path: str) -> None:
        before = copy.deepcopy(self.second.state_dict())
        super().load(path)
        self.second.load_state_dict(before)
        self.second.param_groups[0]["lr"] = 0.0


class TrainsMainWeights(Trainer):
    """Its optimizer trains weights in full precision; the model has them rounded."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.main = [one.detach().double().requires_grad_() for one in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.main, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.optimizer.register_step_pre_hook(lambda *_: self.hand_gradients_over())
        self.optimizer.register_step_post_hook(lambda *_: self.round())

    def hand_gradients_over(self) -> None:
        for main, rounded in zip(self.main, self.model.parameters(), strict=True):
            assert rounded.grad is not None
            main.grad, rounded.grad = rounded.grad.double(), None

    @torch.no_grad()
    def round(self) -> None:
        for main, rounded in zip(self.main, self.model.parameters(), strict=True):
            rounded.copy_(main)

    def save(self, path: str) -> None:
        main = [one.detach() for one in self.main]
        torch.save({"main": main, "optimizer": self.optimizer.state_dict(), "own": self.own()}, path)

    @torch.no_grad()
    def load(self, path: str) -> None:
        held = torch.load(path)
        for main, saved in zip(self.main, held["main"], strict=True):
            main.copy_(saved)
        self.round()
        self.optimizer.load_state_dict(held["optimizer"])
        self.restore(held["own"])


class RoundsItsMainWeights(TrainsMainWeights):
    @torch.no_grad()
    def load(self, path: str) -> None:
        super().load(path)
        for main, rounded in zip(self.main, self.model.parameters(), strict=True):
            main.copy_(rounded)
