"""Healthy workloads and trainers whose state is unlike that of any group in `conf/`."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CyclicLR

from dcpbench.verify.snapshot import local_part
from dcpbench.workloads.own_trainer import Setup
from dcpbench.workloads.workload import Workload

WIDTH = 8


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def pairs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.rand(16, WIDTH, generator=generator)
    return inputs, 1 + inputs.flip(1)


def squared(model: nn.Module, share: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(share[0]), share[1])


def of_net(**parts: Any) -> Workload:
    return Workload(**{"model": net(), "batch": pairs, "loss": squared, "optimizer": sgd, **parts})


def clipped() -> Workload:
    """Accumulates gradients that are larger than their norm may be; its layers have names, for a TP plan."""
    layers = {"up": nn.Linear(WIDTH, 2 * WIDTH), "tanh": nn.Tanh(), "down": nn.Linear(2 * WIDTH, WIDTH)}
    return of_net(model=nn.Sequential(OrderedDict(layers)), clip_grad_norm=0.1, accumulate=2)


def clips_its_part() -> Workload:
    """Clips by the norm of this rank's part of the gradients."""

    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        local = [local_part(one.grad) for group in optimizer.param_groups for one in group["params"]]
        norm = torch.nn.utils.get_total_norm(local)
        for one in local:
            one.mul_(0.1 / norm)

    def clipping(model: nn.Module) -> torch.optim.Optimizer:
        made = sgd(model)
        made.register_step_pre_hook(clip)
        return made

    return of_net(optimizer=clipping)


def compressing(hook: Callable[..., Any], state: object = None) -> Workload:
    """A net under DDP with a communication hook. Its steps are small: its rounding is not an error."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if isinstance(model, DistributedDataParallel):  # not its twin
            model.register_comm_hook(state, hook)
        return torch.optim.SGD(model.parameters(), lr=1e-4)

    return of_net(optimizer=optimizer)


def allreduce_hook() -> Workload:
    return compressing(default_hooks.allreduce_hook)


def fp16_hook() -> Workload:
    return compressing(default_hooks.fp16_compress_hook)


def bf16_hook() -> Workload:
    """By another name: on CPUs torch refuses it by its own."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)

    return compressing(hook)


def power_sgd_hook() -> Workload:
    """It begins to compress after the last step: a `Workload` cannot save what it has then."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1000)
    return compressing(powerSGD_hook.powerSGD_hook, state)


class Plain(torch.optim.Optimizer):
    """Steps by gradients alone; keeps what `remember` has it keep."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.01, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    def remember(self, parameter: nn.Parameter, state: dict[str, Any]) -> float:
        """Change this parameter's state; how large a step it takes, as a part of the rate."""
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = self.remember(parameter, self.state[parameter])
                    parameter.add_(parameter.grad, alpha=-group["lr"] * part)


class Counts(Plain):
    """Its state is Python's: an int, a float, a flag, None, a list and a tuple."""

    def remember(self, parameter: nn.Parameter, state: dict[str, Any]) -> float:
        state["step"] = state.get("step", 0) + 1
        state["decay"] = state.get("decay", 1.0) * 0.75
        state["warm"] = not state.get("warm", False)
        state["never"] = None
        state["last"] = [*state.get("last", [0.0, 0.0]), 1.0 / state["step"]][-2:]
        state["seen"] = (state["step"], state["warm"])
        return float(state["decay"]) * (1.0 if state["warm"] else 0.5)


class Nests(Plain):
    """Its state has dictionaries in it, of tensors and of numbers."""

    def remember(self, parameter: nn.Parameter, state: dict[str, Any]) -> float:
        inner = state.setdefault("inner", {"count": 0, "mean": torch.zeros_like(parameter)})
        inner["count"] += 1
        inner["mean"].lerp_(parameter.grad, 0.5)
        return 1.0 / inner["count"]


