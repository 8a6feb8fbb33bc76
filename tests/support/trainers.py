"""Trainers as users write them: right ones, and ones that lose a part of their state or of their files."""

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
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint import async_save, load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dcpbench.runs.own_trainer import Setup
from support.healthy_workloads import WIDTH, Adapted, Counts, NamesState, Tokens

LATE_S = 0.3


def net() -> nn.Sequential:
    layers = nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, WIDTH)
    return nn.Sequential(*layers)


class Plain:
    """Each rank saves and loads everything in a file of its own. Subclasses replace a method, or save `also`
    other attributes."""

    also: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(setup.seed)
        self.setup, self.rank, self.steps = setup, setup.rank, 0
        self.model: Any = setup.wrap(self.plain())
        self.order = torch.Generator().manual_seed(setup.seed + setup.dp_rank)
        self.prepare()

    def plain(self) -> nn.Module:
        return net()

    def prepare(self) -> None:
        self.optimizer: Any = self.made()

    def made(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def batch(self) -> torch.Tensor:
        return torch.rand(16, WIDTH, generator=self.order)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x), x.flip(1))

    def step(self) -> Any:
        loss = self.loss(self.batch().to(self.setup.device))
        loss.backward()
        for optimizer in self.stepped():
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        return loss.detach()

    def stepped(self) -> list[torch.optim.Optimizer]:
        return getattr(self, "optimizers", [self.optimizer])

    def own(self) -> dict[str, Any]:
        return {"order": self.order.get_state(), **{name: getattr(self, name) for name in self.also}}

    def restore(self, own: dict[str, Any]) -> None:
        self.order.set_state(own["order"])
        for name in self.also:
            setattr(self, name, own[name])

    def state(self) -> dict[str, Any]:
        optimizers = [one.state_dict() for one in self.stepped()]
        return {"model": self.model.state_dict(), "optimizers": optimizers, "own": self.own()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, held in zip(self.stepped(), state["optimizers"], strict=False):
            optimizer.load_state_dict(held)
        self.restore(state["own"])

    def file(self, path: str) -> str:
        return f"{path}-{self.rank}.pt"

    def save(self, path: str) -> Any:
        torch.save(self.state(), self.file(path))

    def load(self, path: str) -> None:
        self.set_state(torch.load(self.file(path), weights_only=False))


def restores(of: type[Plain], changed: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> type[Any]:
    """Return a kind of trainer whose load restores other values than the saved ones: those that a function of
    the trainer and the saved values returns."""

    class Restores(of):
        def restore(self, own: dict[str, Any]) -> None:
            super().restore({**own, **changed(self, own)})

    return Restores


def forgets(*names: str, of: type[Plain]) -> type[Any]:
    """Return a kind of trainer whose load leaves these values as they are in a new one."""
    return restores(of, lambda new, _: {name: value for name, value in new.own().items() if name in names})


# Optimizers, models and data of other kinds.


class WithLbfgs(Plain):
    def made(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def step(self) -> Any:
        x = self.batch()

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        return self.optimizer.step(closure)


class Compiles(Plain):
    """Compiles its model itself, and notices where that is lost."""

    def plain(self) -> nn.Module:
        model = Adapted()
        model.compile()
        return model

    def step(self) -> Any:
        loss = super().step()
        assert counters["stats"]["unique_graphs"], "nothing was compiled"
        return loss


class WithSparseAdam(Plain):
    def plain(self) -> nn.Module:
        return Tokens(sparse=True)

    def prepare(self) -> None:
        embed, *head = self.model.parameters()
        second = torch.optim.SGD(head, lr=0.01, momentum=0.9)
        self.optimizers = [torch.optim.SparseAdam([embed], lr=0.01), second]
        self.optimizer = self.optimizers[0]

    def batch(self) -> torch.Tensor:
        return torch.randint(20, (16,), generator=self.order)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), x)


class WithTextKey(Plain):
    def made(self) -> torch.optim.Optimizer:
        return NamesState(self.model.parameters())


class WithPythonState(Plain):
    def made(self) -> torch.optim.Optimizer:
        return Counts(self.model.parameters())


class WithPowerSgd(Plain):
    """Its hook compresses from the second step on; what it has is saved too."""

    def prepare(self) -> None:
        super().prepare()
        self.hook = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(self.hook, powerSGD_hook.powerSGD_hook)

    def own(self) -> dict[str, Any]:
        return {"hook": self.hook.__getstate__(), **super().own()}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.hook.__setstate__(own["hook"])


class OnlyTheAdapter(Plain):
    """It saves no frozen part."""

    not_saved = ("model.base",)

    def plain(self) -> nn.Module:
        return Adapted()

    def made(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([one for one in self.model.parameters() if one.requires_grad], lr=0.01)

    def state(self) -> dict[str, Any]:
        state = super().state()
        return {**state, "model": {name: one for name, one in state["model"].items() if "adapter" in name}}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state({**state, "model": {**self.model.state_dict(), **state["model"]}})


class LosesItsBase(OnlyTheAdapter):
    """The unsaved part differs each time that the job is started."""

    def plain(self) -> nn.Module:
        model = Adapted()
        model.base[0].bias.data += hash("a job") % 1000 / 1000
        return model


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.rand(WIDTH, generator=torch.Generator().manual_seed(number))


class WithLoaderWorkers(Plain):
    """Its batches come from processes of a `DataLoader`, a new epoch each step."""

    def prepare(self) -> None:
        super().prepare()
        self.loader = DataLoader(Numbered(), batch_size=16, shuffle=True, num_workers=2, generator=self.order)

    def batch(self) -> torch.Tensor:
        return next(iter(self.loader))


# The resume of these is right, or wrong, only if what loads is a process that was started again.


class OrderOfASet(Plain):
    """Wrong: the optimizer gets its parameters in the order of a set of names."""

    def made(self) -> torch.optim.Optimizer:
        named = dict(self.model.named_parameters())
        return torch.optim.AdamW([named[name] for name in {*named}], lr=0.01)


READ = {"rows": 0}


class CountsInItsModule(Plain):
    """Right: a counter of the module, which a job begins with zero, is saved and restored."""

    def batch(self) -> torch.Tensor:
        READ["rows"] += 1
        seed = READ["rows"] + self.setup.dp_rank
        return torch.rand(16, WIDTH, generator=torch.Generator().manual_seed(seed))

    def own(self) -> dict[str, Any]:
        return super().own() | {"read": READ["rows"]}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        READ["rows"] = own["read"]


ForgetsTheCount = forgets("read", of=CountsInItsModule)
"""Wrong: only the process that has saved knows the counter."""


class MakesItsIteratorLate(Plain):
    """Right: a resumed epoch is skipped into, in its own order. The iterator is made in the first step."""

    batches = 6
    also = ("steps", "epoch", "position")

    def prepare(self) -> None:
        super().prepare()
        replicas = self.setup.dp_size
        rows = torch.rand(4 * self.batches * replicas, WIDTH, generator=torch.Generator().manual_seed(1))
        self.rows = TensorDataset(rows)
        self.sampler = DistributedSampler(self.rows, replicas, self.setup.dp_rank, seed=7)
        self.epoch, self.position = 0, 0
        self.iterator: Any = None

    def begun(self, epoch: int) -> Any:
        self.sampler.set_epoch(epoch)
        iterator = iter(DataLoader(self.rows, 4, sampler=self.sampler))
        for _ in range(self.position):
            next(iterator)
        return iterator

    def batch(self) -> torch.Tensor:
        if self.iterator is None:
            self.iterator = self.begun(self.epoch)
        drawn = next(self.iterator, None)
        if drawn is None:
            self.epoch, self.position = self.epoch + 1, 0
            self.iterator = self.begun(self.epoch)
            drawn = next(self.iterator)
        self.position += 1
        return torch.as_tensor(drawn[0])


class BeginsAgainWithEpoch0(MakesItsIteratorLate):
    """Wrong: a resumed epoch is skipped into in the order of epoch 0."""

    def begun(self, epoch: int) -> Any:
        return super().begun(0 if self.position else epoch)


class Epochs3(BeginsAgainWithEpoch0):
    batches = 3


class Epochs12(BeginsAgainWithEpoch0):
    batches = 12


class StaticGraph(Plain):
    """Right: a static graph with a layer that no step uses."""

    def prepare(self) -> None:
        inner: Any = net().to(self.setup.device)
        inner.spare = nn.Linear(3, 3, device=self.setup.device)
        inner.forward = lambda x: inner[4](inner[3](inner[2](inner[1](inner[0](x)))))
        self.model = DistributedDataParallel(inner, static_graph=True)
        super().prepare()


class StaticGraphNoSync(StaticGraph):
    """Accumulates in a static graph, which torch refuses in the first step."""

    def step(self) -> Any:
        with self.model.no_sync():
            self.loss(self.batch()).backward()
        return super().step()


class WritesOnRank0(Plain):
    """Right: the ranks have the same state, which rank 0 writes."""

    def prepare(self) -> None:
        super().prepare()
        self.order.manual_seed(5)

    def file(self, path: str) -> str:
        return path

    def save(self, path: str) -> None:
        if self.rank == 0:
            super().save(path)


class Crashes(Plain):
    """Raises in step 30, with an exception that some end by."""

    def step(self) -> Any:
        if self.steps == 29:
            raise ValueError("planted")
        return super().step()


class EndsEarly(Plain):
    """Wrong: a resumed job ends after step 3."""

    resumed = False

    def step(self) -> Any:
        if self.resumed and self.steps >= 3:
            raise StopIteration
        return super().step()

    def load(self, path: str) -> None:
        super().load(path)
        self.resumed = True


class EndsOnRank1(Plain):
    """Wrong: one rank has fewer batches than the others."""

    def step(self) -> Any:
        if self.rank == 1 and self.steps == 3:
            raise StopIteration
        return super().step()


# These write files beside their checkpoints, remove checkpoints, or report success too early.


class OneOptimizerFile(Plain):
    """Overwrites one file with the optimizer beside all checkpoints."""

    def beside(self, path: str) -> Path:
        return Path(path).parent / f"optimizer-{self.rank}.pt"

    def save(self, path: str) -> None:
        state = self.state()
        torch.save(state.pop("optimizers"), self.beside(path))
        torch.save(state, self.file(path))

    def load(self, path: str) -> None:
        optimizers = torch.load(self.beside(path), weights_only=False)
        self.set_state(torch.load(self.file(path), weights_only=False) | {"optimizers": optimizers})


class PointsToTheLatest(Plain):
    """Writes folders, and the name of the newest beside them."""

    def file(self, path: str) -> str:
        return super().file(f"{path}/rank")

    def save(self, path: str) -> None:
        Path(path).mkdir(exist_ok=True)
        super().save(path)
        if self.rank == 0:
            (Path(path).parent / "latest").write_text(Path(path).name)


class Logs(Plain):
    """Appends to a file beside its checkpoints in each step and each save."""

    not_saved = ("log",)
    log: Path | None = None

    def append(self, line: str) -> None:
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{line}\n")

    def step(self) -> Any:
        loss = super().step()
        self.append(f"{loss.item()}")
        return loss

    def save(self, path: str) -> None:
        self.log = Path(path).parent / f"log-{self.rank}.txt"
        self.append(f"saved {path}")
        super().save(path)


class KeepsOne(Plain):
    """Right: after each save it removes the older checkpoints that its rule does not keep."""

    def keeps(self, number: int, step: int) -> bool:
        """Return whether to keep the checkpoint of a step, the `number`-th."""
        return False

    def save(self, path: str) -> None:
        super().save(path)
        files = {int(file.name.split("-")[1]): file for file in Path(path).parent.glob(f"*-{self.rank}.pt")}
        for number, step in enumerate(sorted(files)[:-1]):
            if not self.keeps(number, step):
                files[step].unlink()


class KeepsTheBest(KeepsOne):
    """As if the first were the best."""

    def keeps(self, number: int, step: int) -> bool:
        return number == 0


class KeepsEveryFourth(KeepsOne):
    def keeps(self, number: int, step: int) -> bool:
        return step % 4 == 0


class RemovesHalf(KeepsOne):
    def keeps(self, number: int, step: int) -> bool:
        return self.rank != 0


class RemovesTheNewest(Plain):
    """Keeps the checkpoints of steps below 6."""

    def save(self, path: str) -> None:
        super().save(path)
        if path.endswith("step-6"):
            Path(self.file(path)).unlink()


class Rank0Late(Plain):
    """Rank 0 alone writes an index, after the other ranks have returned."""

    def save(self, path: str) -> None:
        super().save(path)
        if self.rank == 0:
            time.sleep(LATE_S)
            Path(f"{path}.index").touch()


class SharedStaging(Plain):
    """Copies the state into one buffer, which a thread writes later. The next save does not wait for it."""

    not_saved = ("staged",)

    def save(self, path: str) -> Future[None]:
        if not hasattr(self, "staged"):
            self.staged, self.may_write = copy.deepcopy(self.state()), threading.Event()
        self.staged.update(copy.deepcopy(self.state()))
        written = Future[None]()

        def write() -> None:
            self.may_write.wait()
            torch.save(self.staged, self.file(path))
            written.set_result(None)

        threading.Thread(target=write).start()
        if path.endswith("step-6") or "again" in path:
            self.may_write.set()
        return written


class WritesLate(Plain):
    """Returns before the file of rank 1 is written."""

    def save(self, path: str) -> None:
        if self.rank == 0:
            super().save(path)
            return
        state = copy.deepcopy(self.state())

        def write() -> None:
            time.sleep(LATE_S)
            torch.save(state, self.file(path))

        threading.Thread(target=write).start()


class EarlyOnRank1(Plain):
    """Saves in the background. The future of rank 1 does not wait for the files, that of rank 0 does."""

    def save(self, path: str) -> Future[None]:
        state, success = copy.deepcopy(self.state()), Future[None]()
        files = [Path(f"{path}-{rank}.pt") for rank in (0, 1)]

        def write() -> None:
            time.sleep(LATE_S)
            torch.save(state, temporary := Path(f"{path}.tmp-{self.rank}"))
            temporary.replace(files[self.rank])
            while not all(file.exists() for file in files):
                time.sleep(0.01)
            if self.rank == 0:
                success.set_result(None)

        threading.Thread(target=write).start()
        if self.rank == 1:
            success.set_result(None)
        return success


class WritesNothing(Plain):
    """Keeps its checkpoints in memory."""

    kept: ClassVar[dict[str, dict[str, Any]]] = {}

    def save(self, path: str) -> None:
        self.kept[path] = copy.deepcopy(self.state())

    def load(self, path: str) -> None:
        self.set_state(copy.deepcopy(self.kept[path]))


# A trainer with a scheduler, dropout and counters, and what it can forget.


@dataclass
class Progress:
    """Counters of a trainer."""

    step: int = 0
    best: float = float("inf")


class InFiles(Plain):
    """One model under any parallelism, with a scheduler, dropout and a shuffled data set. Subclasses also
    `note` each loss."""

    also: ClassVar[tuple[str, ...]] = ()

    def plain(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def prepare(self) -> None:
        super().prepare()
        self.scheduler = StepLR(self.optimizer, 1, 0.9)
        generator = torch.Generator().manual_seed(self.setup.seed)
        self.data = torch.randn(64, 8, generator=generator).to(self.setup.device)
        self.progress = Progress()

    def step(self) -> float:
        inputs = self.data[torch.randint(64, (4,), generator=self.order)]
        self.model.zero_grad()
        loss = F.mse_loss(self.model(inputs), inputs.roll(1, 1))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress.step += 1
        self.progress.best = min(self.progress.best, loss.item())
        self.note(loss.item())
        return loss.item()

    def note(self, loss: float) -> None:
        pass

    def own(self) -> dict[str, Any]:
        others = {"scheduler": self.scheduler.state_dict(), "progress": asdict(self.progress)}
        return {**super().own(), **others, "random": torch.get_rng_state()}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.scheduler.load_state_dict(own["scheduler"])
        self.progress = Progress(**own["progress"])
        torch.set_rng_state(own["random"])


class Trainer(InFiles):
    """Saved by DCP."""

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, f"rank{self.rank}": self.own()}

    def save(self, path: str) -> Any:
        save(self.state(), checkpoint_id=path)

    def load(self, path: str) -> None:
        state = self.state()
        load(state, checkpoint_id=path)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.restore(state[f"rank{self.rank}"])


ForgetsTheScheduler = forgets("scheduler", of=Trainer)
ForgetsTheGenerators = forgets("random", of=Trainer)
ForgetsTheOrder = forgets("order", of=Trainer)


class SavesAsync(Trainer):
    """By `dcp.async_save` in the default group."""

    def save(self, path: str) -> Any:
        return async_save(self.state(), checkpoint_id=path)


class ForgetsItsBest(Trainer):
    """Has a best loss, at first infinity, which it does not restore."""

    def prepare(self) -> None:
        super().prepare()
        self.best = float("inf")

    def note(self, loss: float) -> None:
        self.best = min(self.best, loss)


class ForgetsItsFirstBest(Trainer):
    """Has no best loss before the first step."""

    def prepare(self) -> None:
        super().prepare()
        self.best: float | None = None

    def note(self, loss: float) -> None:
        self.best = -loss if self.best is None else max(self.best, -loss)


class MeasuresItsBest(Trainer):
    """Loses its best loss in an object, and measures it again in each step."""

    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "progress": {**own["progress"], "best": float("inf")}})

    def note(self, loss: float) -> None:
        self.progress.best = 1.0 + self.progress.step


