"""Trainers whose resume is right, or wrong, only if what loads is a process that was started again."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dcpbench.runs.own_trainer import Setup


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))


class Resumes:
    """Right."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(setup.seed)
        self.rank, self.replicas, self.replica = setup.rank, setup.dp_size, setup.dp_rank
        self.device = setup.device
        self.model: nn.Module = setup.wrap(net())
        self.order = torch.Generator().manual_seed(setup.seed + setup.dp_rank)
        self.steps = 0
        self.prepare()

    def prepare(self) -> None:
        self.optimizer = torch.optim.AdamW(self.trained(), lr=0.01)

    def trained(self) -> list[nn.Parameter]:
        return [*self.model.parameters()]

    def batch(self) -> torch.Tensor:
        return torch.rand(16, 8, generator=self.order)

    def loss(self) -> torch.Tensor:
        x = self.batch().to(self.device)
        return F.mse_loss(self.model(x), x.flip(1))

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.detach()

    def state(self) -> dict[str, Any]:
        both = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return both | {"order": self.order.get_state(), "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])
        self.steps = state["steps"]

    def save(self, path: str) -> None:
        torch.save(self.state(), f"{path}-{self.rank}.pt")

    def load(self, path: str) -> None:
        self.restore(torch.load(f"{path}-{self.rank}.pt"))


class OrderOfASet(Resumes):
    """Wrong: the optimizer gets its parameters in the order of a set of names."""

    def trained(self) -> list[nn.Parameter]:
        return [
            dict(self.model.named_parameters())[name]
            for name in {n for n, _ in self.model.named_parameters()}
        ]


READ = {"rows": 0}


class CountsInItsModule(Resumes):
    """Right: a counter of the module, which a job begins with zero, is saved and restored."""

    def batch(self) -> torch.Tensor:
        READ["rows"] += 1
        return torch.rand(16, 8, generator=torch.Generator().manual_seed(READ["rows"] + self.replica))

    def state(self) -> dict[str, Any]:
        return super().state() | {"read": READ["rows"]}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        READ["rows"] = state["read"]


class ForgetsTheCount(CountsInItsModule):
    """Wrong: only the process that has saved knows the counter."""

    def restore(self, state: dict[str, Any]) -> None:
        Resumes.restore(self, state)


class MakesItsIteratorLate(Resumes):
    """Right: a resumed epoch is skipped into, in its own order. The iterator is made in the first step."""

    batches = 6

    def prepare(self) -> None:
        super().prepare()
        count = 4 * self.batches * self.replicas
        self.rows = TensorDataset(torch.rand(count, 8, generator=torch.Generator().manual_seed(1)))
        self.sampler = DistributedSampler(self.rows, self.replicas, self.replica, seed=7)
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

    def state(self) -> dict[str, Any]:
        return super().state() | {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.epoch, self.position = state["epoch"], state["position"]


class BeginsAgainWithEpoch0(MakesItsIteratorLate):
    """Wrong: a resumed epoch is skipped into in the order of epoch 0."""

    def begun(self, epoch: int) -> Any:
        return super().begun(0 if self.position else epoch)


class Epochs3(BeginsAgainWithEpoch0):
    batches = 3


class Epochs9(BeginsAgainWithEpoch0):
    batches = 9


class Epochs12(BeginsAgainWithEpoch0):
    batches = 12


class StaticGraph(Resumes):
    """Right: a static graph with a layer that no step uses."""

    def prepare(self) -> None:
        inner = net().to(self.device)
        inner.spare = nn.Linear(3, 3, device=self.device)
        inner.forward = lambda x: inner[4](inner[3](inner[2](inner[1](inner[0](x)))))
        self.model = DistributedDataParallel(inner, static_graph=True)
        super().prepare()


class StaticGraphNoSync(StaticGraph):
    """Accumulates in a static graph, which torch refuses in the first step."""

    def step(self) -> torch.Tensor:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            self.loss().backward()
        return super().step()


class RemovesSome(Resumes):
    """Right: it keeps the newest checkpoint, and those that its rule keeps."""

    def keeps(self, number: int, step: int) -> bool:
        """Return whether to keep the checkpoint of a step, the `number`-th."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        super().save(path)
        files = {int(file.name.split("-")[1]): file for file in Path(path).parent.glob(f"*-{self.rank}.pt")}
        for number, step in enumerate(sorted(files)[:-1]):
            if not self.keeps(number, step):
                files[step].unlink()


class KeepsTheBest(RemovesSome):
    """As if the first were the best."""

    def keeps(self, number: int, step: int) -> bool:
        return number == 0


class KeepsEveryFourth(RemovesSome):
    def keeps(self, number: int, step: int) -> bool:
        return step % 4 == 0


class WritesOnRank0(Resumes):
    """Right: the ranks have the same state, which rank 0 writes."""

    def prepare(self) -> None:
        super().prepare()
        self.order.manual_seed(5)

    def save(self, path: str) -> None:
        if self.rank == 0:
            torch.save(self.state(), path)

    def load(self, path: str) -> None:
        self.restore(torch.load(path))


class Crashes(Resumes):
    """Raises in step 30, with an exception that some end by."""

    def step(self) -> torch.Tensor:
        if self.steps == 29:
            raise ValueError("planted")
        return super().step()


class EndsEarly(Resumes):
    """Wrong: a resumed job ends after step 3."""

    resumed = False

    def step(self) -> torch.Tensor:
        if self.resumed and self.steps >= 3:
            raise StopIteration
        return super().step()

    def load(self, path: str) -> None:
        super().load(path)
        self.resumed = True


class EndsOnRank1(Resumes):
    """Wrong: one rank has fewer batches than the others."""

    def step(self) -> torch.Tensor:
        if self.rank == 1 and self.steps == 3:
            raise StopIteration
        return super().step()
