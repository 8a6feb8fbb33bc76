"""Trainers as users would write them: one that saves and loads all that it has, and ones that do not."""

import copy
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

from dcpbench.runs.own_trainer import Setup


@dataclass
class Progress:
    """Counters of a trainer."""

    step: int = 0
    best: float = float("inf")


class Trainer:
    """One model under any parallelism, saved by DCP, with a scheduler, dropout and a shuffled data set."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(setup.seed)
        self.setup = setup
        plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.model = setup.wrap(plain)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        generator = torch.Generator().manual_seed(setup.seed)
        self.data = torch.randn(64, 8, generator=generator).to(setup.device)
        self.order = torch.Generator().manual_seed(setup.seed + setup.dp_rank)
        self.progress = Progress()

    def step(self) -> float:
        chosen = torch.randint(64, (4,), generator=self.order)
        inputs = self.data[chosen]
        self.model.zero_grad()
        loss = F.mse_loss(self.model(inputs), inputs.roll(1, 1))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress.step += 1
        self.progress.best = min(self.progress.best, loss.item())
        return loss.item()

    def own(self) -> dict[str, Any]:
        return {
            "scheduler": self.scheduler.state_dict(),
            "progress": asdict(self.progress),
            "order": self.order.get_state(),
            "random": torch.get_rng_state(),
        }

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, f"rank{self.setup.rank}": self.own()}

    def save(self, path: str) -> Any:
        save(self.state(), checkpoint_id=path)

    def load(self, path: str) -> None:
        state = self.state()
        load(state, checkpoint_id=path)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.restore(state[f"rank{self.setup.rank}"])

    def restore(self, own: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(own["scheduler"])
        self.progress = Progress(**own["progress"])
        self.order.set_state(own["order"])
        torch.set_rng_state(own["random"])


class KeepsSets(Trainer):
    """What it has read is in sets, which are restored in another order than they grew in."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.words = {"first"}
        self.pairs = {("once", 0), frozenset({"a", "b"})}

    def step(self) -> float:
        self.words |= {f"word-{self.progress.step}-{number}" for number in range(40)}
        self.pairs |= {(word, number) for number, word in enumerate(sorted(self.words))}
        self.pairs.add(frozenset(self.words))
        return super().step()

    def own(self) -> dict[str, Any]:
        return super().own() | {
            "words": sorted(self.words, reverse=True),
            "pairs": sorted(self.pairs, key=repr),
        }

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.words = set(own["words"])
        self.pairs = {frozenset([*one][::-1]) if isinstance(one, frozenset) else one for one in own["pairs"]}


class ForgetsAPair(KeepsSets):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.pairs.discard(("once", 0))


class ForgetsAWord(KeepsSets):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "words": own["words"][1:]})


class ForgetsItsBest(Trainer):
    """Has a best loss, at first infinity, which it does not restore."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.best = float("inf")

    def step(self) -> float:
        loss = super().step()
        self.best = min(self.best, loss)
        return loss


class HasADefault(Trainer):
    """Has a default of its class until it keeps a loss, or is restored."""

    last = 0.0

    def step(self) -> float:
        loss = super().step()
        if self.progress.step == 3:
            self.last = loss
        return loss

    def own(self) -> dict[str, Any]:
        return super().own() | {"last": self.last}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.last = own["last"]


class ForgetsItsDefault(HasADefault):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "last": 1.0})


class ForgetsTheScheduler(Trainer):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "scheduler": self.scheduler.state_dict()})


class ForgetsTheGenerators(Trainer):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "random": torch.get_rng_state()})


class ForgetsTheOrder(Trainer):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "order": self.order.get_state()})


class OneStepOff(Trainer):
    def restore(self, own: dict[str, Any]) -> None:
        progress = own["progress"]
        super().restore({**own, "progress": {**progress, "step": progress["step"] - 1}})


class KeepsItInMemory(Trainer):
    """A part of its state never reaches the disk."""

    kept: ClassVar[dict[str, dict[str, Any]]] = {}

    def save(self, path: str) -> None:
        self.kept[path] = copy.deepcopy(self.own())
        super().save(path)

    def load(self, path: str) -> None:
        super().load(path)
        if path in self.kept:
            self.restore(self.kept[path])
        else:
            self.progress = Progress()


class SavesInTheBackground(Trainer):
    """It copies the state, and writes it after training has continued, however quick the disk is."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.background = ThreadPoolExecutor(1)
        self.went_on = threading.Event()
        self.resumed = False

    not_saved = ("background", "went_on", "resumed")

    def step(self) -> float:
        loss = super().step()
        self.went_on.set()
        return loss

    def kept(self) -> dict[str, Any]:
        return copy.deepcopy(self.model.state_dict())

    def save(self, path: str) -> Future[None]:
        self.went_on.clear()
        own = copy.deepcopy(self.own())
        kept = {"model": self.kept(), "optimizer": copy.deepcopy(self.optimizer.state_dict()), "own": own}

        def write() -> None:
            if not self.resumed:  # else it is saved once more, and training waits
                self.went_on.wait(60)
            torch.save(kept, path)

        return self.background.submit(write)

    def load(self, path: str) -> None:
        held = torch.load(path)
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.restore(held["own"])
        self.resumed = True