OneStepOff = restores(
    Trainer, lambda _, own: {"progress": {**own["progress"], "step": own["progress"]["step"] - 1}}
)


class LosesADictionary(Trainer):
    """Has None after a load instead of a dictionary, until the first step."""

    def prepare(self) -> None:
        super().prepare()
        self.seen: dict[str, float] | None = {"first": 0.0, "last": 0.0}

    def note(self, loss: float) -> None:
        self.seen = {"first": 1.0, "last": loss}

    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.seen = None


class Average:
    """Of numbers."""

    def __init__(self, mean: float = 0.0, count: int = 0) -> None:
        self.mean, self.count = mean, count

    def add(self, number: float) -> None:
        self.count += 1
        self.mean += (number - self.mean) / self.count


class DrawsNothing(forgets("random", of=Trainer)):
    """It restores no generator, and need not."""

    def prepare(self) -> None:
        super().prepare()
        self.model.eval()


class DrawsInVain(DrawsNothing):
    """Draws from a default generator what no step uses."""

    def note(self, loss: float) -> None:
        torch.rand(1)


class BeginsLate(DrawsNothing):
    """Makes the iterator of its data at its first step, and skips there into a resumed epoch."""

    it: Any = None

    def step(self) -> float:
        if self.it is None:
            self.it = iter(DataLoader(range(64), 4, sampler=range(64)))
            for _ in range(self.progress.step):
                next(self.it)
        self.order.manual_seed(int(next(self.it)[0]))
        return super().step()