class NamesState(Plain):
    """A part of its state belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["global"] = {"steps": self.state.get("global", {"steps": 0})["steps"] + 1}


def python_state() -> Workload:
    return of_net(optimizer=lambda model: Counts(model.parameters()))


def nested_state() -> Workload:
    return of_net(optimizer=lambda model: Nests(model.parameters()))


def text_key() -> Workload:
    return of_net(optimizer=lambda model: NamesState(model.parameters()))


def dtype_and_function() -> Workload:
    """Among its hyperparameters."""
    options = {
        "computes_in": torch.bfloat16,
        "rule": math.sqrt,
        "norm": F.layer_norm,
        "on": torch.device("cpu"),
    }
    return of_net(optimizer=lambda model: Plain(model.parameters(), **options))


class Handle:
    """It has neither an equality nor attributes."""

    __slots__ = ()


def opaque() -> Workload:
    """A hyperparameter whose restoration nothing can verify."""
    return of_net(optimizer=lambda model: Plain(model.parameters(), handle=Handle()))


def autocast() -> Workload:
    def loss(model: nn.Module, share: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(share[0].device.type, torch.bfloat16):
            output = model(share[0])
        return F.mse_loss(output.float(), share[1])

    return of_net(loss=loss, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4))


class Tokens(nn.Module):
    """An embedding whose gradients may be sparse, and its head."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def of_tokens(optimizer: Callable[[nn.Module], Any]) -> Workload:
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(20, (16,), generator=generator)

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids), ids)

    return Workload(Tokens(sparse=True), batch, loss, optimizer)


def sparse_gradients() -> Workload:
    return of_tokens(lambda model: torch.optim.SGD(model.parameters(), lr=0.01))


def sparse_adam() -> Workload:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        embed, *head = model.parameters()
        return [torch.optim.SparseAdam([embed], lr=0.01), torch.optim.SGD(head, lr=0.01)]

    return of_tokens(optimizers)


class Turned(nn.Module):
    """A complex parameter between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out((self.into(inputs).to(torch.complex64) @ self.turn).real)


def complex_parameter() -> Workload:
    return of_net(model=Turned())


class HasNothing(nn.Module):
    """A parameter without elements in addition to those of a net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.prompt = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([inputs, self.prompt]))


def empty_parameter() -> Workload:
    return of_net(model=HasNothing())


def empty_parameter_adam() -> Workload:
    return of_net(model=HasNothing(), optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-5))


def last_layer_only() -> Workload:
    """Its optimizer has a part of the parameters; the others get unused gradients."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters()][2:], lr=0.01, momentum=0.9)

    return of_net(optimizer=optimizer)


class Adapted(nn.Module):
    """A net that is frozen and always the same, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.base = net().requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.adapter(inputs)


def adapter() -> Workload:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [one for one in model.parameters() if one.requires_grad], lr=0.01, momentum=0.9
        )

    return of_net(model=Adapted(), optimizer=optimizer)


def cyclic(optimizer: torch.optim.Optimizer, **options: Any) -> CyclicLR:
    return CyclicLR(optimizer, 0.001, 0.01, step_size_up=3, **options)


def cyclic_lr() -> Workload:
    return of_net(scheduler=cyclic)


def cyclic_lr_function() -> Workload:
    return of_net(scheduler=partial(cyclic, scale_fn=lambda turn: 0.5**turn, scale_mode="cycle"))


class Falling:
    """A scale that is an object, whose attributes `CyclicLR` saves."""

    def __init__(self) -> None:
        self.base, self.floor = 0.5, None

    def __call__(self, turn: float) -> float:
        return self.base**turn


def cyclic_lr_object() -> Workload:
    return of_net(scheduler=partial(cyclic, scale_fn=Falling(), scale_mode="cycle"))


def cyclic_lr_exponential() -> Workload:
    return of_net(scheduler=partial(cyclic, mode="exp_range", gamma=0.9))


class Masks(nn.Module):
    """Two layers that share a buffer of flags."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        mask = torch.arange(WIDTH) % 3 > 0
        for layer in (self.first, self.second):
            layer.register_buffer("mask", mask)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            inputs = layer(inputs) * layer.mask
        return inputs


def shared_flags() -> Workload:
    return of_net(model=Masks())


def lbfgs() -> Workload:
    return of_net(optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.01))


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
    """The unsaved part differs each time it is built."""

    built = itertools.count()

    def plain(self) -> nn.Module:
        model = Adapted()
        model.base[0].bias.data += next(self.built)
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
