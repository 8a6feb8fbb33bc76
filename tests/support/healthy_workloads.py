"""Healthy workloads whose state is unlike that of any group in `conf/`."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CyclicLR
from torch.testing._internal.two_tensor import TwoTensor

from dcpbench.state.snapshot import local_part
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
        "compute_dtypes": torch.bfloat16,
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


def repeated_rows() -> Workload:
    """Sparse gradients that have each row many times, in an order that ranks sum differently."""

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(3, (800,), generator=generator), torch.randn(800, 20, generator=generator)

    def loss(model: nn.Module, share: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(share[0]), share[1])

    return Workload(Tokens(sparse=True), batch, loss, lambda model: torch.optim.SGD(model.parameters(), 0.1))


def composite_state() -> Workload:
    """An optimizer whose moments are of a subclass of tensors."""

    class Moments(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                moment = torch.zeros_like(parameter)
                self.state[parameter]["moment"] = TwoTensor(moment, moment.clone())

    return of_net(optimizer=lambda model: Moments(model.parameters(), 0.1))


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