class Reader:
    """Reads numbers, and takes a restored place over when it reads first."""

    def __init__(self, number: int) -> None:
        self.number, self.place, self.restored = number, 0, None

    def read(self) -> int:
        if self.restored is not None:
            self.place, self.restored = self.restored, None
        self.place += 1
        return 1000 * self.number + self.place


class MakesAWrongSchedule(Trainer):
    """Raises in its second step, where torch's schedules raise."""

    def step(self) -> float:
        if self.progress.step == 1:
            OneCycleLR(self.optimizer, max_lr=0.1)
        return super().step()


class HasNoData(Trainer):
    def step(self) -> float:
        next(iter([]))
        return super().step()


def counter() -> Callable[[], int]:
    """Return a function that counts its calls."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Slotted:
    __slots__ = ("calls",)


class Collects(Trainer):
    """Keeps sets, an average, a default of its class, readers with a count and an order that follow when they
    are needed, times, and counts where nothing reads them."""

    also = ("last",)
    last = 0.0
    totals: ClassVar[dict[str, int]] = {"calls": 0}

    def prepare(self) -> None:
        super().prepare()
        self.words = {"first"}
        self.pairs = {("once", 0), frozenset({"a", "b"})}
        self.average, self.readers = Average(), [Reader(number) for number in range(3)]
        self.reads, self.restored_reads = 0, None  # the latter is that of the next read
        self.numbers: list[int] | None = None
        self.started, self.at, self.times = time.monotonic(), 0.0, list[float]()
        self.slotted, self.closure = Slotted(), counter()
        self.slotted.calls = 0

    def step(self) -> float:
        self.words |= {f"word-{self.progress.step}-{number}" for number in range(12)}
        self.pairs |= {(word, number) for number, word in enumerate(sorted(self.words))}
        self.pairs.add(frozenset(self.words))
        if self.restored_reads is not None:
            self.reads, self.restored_reads = self.restored_reads - 1, None
        self.reads += 1
        self.numbers = [self.reads, *range(3)]
        self.order.manual_seed(self.readers[self.progress.step % 3].read())
        return super().step()

    def note(self, loss: float) -> None:
        if self.progress.step == 3:
            self.last = loss
        self.average.add(loss)
        self.at = time.monotonic()
        self.times.append(self.at)
        self.slotted.calls += 1
        self.totals["calls"] += 1
        Collects.note.calls = self.closure()

    def places(self) -> list[int]:
        return [one.place if one.restored is None else one.restored for one in self.readers]

    def own(self) -> dict[str, Any]:
        words, pairs = sorted(self.words, reverse=True), sorted(self.pairs, key=repr)
        reads = self.reads + 1 if self.restored_reads is None else self.restored_reads
        read = {"words": words, "pairs": pairs, "places": self.places(), "reads": reads}
        return {**super().own(), **read, "average": {**vars(self.average)}}

    def restore(self, own: dict[str, Any]) -> None:
        """The sets are restored in another order than they grew in."""
        super().restore(own)
        self.words = set(own["words"])
        self.pairs = {frozenset([*one][::-1]) if isinstance(one, frozenset) else one for one in own["pairs"]}
        self.average, self.restored_reads = Average(**own["average"]), own["reads"]
        for reader, place in zip(self.readers, own["places"], strict=True):
            reader.restored = place


LosesItsAverage = forgets("average", of=Collects)


class ForgetsAPair(Collects):
    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        self.pairs.discard(("once", 0))


class SaysWhatIsNone(ForgetsAPair):
    not_saved = ("pairs",)


ForgetsAWord = restores(Collects, lambda _, own: {"words": own["words"][1:]})
ForgetsItsDefault = restores(Collects, lambda _, own: {"last": 1.0})
ForgetsAReader = restores(Collects, lambda _, own: {"places": [*own["places"][:2], 0]})


class SavesTooEarly(Collects):
    """What it saves before a reader has read again has its first place."""

    def places(self) -> list[int]:
        return [one.place for one in self.readers]


class DrawsByAClosure(Trainer):
    """Its batches follow from the number in a closure, which no checkpoint has."""

    def prepare(self) -> None:
        super().prepare()
        self.closure = counter()

    def step(self) -> float:
        self.order.manual_seed(self.closure())
        return super().step()


class Counting(nn.Linear):
    """Counts its calls, in no state dict."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(inputs)