class SavesViews(SavesInTheBackground):
    """It saves the live tensors, which training then changes."""

    def kept(self) -> dict[str, Any]:
        return self.model.state_dict()


class DrawsNothing(Trainer):
    """It restores no generator, and need not."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.model.eval()

    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "random": torch.get_rng_state()})


class BeginsLate(DrawsNothing):
    """Makes the iterator of its data at its first step, and skips there into a resumed epoch."""

    it: Any = None

    def step(self) -> float:
        if self.it is None:
            self.it = iter(DataLoader(range(64), 4, sampler=range(64)))  # type: ignore[arg-type]
            for _ in range(self.progress.step):
                next(self.it)
        self.order.manual_seed(int(next(self.it)[0]))
        return super().step()


class LosesADictionary(Trainer):
    """Has None after a load instead of a dictionary, until the first step."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.seen: dict[str, float] | None = {"first": 0.0, "last": 0.0}

    def step(self) -> float:
        loss = super().step()
        self.seen = {"first": 1.0, "last": loss}
        return loss

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.seen = None


class DrawsInVain(DrawsNothing):
    """Draws from a default generator what no step uses."""

    def step(self) -> float:
        torch.rand(1)
        return super().step()


class Average:
    """Of numbers."""

    def __init__(self, mean: float = 0.0, count: int = 0) -> None:
        self.mean, self.count = mean, count

    def add(self, number: float) -> None:
        self.count += 1
        self.mean += (number - self.mean) / self.count


class Averages(Trainer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.average = Average()

    def step(self) -> float:
        loss = super().step()
        self.average.add(loss)
        return loss

    def own(self) -> dict[str, Any]:
        return super().own() | {"average": {**vars(self.average)}}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.average = Average(**own["average"])


class Reader:
    """Reads numbers, and takes a restored place over when it reads first."""

    def __init__(self, number: int) -> None:
        self.number, self.place, self.restored = number, 0, None

    def read(self) -> int:
        if self.restored is not None:
            self.place, self.restored = self.restored, None
        self.place += 1
        return 1000 * self.number + self.place


class ReadsInTurn(Trainer):
    """Has three readers, and a count and an order of its own that follow when they are needed."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.readers = [Reader(number) for number in range(3)]
        self.reads, self.restored_reads = 0, None  # the latter is that of the next read
        self.numbers: list[int] | None = None

    def places(self) -> list[int]:
        return [one.place if one.restored is None else one.restored for one in self.readers]

    def step(self) -> float:
        if self.restored_reads is not None:
            self.reads, self.restored_reads = self.restored_reads - 1, None
        self.reads += 1
        self.numbers = [self.reads, *range(3)]
        self.order.manual_seed(self.readers[self.progress.step % 3].read())
        return super().step()

    def own(self) -> dict[str, Any]:
        reads = self.reads + 1 if self.restored_reads is None else self.restored_reads
        return super().own() | {"places": self.places(), "reads": reads}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.restored_reads = own["reads"]
        for reader, place in zip(self.readers, own["places"], strict=True):
            reader.restored = place


class SavesTooEarly(ReadsInTurn):
    """What it saves before a reader has read again has its first place."""

    def places(self) -> list[int]:
        return [one.place for one in self.readers]


class ForgetsAReader(ReadsInTurn):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "places": [*own["places"][:2], 0]})


class ForgetsItsFirstBest(Trainer):
    """Has no best loss before the first step."""

    best: float | None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.best = None

    def step(self) -> float:
        loss = super().step()
        self.best = -loss if self.best is None else max(self.best, -loss)
        return loss


class MakesAWrongSchedule(Trainer):
    """Raises in its second step, where torch's schedules raise."""

    def step(self) -> float:
        if self.progress.step == 1:
            torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1)
        return super().step()


