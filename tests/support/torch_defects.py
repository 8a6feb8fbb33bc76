"""Workloads that meet a known defect of torch, and some with another error beside it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import MultiStepLR

from dcpbench.workloads.workload import Workload
from support.ordinary_state import Normed
from support.ordinary_workloads import (
    WIDTH,
    RaisesOnceLoaded,
    inputs,
    net,
    reversed_loss,
    wrongly_loaded,
)


class Weights:
    """Weights of classes by their numbers, which training changes, and the number of its calls."""

    def __init__(self) -> None:
        self.by_class, self.calls = {0: {"weight": 1.0}, 7: {"weight": 2.0}}, 0

    def next(self) -> float:
        self.calls += 1
        self.by_class[7]["weight"] += 0.5
        return self.by_class[7]["weight"]

    def state_dict(self) -> dict[str, Any]:
        return {"by_class": self.by_class, "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.by_class, self.calls = state_dict["by_class"], state_dict["calls"]


def integer_keys() -> Workload:
    """Keys of a saved object are integers."""
    weights = Weights()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return reversed_loss(model, x) * weights.next()

    return Workload(net(), inputs, loss, state={"weights": weights})


class Numbered(nn.Module):
    """Extra state with integer keys."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = net(), {1: 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[1] += self.training
        return self.net(x) * (1 + 0.1 * self.seen[1])

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def integer_keys_in_extra_state() -> Workload:
    return Workload(Numbered(), inputs, reversed_loss)


def multi_step_and_buffers() -> Workload:
    """Two known failures at once."""

    def scheduler(optimizer: torch.optim.Optimizer) -> MultiStepLR:
        return MultiStepLR(optimizer, [3, 5])

    return Workload(Normed(), inputs, reversed_loss, scheduler=scheduler)


class Experts(nn.Module):
    """Each rank numbers its own expert 0, and DDP ignores it."""

    why_no_twin = "each rank has an expert of its own"

    def __init__(self) -> None:
        super().__init__()
        self.net, self.local = net(), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self._ddp_params_and_buffers_to_ignore = [
            f"local.{name}" for name, _ in self.local.named_parameters()
        ]
        generator = torch.Generator().manual_seed(torch.initial_seed() + 1 + dist.get_rank())
        with torch.no_grad():
            for parameter in self.local.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(F.gelu(self.local[0](x)))


def own_experts() -> Workload:
    return Workload(Experts(), inputs, reversed_loss)


def empty_group() -> Workload:
    """A group for frozen parameters, of which there are none."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [], "lr": 0.3}, {"params": [*model.parameters()]}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    return Workload(net(), inputs, reversed_loss, optimizer)


def empty_group_and_wrong_rate() -> Workload:
    """Its load changes the learning rate of the other group."""
    made = empty_group()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        one: Any = made.optimizer(model)
        one.register_load_state_dict_post_hook(lambda sgd: sgd.param_groups[1].update(lr=0.02))
        return one

    return replace(made, optimizer=optimizer)


def key_error_once_loaded() -> Workload:
    """Raises as torch does for an empty group, and `index_error_in_the_load` too."""
    return Workload(RaisesOnceLoaded(KeyError("betas")), inputs, reversed_loss)


def index_error_in_the_load() -> Workload:
    raised = RaisesOnceLoaded(IndexError("list index out of range"), in_load=True)
    return Workload(raised, inputs, reversed_loss)


class TwoRates(torch.optim.Optimizer):
    """Steps by a gradient and by its mean, at rates in a tuple."""

    def __init__(self, params: Iterable[Any], rates: tuple[float, float] = (0.01, 0.001)) -> None:
        super().__init__(params, {"rates": rates, "scale": 1.0, "lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_size, by_sign = group["rates"]
            for value in group["params"]:
                mean = self.state[value].setdefault("mean", torch.zeros_like(value)).lerp_(value.grad, 0.1)
                value.sub_(group["scale"] * (by_size * value.grad + by_sign * mean))


def tuples(scale: float = 1.0) -> Workload:
    """A load sets another hyperparameter to `scale`."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = TwoRates(model.parameters())
        made.register_load_state_dict_post_hook(lambda one: one.param_groups[0].update(scale=scale))
        return made

    return Workload(net(), inputs, reversed_loss, optimizer)


def tuples_and_wrong_scale() -> Workload:
    return tuples(scale=2.0)


def weights_and_biases() -> Workload:
    """Two optimizers have parts of each layer."""

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        named = dict(model.named_parameters())
        weights = [value for name, value in named.items() if name.endswith("weight")]
        biases = [value for name, value in named.items() if name.endswith("bias")]
        return [torch.optim.AdamW(weights), torch.optim.SGD(biases, 0.01, momentum=0.9)]

    return Workload(net(), inputs, reversed_loss, optimizers)


def weights_and_biases_and_other_error() -> Workload:
    """Saving one of its optimizers raises another error of the same class."""
    made = weights_and_biases()

    def refuse(_: torch.optim.Optimizer) -> None:
        raise RuntimeError("0.bias is not in the optimizer state.")

    def optimizers(model: nn.Module) -> Any:
        several: Any = made.optimizer(model)
        several[0].register_state_dict_pre_hook(refuse)
        return several

    return replace(made, optimizer=optimizers)


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    return (slope.norm(dim=1) - 1).square().mean()


def penalty_before_score(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return penalty(model, x) + reversed_loss(model, x)


def penalized() -> Workload:
    return Workload(net(), inputs, penalty_before_score)


def penalized_sometimes(wrong: bool = False) -> Workload:
    """Every fourth step has a penalty; if `wrong`, a wrapped model has other gradients two steps later."""

    def batch(generator: torch.Generator) -> torch.Tensor:
        x = inputs(generator)
        x[:, 0] = generator.initial_seed() % 4
        return x

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        number = round(float(x[0, 0]))
        right = penalty_before_score(model, x) if number == 0 else reversed_loss(model, x)
        if not wrong or type(model) is nn.Sequential or number != 2:
            return right
        out = model(x).sum()
        return right + 0.01 * (out - out.detach())

    return Workload(net(), batch, loss)


def penalized_and_wrong_later() -> Workload:
    return penalized_sometimes(wrong=True)


def wrong_load_before_a_penalty() -> Workload:
    """Has a load that changes a parameter; only later steps have a penalty, after the score."""

    class Loaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.is_loaded = net(), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    def wrong(module: Any) -> None:
        module.is_loaded = True
        module.net[0].bias += 1

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        score = reversed_loss(model, x)
        return score + penalty(model, x) if model.is_loaded else score

    return Workload(wrongly_loaded(Loaded(), wrong), inputs, loss)