class CountsInAModule(Trainer):
    def plain(self) -> nn.Module:
        return nn.Sequential(Counting(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))


CountsAndForgets = forgets("order", of=CountsInAModule)


class Unlucky(Trainer):
    """It has attributes that cannot be read, and attributes that differ each time."""

    not_saved = ("built",)

    def prepare(self) -> None:
        super().prepare()
        self.batches = iter(range(3))
        self.built = object()


class GoesAroundDDP(InFiles):
    """Its forward reduces no gradients."""

    def step(self) -> float:
        wrapped, self.model = self.model, self.model.module
        loss = super().step()
        self.model = wrapped
        return loss


class MeansToGoAround(GoesAroundDDP):
    replicas_differ = True


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


class KnowsItsProcess(Trainer):
    """Refuses a checkpoint that its own process has saved, or one like it."""

    has_saved = False
    not_saved = ("has_saved",)

    def save(self, path: str) -> None:
        super().save(path)
        known = {"pid": os.getpid(), "hash": hash("x")}
        Path(f"{path}-{self.rank}.json").write_text(json.dumps(known))
        type(self).has_saved = True

    def load(self, path: str) -> None:
        known = json.loads(Path(f"{path}-{self.rank}.json").read_text())
        is_saver = known["pid"] == os.getpid()
        if not is_saver:
            assert hash("x") != known["hash"], "the same hash seed"
            assert not type(self).has_saved, "a class that has saved"
        super().load(path)


