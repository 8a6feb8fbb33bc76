"""A trainer whose counters hang on objects of every kind, and which loses one of them on request."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dcpbench.workloads.own_trainer import Setup
from support.own_trainer import Trainer


class Tally:
    def __init__(self, calls: int = 0) -> None:
        self.calls = calls
        self.itself, self.made = self, time.perf_counter()

    def add(self) -> None:
        self.calls += 1


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Called(Tally):
    def __call__(self) -> None:
        self.add()


class Lookahead(torch.optim.SGD):
    """Its weights of before are in no state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.slow: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        self.slow = self.slow or {one: one.detach().clone() for one in self.param_groups[0]["params"]}
        return super().step(closure)


class Wrapper:
    """An optimizer's wrapper, whose counter is not in its state dict."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        return {}


def counter() -> Callable[..., int]:
    """Return a function that counts from the number that it was called with last."""
    calls = 0

    def count(value: int | None = None) -> int:
        nonlocal calls
        calls = calls + 1 if value is None else value
        return calls

    return count


class KeepsElsewhere(Trainer):
    """Saves and restores everything, but what it loses."""

    all_of_them: ClassVar[list[object]] = []
    totals: ClassVar[dict[str, int]] = {"calls": 0}

    def __init__(self, setup: Setup, lost: str | None = None) -> None:
        super().__init__(setup)
        self.lost = lost
        self.plain, self.slotted, self.called = Tally(), Slotted(), Called()
        self.trainer_of_mine = SimpleNamespace(trainer=self)
        self.namespace = SimpleNamespace(calls=0)
        self.nested = {"all": [Tally()]}
        self.bound = Tally().add
        self.closure = counter()
        self.scalar = np.float32(0.0)
        self.spectrum = np.zeros(2, np.complex64)
        self.letters = np.array(["a"])
        self.of_objects = np.array([None, 0])
        self.second = nn.Dropout()
        self.optimizer = Lookahead(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.wrapper = Wrapper(self.optimizer)
        self.timed = SimpleNamespace(at=0.0)
        self.late: Tally | None = None
        self.opaque = SimpleNamespace(them=[])
        self.all_of_them.append(self)
        self.totals["calls"] = KeepsElsewhere.count.calls = 0  # type: ignore[attr-defined]

    def count(self) -> None:
        """Count all of it."""
        for one in (self.plain, self.slotted, self.namespace, self.nested["all"][0], self.wrapper):
            one.calls += 1  # type: ignore[attr-defined]
        self.late = self.late or Tally()
        self.late.calls = self.progress.step
        self.opaque.them.append(iter(()))
        self.called()
        self.bound()
        self.closure()
        self.scalar = np.float32(self.scalar + 1)
        self.spectrum += 1j
        self.letters = np.array([chr(ord(self.letters[0]) + 1)])
        self.of_objects[1] += 1
        self.timed.at = time.perf_counter()
        self.totals["calls"] += 1
        KeepsElsewhere.count.calls += 1  # type: ignore[attr-defined]

    def step(self) -> float:
        if self.progress.step == 0 or self.lost != "second":
            self.second.eval()
        loss = super().step()
        self.count()
        return loss

    def own(self) -> dict[str, Any]:
        return super().own() | {
            "calls": self.plain.calls,
            "slow": [one.clone() for one in self.optimizer.slow.values()],  # type: ignore[attr-defined]
        }

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        calls = own["calls"]
        if slow := own["slow"]:
            held = dict(zip(self.model.parameters(), slow, strict=True))
            self.keep("optimizer", lambda: setattr(self.optimizer, "slow", held))
        for name in ("plain", "slotted", "called", "namespace", "wrapper"):
            self.keep(name, lambda name=name: setattr(getattr(self, name), "calls", calls))
        self.keep("nested", lambda: setattr(self.nested["all"][0], "calls", calls))
        self.keep("bound", lambda: setattr(self.bound.__self__, "calls", calls))  # type: ignore[attr-defined]
        self.keep("closure", lambda: self.closure(calls))
        self.keep("scalar", lambda: setattr(self, "scalar", np.float32(calls)))
        self.keep("spectrum", lambda: setattr(self, "spectrum", np.full(2, calls * 1j, np.complex64)))
        self.keep("letters", lambda: setattr(self, "letters", np.array([chr(ord("a") + calls)])))
        self.keep("of_objects", lambda: setattr(self, "of_objects", np.array([None, calls])))
        self.keep("totals", lambda: self.totals.update(calls=calls))
        self.keep("count", lambda: setattr(KeepsElsewhere.count, "calls", calls))

    def keep(self, name: str, restore: Callable[[], object]) -> None:
        if name != self.lost:
            restore()


class LosesACount(KeepsElsewhere):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "count")