class HasNoData(Trainer):
    def step(self) -> float:
        next(iter([]))
        return super().step()


class MeasuresItsBest(Trainer):
    """Loses its best loss in an object, and measures it again in each step."""

    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "progress": {**own["progress"], "best": float("inf")}})

    def step(self) -> float:
        loss = super().step()
        self.progress.best = 1.0 + self.progress.step
        return loss


class LosesItsAverage(Averages):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "average": {}})


class Slotted:
    __slots__ = ("calls",)


class CountsUnread(Trainer):
    """Counts its steps where nothing is read, and neither saves nor uses the counts."""

    totals: ClassVar[dict[str, int]] = {"calls": 0}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.slotted, self.closure = Slotted(), counter()
        self.slotted.calls = 0

    def step(self) -> float:
        self.slotted.calls += 1
        self.totals["calls"] += 1
        CountsUnread.step.calls = self.closure()  # type: ignore[attr-defined]
        return super().step()


class DrawsByAClosure(Trainer):
    """Its batches follow from the number in a closure, which no checkpoint has."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.closure = counter()

    def step(self) -> float:
        self.order.manual_seed(self.closure())
        return super().step()


def counter() -> Callable[[], int]:
    """Return a function that counts its calls."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Counting(nn.Sequential):
    """Counts its calls, in no state dict."""

    calls = 0

    def forward(self, *inputs: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(*inputs)


class CountsInAModule(Trainer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.model[0] = Counting(self.model[0])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)


class CountsAndForgets(CountsInAModule):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "order": self.order.get_state()})


class Unlucky(Trainer):
    """It has attributes that cannot be read, and attributes that differ each time."""

    not_saved = ("built",)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.batches = iter(range(3))
        self.built = object()


class GoesAroundDDP(Trainer):
    """Its forward reduces no gradients."""

    def step(self) -> float:
        wrapped, self.model = self.model, self.model.module
        loss = super().step()
        self.model = wrapped
        return loss

    def own(self) -> dict[str, Any]:
        return {**super().own(), "optimizer": self.optimizer.state_dict()}

    def save(self, path: str) -> None:
        torch.save({**self.own(), "model": self.model.state_dict()}, f"{path}-{self.setup.rank}")

    def load(self, path: str) -> None:
        own = torch.load(f"{path}-{self.setup.rank}")
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        self.restore(own)


class MeansToGoAround(GoesAroundDDP):
    replicas_differ = True


class NotesTimes(Trainer):
    """Notes when it was built, and the time of each step."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.started, self.at, self.times = time.monotonic(), 0.0, list[float]()

    def step(self) -> float:
        self.at = time.monotonic()
        self.times.append(self.at)
        return super().step()


class SaysWhatIsNone(ForgetsAPair):
    not_saved = ("pairs",)


def no_trainer(setup: Setup) -> object:
    return object()


class KnowsItsProcess(Trainer):
    """Refuses a checkpoint that its own process has saved, or one like it."""

    has_saved = False
    not_saved = ("has_saved",)

    def save(self, path: str) -> None:
        super().save(path)
        known = {"pid": os.getpid(), "hash": hash("x")}
        Path(f"{path}-{self.setup.rank}.json").write_text(json.dumps(known))
        type(self).has_saved = True

    def load(self, path: str) -> None:
        known = json.loads(Path(f"{path}-{self.setup.rank}.json").read_text())
        is_saver = known["pid"] == os.getpid()
        if not is_saver:
            assert hash("x") != known["hash"], "the same hash seed"
            assert not type(self).has_saved, "a class that has saved"
        super().load(path)