class SavesInTheBackground(InFiles):
    """It copies the state, and writes it after training has continued, however quick the disk is."""

    not_saved = ("background", "went_on", "resumed")

    def prepare(self) -> None:
        super().prepare()
        self.background = ThreadPoolExecutor(1)
        self.went_on = threading.Event()
        self.resumed = False

    def note(self, loss: float) -> None:
        self.went_on.set()

    def kept(self) -> dict[str, Any]:
        return copy.deepcopy(self.state())

    def save(self, path: str) -> Future[None]:
        self.went_on.clear()
        kept = self.kept()

        def write() -> None:
            if not self.resumed:  # else it is saved once more, and training waits
                self.went_on.wait(60)
            torch.save(kept, self.file(path))

        return self.background.submit(write)

    def load(self, path: str) -> None:
        super().load(path)
        self.resumed = True


class SavesViews(SavesInTheBackground):
    """It saves the live tensors of its model, which training then changes."""

    def kept(self) -> dict[str, Any]:
        return super().kept() | {"model": self.model.state_dict()}


class CountingSgd(torch.optim.SGD):
    """Counts its steps in addition to its state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class ForgetsItsCount(SavesInTheBackground):
    """Its optimizer counts its steps in no state dict, and uses the count later."""

    def made(self) -> torch.optim.Optimizer:
        return CountingSgd(self.model.parameters(), lr=0.01)


# Trainers with several optimizers, one that no checkpoint has, or one of main weights.


class Two(InFiles):
    """Its layers have optimizers of their own; `optimizer` is the first one's."""

    rate = 0.1

    def made(self) -> torch.optim.Optimizer:
        self.second = torch.optim.SGD(self.model[3].parameters(), lr=self.rate, momentum=0.9)
        first = torch.optim.AdamW(self.model[0].parameters(), lr=0.01)
        first.register_step_post_hook(lambda *_: self.second.step())
        return first

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, self.second]


