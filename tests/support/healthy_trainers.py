"""Healthy trainers whose state is unlike that of any group in `conf/`, and one that loses some of it."""

from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from dcpbench.runs.own_trainer import Setup
from support.healthy_workloads import WIDTH, Adapted, Counts, NamesState, Tokens, net, pairs, squared


class Trainer:
    """Saves and loads everything, each rank separately."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(setup.seed)
        self.rank = setup.rank
        self.model = setup.wrap(self.plain())
        self.optimizer = self.made()
        self.order = torch.Generator().manual_seed(setup.seed + setup.dp_rank)

    def plain(self) -> nn.Module:
        return net()

    def made(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)

    def loss(self) -> torch.Tensor:
        return squared(self.model, pairs(self.order))

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **self.own()}

    def own(self) -> dict[str, Any]:
        return {"order": self.order.get_state()}

    def save(self, path: str) -> Any:
        torch.save(self.state(), f"{path}-{self.rank}.pt")

    def load(self, path: str) -> None:
        self.restore(torch.load(f"{path}-{self.rank}.pt", weights_only=False))

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])


class WithLbfgs(Trainer):
    def made(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def step(self) -> torch.Tensor:
        inputs, targets = pairs(self.order)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = squared(self.model, (inputs, targets))
            loss.backward()
            return loss

        return self.optimizer.step(closure)


class Compiles(Trainer):
    """Compiles its model itself, and notices where that is lost."""

    def plain(self) -> nn.Module:
        model = Adapted()
        model.compile()
        return model

    def step(self) -> torch.Tensor:
        loss = super().step()
        assert counters["stats"]["unique_graphs"], "nothing was compiled"
        return loss


class WithSparseAdam(Trainer):
    def plain(self) -> nn.Module:
        return Tokens(sparse=True)

    def made(self) -> torch.optim.Optimizer:
        embed, *head = self.model.parameters()
        self.second = torch.optim.SGD(head, lr=0.01, momentum=0.9)
        return torch.optim.SparseAdam([embed], lr=0.01)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, self.second]

    def loss(self) -> torch.Tensor:
        ids = torch.randint(20, (16,), generator=self.order)
        return F.cross_entropy(self.model(ids), ids)

    def step(self) -> torch.Tensor:
        loss = super().step()
        self.second.step()
        self.second.zero_grad()
        return loss

    def own(self) -> dict[str, Any]:
        return {"second": self.second.state_dict(), **super().own()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.second.load_state_dict(state["second"])


class WithTextKey(Trainer):
    def made(self) -> torch.optim.Optimizer:
        return NamesState(self.model.parameters())


class WithPythonState(Trainer):
    def made(self) -> torch.optim.Optimizer:
        return Counts(self.model.parameters())


class WithPowerSgd(Trainer):
    """Its hook compresses from the second step on; what it has is saved too."""

    def made(self) -> torch.optim.Optimizer:
        self.hook = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(self.hook, powerSGD_hook.powerSGD_hook)
        return super().made()

    def own(self) -> dict[str, Any]:
        return {"hook": self.hook.__getstate__(), **super().own()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.hook.__setstate__(state["hook"])


class OnlyTheAdapter(Trainer):
    """It saves no frozen part."""

    not_saved = ("model.base",)

    def plain(self) -> nn.Module:
        return Adapted()

    def made(self) -> torch.optim.Optimizer:
        trained = [one for one in self.model.parameters() if one.requires_grad]
        return torch.optim.Adam(trained, lr=0.01)

    def state(self) -> dict[str, Any]:
        state = super().state()
        return {**state, "model": {name: one for name, one in state["model"].items() if "adapter" in name}}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore({**state, "model": {**self.model.state_dict(), **state["model"]}})


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


class WithLoaderWorkers(Trainer):
    """Its batches come from processes of a `DataLoader`, a new epoch each step."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.loader = torch.utils.data.DataLoader(
            Numbered(), batch_size=16, shuffle=True, num_workers=2, generator=self.order
        )

    def loss(self) -> torch.Tensor:
        inputs = next(iter(self.loader))
        return squared(self.model, (inputs, 1 + inputs.flip(1)))


class SavesAsync(Trainer):
    """By `dcp.async_save` in the default group."""

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, f"rank{self.rank}": self.own()}

    def save(self, path: str) -> Any:
        return async_save(self.state(), checkpoint_id=path)

    def load(self, path: str) -> None:
        state = self.state()
        load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.order.set_state(state[f"rank{self.rank}"]["order"])
