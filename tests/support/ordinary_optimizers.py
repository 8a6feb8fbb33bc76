"""Workloads whose optimizer has state, groups or rates as people have them, or loses some of it in a load."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dcpbench.workloads.workload import Workload, adam
from support.ordinary_workloads import WIDTH, inputs, net, reversed_loss


def named_parameters() -> Workload:
    return Workload(
        net(), inputs, reversed_loss, lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.01)
    )


def groups_by_name() -> Workload:
    """Groups whose parameters are chosen by their names in the plain model, as timm does."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            groups[name in ("0.bias", "2.bias")].append((name, parameter))
        assert len(groups[True]) == len(groups[False]) == 2
        decays = [{"params": groups[True], "weight_decay": 0.0}, {"params": groups[False]}]
        return torch.optim.AdamW(decays, lr=0.01, weight_decay=0.1)

    return Workload(net(), inputs, reversed_loss, optimizer)


def in_backward() -> Workload:
    """One Adam for each parameter, which steps as soon as its gradient is computed, and frees it."""

    def optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
        each = {value: torch.optim.Adam([value]) for value in model.parameters()}

        def step(value: torch.Tensor) -> None:
            each[value].step()  # type: ignore[index]
            each[value].zero_grad()  # type: ignore[index]

        for value in each:
            value.register_post_accumulate_grad_hook(step)
        return [*each.values()]

    return Workload(net(), inputs, reversed_loss, optimizer)


class LowStateAdam(torch.optim.Optimizer):
    """Adam whose moments are bfloat16 beside float32 parameters. Torch's load makes them float32."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(value, dtype=torch.bfloat16)
                state["step"] += 1
                moment = state["exp_avg"].float().lerp(value.grad, 0.1)
                value.sub_(group["lr"] * moment / (1 - 0.9 ** state["step"].item()))
                state["exp_avg"] = moment.to(state["exp_avg"].dtype)


class MasterSgd(torch.optim.Optimizer):
    """SGD on full-precision copies of bfloat16 parameters, in an attribute that no state dict has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        trained = (value for group in self.param_groups for value in group["params"])
        self.masters = {value: value.detach().float().clone() for value in trained}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                self.masters[value].sub_(group["lr"] * value.grad.float())
                value.copy_(self.masters[value])


def low_state() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: LowStateAdam(model.parameters()))


def masters() -> Workload:
    return Workload(
        net().bfloat16(),
        lambda g: inputs(g).bfloat16(),
        reversed_loss,
        lambda model: MasterSgd(model.parameters()),
    )


def adafactor() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01))


def unused_parameters(optimizer: Callable[[nn.Module], Any] = adam) -> Workload:
    """A layer that no step uses: DDP refuses it unless it searches for such parameters."""
    model = nn.ModuleDict({"used": net(), "unused": net()})

    class OneOfTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["used"](x)

    return Workload(OneOfTwo(), inputs, reversed_loss, optimizer)


class UsesByRank(nn.Module):
    """The first rank uses a layer that the others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.of_first = net(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        return x if dist.get_rank() else self.of_first(x)


def unused_on_one_rank() -> Workload:
    """The schedule needs the mean loss of all ranks, while the first one still waits for gradients of others:
    without a check of DDP's reduction the process is aborted."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    return Workload(UsesByRank(), inputs, reversed_loss, optimizer, ReduceLROnPlateau)


def unused_and_unsaved_state() -> Workload:
    """A trained optimizer that does not save the state of a parameter which has some."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = adam(model)

        def drop(_: Any, state_dict: dict[str, Any]) -> None:
            if state_dict["state"][0]["step"] > 1:
                del state_dict["state"][0]

        made.register_state_dict_post_hook(drop)
        return made

    return unused_parameters(optimizer)


def forgets_state_of_used() -> Workload:
    """An optimizer that has no state of a parameter which has gradients."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = adam(model)
        parameter = made.param_groups[0]["params"][0]
        made.register_step_post_hook(lambda one, *_: parameter.grad.any() and one.state.pop(parameter))
        return made

    return Workload(net(), inputs, reversed_loss, optimizer)


def tensor_lr(change: Callable[[torch.optim.Optimizer], Any] = lambda _: None) -> Workload:
    """A scheduler that changes a learning rate which is a tensor, in each group and in the defaults."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [value]} for value in model.parameters()]
        made = torch.optim.AdamW(groups, lr=torch.tensor(0.01))
        made.register_load_state_dict_post_hook(change)
        return made

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    return Workload(net(), inputs, reversed_loss, optimizer, scheduler)


def tensor_lr_and_changed_default() -> Workload:
    """A load that changes the default learning rate."""
    return tensor_lr(lambda one: one.defaults["lr"].fill_(0.5))


def frozen_layer() -> Workload:
    """An optimizer that has state of frozen parameters from the start."""
    model = net()
    model[0].requires_grad_(False)
    return Workload(model, inputs, reversed_loss, lambda model: torch.optim.Adagrad(model.parameters(), 0.01))


def drops_trained_state() -> Workload:
    """A load that drops the moments of a parameter that is trained."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.Adam(model.parameters(), 0.01)
        made.register_load_state_dict_post_hook(lambda one: one.state.pop(one.param_groups[0]["params"][-1]))
        return made

    return Workload(net(), inputs, reversed_loss, optimizer)


class ScheduleFree(torch.optim.Optimizer):
    """Averages its iterates. As in the package of this name, `train` looks up state, which adds empty
    entries."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def train(self) -> "ScheduleFree":
        for group in self.param_groups:
            for value in group["params"]:
                if "z" in self.state[value]:
                    value.lerp_(self.state[value]["z"], 0.1)
        return self

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2 * group["k"]
            weight = group["lr"] ** 2 * group["k"] / (group["weight_sum"] or 1.0)
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if "z" not in state:
                    state["z"] = value.clone()
                    state["exp_avg_sq"] = torch.zeros_like(value)
                state["exp_avg_sq"].lerp_(value.grad.square(), 0.05)
                change = value.grad / (state["exp_avg_sq"].sqrt() + 1e-8)
                value.lerp_(state["z"], weight).sub_(change, alpha=group["lr"] * 0.1)
                state["z"].sub_(change, alpha=group["lr"])


class Prodigy(torch.optim.Optimizer):
    """Keeps the weights with which it began, and estimates its step size `d` while it steps."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 0.001})
        for value in (value for group in self.param_groups for value in group["params"]):
            self.state[value]["p0"] = value.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if "s" not in state:
                    state["s"], state["d"] = torch.zeros_like(value), 0.001
                start = state.setdefault("p0", value.clone())
                state["s"].mul_(0.9).add_(value.grad, alpha=state["d"])
                value.sub_(state["s"] + 0.01 * (value - start), alpha=group["lr"])
                state["d"] *= 1.5 if group["lr"] else 1.0
            group["d"] = state["d"]


def schedule_free() -> Workload:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters()).train()

    return Workload(net(), inputs, reversed_loss, optimizer)


class ForgetsStart(Prodigy):
    """Its load also drops an entry that a new optimizer has."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.state[self.param_groups[0]["params"][1]].pop("p0", None)


def prodigy(make: type[Prodigy] = Prodigy) -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: make(model.parameters()))


def prodigy_and_lost_start() -> Workload:
    return prodigy(ForgetsStart)