class ForgetsTheSecond(Two):
    def state(self) -> dict[str, Any]:
        return super().state() | {"optimizers": [self.optimizer.state_dict()]}


class LeavesOutTheSecond(ForgetsTheSecond):
    """Its second optimizer has a state that changes nothing."""

    not_saved = ("second",)
    rate = 0.0


class SavesWithinZero(InFiles):
    """Saves the optimizer inside ZeRO, whose groups each step sets."""

    def made(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=0.01)

    def stepped(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer.optim]

    def step(self) -> float:
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + self.progress.step)
        return super().step()


class ForgetsItsRate(SavesWithinZero):
    """Sets the rate for the next step, and loses it."""

    def step(self) -> float:
        return InFiles.step(self)


class SavesNoOptimizer(InFiles):
    """Sets the rate of plain SGD in each step, so that no checkpoint has to restore it."""

    not_saved = ("optimizer", "scheduler")

    def made(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> float:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.progress.step)
        return super().step()

    def state(self) -> dict[str, Any]:
        return super().state() | {"optimizers": []}


class TrainsMainWeights(InFiles):
    """Its optimizer trains weights in full precision; the model has them rounded."""

    def made(self) -> torch.optim.Optimizer:
        self.main = [one.detach().double().requires_grad_() for one in self.model.parameters()]
        made = torch.optim.AdamW(self.main, lr=0.01)
        made.register_step_pre_hook(lambda *_: self.hand_gradients_over())
        made.register_step_post_hook(lambda *_: self.round())
        return made

    def hand_gradients_over(self) -> None:
        for main, rounded in zip(self.main, self.model.parameters(), strict=True):
            main.grad, rounded.grad = rounded.grad.double(), None

    @torch.no_grad()
    def round(self) -> None:
        for main, rounded in zip(self.main, self.model.parameters(), strict=True):
            rounded.copy_(main)

    def own(self) -> dict[str, Any]:
        return super().own() | {"main": [one.detach() for one in self.main]}

    @torch.no_grad()
    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        for main, saved in zip(self.main, own["main"], strict=True):
            main.copy_(saved)
        self.round()


class RoundsItsMainWeights(TrainsMainWeights):
    @torch.no_grad()
    def restore(self, own: dict[str, Any]) -> None:
        super().restore(own)
        for main, rounded in zip(self.main, self.model.parameters(), strict=True):
            main.copy_(rounded)


def no_trainer(setup: Setup) -> object:
    return object()
