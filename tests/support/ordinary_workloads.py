"""Workloads as people write them: batches, losses and models of every kind."""

import random
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_sequence

from dcpbench.workloads.workload import Workload, adam

WIDTH, SAMPLES = 8, 8


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def inputs(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(SAMPLES, WIDTH, generator=generator)


def reversed_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x).to(x.dtype), x.flip(1))  # torch 2.11 refuses two dtypes


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list[str]


class Unknown:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def named_tuple() -> Workload:
    return Workload(net(), lambda g: Pair(inputs(g), inputs(g)), lambda m, s: F.mse_loss(m(s.x), s.y))


def data_class() -> Workload:
    names = [f"sample {number}" for number in range(SAMPLES)]

    def loss(model: nn.Module, share: Sample) -> torch.Tensor:
        assert len(share.names) == len(share.x)
        return reversed_loss(model, share.x)

    return Workload(net(), lambda g: Sample(inputs(g), names), loss)


def user_dict() -> Workload:
    return Workload(net(), lambda g: UserDict(x=inputs(g)), lambda m, s: reversed_loss(m, s["x"]))


def arrays() -> Workload:
    return Workload(
        net(), lambda g: {"x": inputs(g).numpy()}, lambda m, s: reversed_loss(m, torch.as_tensor(s["x"]))
    )


def number_per_step() -> Workload:
    """A diffusion's level of noise, the same for all samples."""

    def batch(generator: torch.Generator) -> dict[str, Any]:
        return {"x": inputs(generator), "level": torch.rand((), generator=generator)}

    return Workload(net(), batch, lambda m, s: reversed_loss(m, s["x"] * (1 + s["level"])))


def unequal_tensors() -> Workload:
    """A list with a tensor of another length for each sample, as of boxes in a picture."""

    def batch(generator: torch.Generator) -> dict[str, Any]:
        counts = torch.randint(1, 5, (SAMPLES,), generator=generator).tolist()
        return {"x": inputs(generator), "boxes": [torch.rand(n, 4, generator=generator) for n in counts]}

    def loss(model: nn.Module, share: dict[str, Any]) -> torch.Tensor:
        means = torch.stack([boxes.mean() for boxes in share["boxes"]])
        assert len(means) == len(share["x"])
        return F.mse_loss(model(share["x"]), share["x"] * means[:, None])

    return Workload(net(), batch, loss)


def smaller_last_batch() -> Workload:
    """Every second batch has fewer samples, which two ranks cannot share evenly."""

    def batch(generator: torch.Generator) -> torch.Tensor:
        return inputs(generator)[: 7 if generator.initial_seed() % 2 else SAMPLES]

    return Workload(net(), batch, reversed_loss)


def too_small_batch() -> Workload:
    return Workload(net(), lambda g: inputs(g)[:1], reversed_loss)


def unknown_container() -> Workload:
    return Workload(net(), lambda g: Unknown(inputs(g)), lambda m, s: reversed_loss(m, s.x))


def shared_by_function() -> Workload:
    """A container that dcpbench does not know, as of a graph."""

    def share(batch: Unknown, number: int, of: int) -> Unknown:
        return Unknown(batch.x.chunk(of)[number])

    return Workload(net(), lambda g: Unknown(inputs(g)), lambda m, s: reversed_loss(m, s.x), share=share)


def packed_sequence() -> Workload:
    def batch(generator: torch.Generator) -> Any:
        return pack_sequence([torch.rand(length, WIDTH, generator=generator) for length in (4, 3, 2, 1)])

    return Workload(net(), batch, lambda m, s: reversed_loss(m, s.data))


def gradient_penalty() -> Workload:
    """A second derivative, which cannot be computed under `no_grad`; batch statistics change before it."""

    def loss(model: nn.Module, share: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        real, other = share
        weight = torch.rand(len(real), 1, device=real.device)
        middle = (weight * real + (1 - weight) * other).requires_grad_()
        slope = torch.autograd.grad(model(middle).sum(), middle, create_graph=True)[0]
        return model(other).mean() - model(real).mean() + (slope.norm(dim=1) - 1).square().mean()

    return Workload(net(), lambda g: (inputs(g), inputs(g)), loss)


def loss_of_a_share_only() -> Workload:
    """Refuses a global batch after it has drawn random numbers and counted."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            assert len(x) < SAMPLES, "a share has fewer samples"
            return F.dropout(self.net(x), 0.2) + 0.01 * self.passes

    return Workload(Dropping(), inputs, reversed_loss)


def normalised_by_all_ranks() -> Workload:
    """Divides by the number of tokens of all ranks, as language models do."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.tensor(float(x.numel()))
        dist.all_reduce(tokens)
        return (model(x) - x.flip(1)).square().sum() / tokens * dist.get_world_size()

    return Workload(net(), inputs, loss)


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


def several_losses() -> Workload:
    def loss(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = model(x)
        return {"mse": F.mse_loss(out, x.flip(1)), "l1": F.l1_loss(out, x.flip(1))}

    return Workload(net(), inputs, loss)


def loss_of_each_sample() -> Workload:
    return Workload(net(), inputs, lambda m, x: {"mse": (m(x) - x).square().mean(1)})


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


class Counting(nn.Module):
    """Keeps extra state, which each forward pass makes from its number."""

    def __init__(self, state_of: Callable[[int], Any]) -> None:
        super().__init__()
        self.net, self.state_of, self.kept, self.passes = net(), state_of, state_of(0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.kept = self.state_of(self.passes)
        out: torch.Tensor = self.net(x)
        return out

    def get_extra_state(self) -> Any:
        return {"passes": self.passes, "kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.passes, self.kept = state["passes"], state["kept"]


def nested_lists() -> Workload:
    def state_of(number: int) -> Any:
        return {"a": [[torch.full((2,), number)], [{"b": number}, [torch.full((3,), number + 2.0), "text"]]]}

    return Workload(Counting(state_of), inputs, reversed_loss)


def arrays_in_extra_state() -> Workload:
    def state_of(number: int) -> Any:
        return {
            "counts": np.arange(3) + number,
            "odd": np.array([number % 2 > 0]),
            "mean": np.float32(number),
        }

    return Workload(Counting(state_of), inputs, reversed_loss)


class Captures(nn.Module):
    """Captures an output by a hook, which libraries install in the first forward pass."""

    def __init__(self, in_first_forward: bool) -> None:
        super().__init__()
        self.net, self.is_installed, self.captured = net(), False, torch.zeros(())
        if not in_first_forward:
            self._install()

    def _install(self) -> None:
        self.net[0].register_forward_hook(self._capture)
        self.is_installed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_installed:
            self._install()
        out = self.net(x)
        captured, self.captured = self.captured, torch.zeros(())
        return out + 0.01 * captured.mean()

    def _capture(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.captured = output


def hook_of_the_first_forward(in_first_forward: bool = True) -> Workload:
    return Workload(Captures(in_first_forward), inputs, reversed_loss)


class Drawing(nn.Module):
    """Draws from Python's and NumPy's generators, when it is built and in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor([random.random(), np.random.rand()], dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x)) * (random.random() > 0.3) * np.random.normal(1, 0.1)
        return x * self.scale.sum()


def python_random() -> Workload:
    return Workload(Drawing(), inputs, reversed_loss)


class OtherOrder(nn.Module):
    """Calls its layers in another order than they are declared, and counts the gradients that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])
        self.gradients = 0
        for layer in self.layers:
            layer.weight.register_hook(self._count)

    def _count(self, _: torch.Tensor) -> None:
        self.gradients += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (3, 0, 5, 1, 4, 2):
            x = x + F.gelu(self.layers[number](x))
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"gradients": self.gradients}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.gradients = state["gradients"]


def other_order() -> Workload:
    return Workload(OtherOrder(), lambda g: torch.rand(24, 64, generator=g), reversed_loss)


def batch_norm() -> Workload:
    """Running statistics of each rank's samples."""
    normed = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, WIDTH))
    return Workload(normed, inputs, reversed_loss)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def wrong_in_load(change: Callable[[Any], None]) -> Workload:
    """Batch normalisation, and a load that changes the model."""

    def wrong(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            change(module)

    model = Normed()
    model.register_load_state_dict_post_hook(wrong)
    return Workload(model, inputs, reversed_loss)


def wrong_buffer_in_load() -> Workload:
    """A load that changes an element of a buffer on the last rank."""

    def change(module: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            module.net[1].running_var[3] += 1

    return wrong_in_load(change)


def buffer_of_no_rank() -> Workload:
    return wrong_in_load(lambda module: module.net[1].running_var.add_(1))


def wrong_weight_in_load() -> Workload:
    return wrong_in_load(lambda module: module.net[2].bias.add_(0.001))


def hidden_counter() -> Workload:
    """Batch normalisation, and a counter that no checkpoint contains."""

    class Counting(Normed):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            return super().forward(x) * (1 + 0.01 * self.passes)

    return Workload(Counting(), inputs, reversed_loss)


def running_center(samples: int = 1) -> Workload:
    """Training depends on two buffers that differ by rank, as in self-distillation."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("center", torch.zeros(samples, WIDTH))
            self.register_buffer("spread", torch.zeros(samples, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x) - self.center[0] + self.spread[0]
            self.center = self.center.lerp(x.mean(0), 0.1)
            self.spread = self.spread.lerp(x.std(0), 0.1)
            return out

    return Workload(Centered(), inputs, reversed_loss)


def large_buffers() -> Workload:
    """Buffers of more than 4 MiB, of which only digests are kept."""
    return running_center(samples=2**18)


class RaisesOnceLoaded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.is_loaded = net(), False

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def set_extra_state(self, _: torch.Tensor) -> None:
        self.is_loaded = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_loaded:
            raise ValueError("it was loaded")
        return self.net(x)


def raises_once_loaded() -> Workload:
    return Workload(RaisesOnceLoaded(), inputs, reversed_loss)


def lazy_module() -> Workload:
    return Workload(nn.Sequential(nn.LazyLinear(WIDTH)), inputs, reversed_loss)


def raises_when_built() -> Workload:
    raise FileNotFoundError("data.bin")


class WithScalar(nn.Module):
    """Scaled by a parameter without dimensions, or of one element."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale.exp()


def scalar_parameter() -> Workload:
    return Workload(WithScalar(()), inputs, reversed_loss)


def wrong_scalar_in_load() -> Workload:
    """A load that changes a parameter without dimensions."""
    model = WithScalar(())

    def wrong(module: nn.Module, *_: Any) -> None:
        module.scale.data += 1

    model.register_load_state_dict_post_hook(wrong)
    return Workload(model, inputs, reversed_loss)


def one_element() -> Workload:
    return Workload(WithScalar((1,)), inputs, reversed_loss)


def channels_last() -> Workload:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x.flip(1))

    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3, padding=1))
    model = model.to(memory_format=torch.channels_last)
    return Workload(model, lambda g: torch.rand(SAMPLES, 4, 5, 5, generator=g), loss)


def adafactor() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    """Has its blocks where transformers have them, two levels below the root."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Linear(WIDTH, WIDTH)
        self.model.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model.embed(x)
        for layer in self.model.layers:
            x = layer(x)
        return self.head(x)


def blocks(layers: tuple[str, ...] = ("model.layers.*",)) -> Workload:
    plan = {"model.layers.*.up": "colwise", "model.layers.*.down": "rowwise"}
    return Workload(Blocks(), inputs, reversed_loss, layers=layers, tp_plan=plan)


class Average(nn.Module):
    """An exponential moving average of the parameters of a model, under its layout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = [model]
        for name, value in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), value.detach().clone())

    @torch.no_grad()
    def update(self) -> None:
        for mine, value in zip(self.buffers(), self.model[0].parameters(), strict=True):
            mine.lerp_(value, 0.1)


class Sampler:
    """Walks through an order of numbers, and draws another one at each end."""

    def __init__(self) -> None:
        self.order, self.position = np.random.permutation(4), 0

    def next(self) -> float:
        if self.position == len(self.order):
            self.order, self.position = np.random.permutation(4), 0
        self.position += 1
        return float(self.order[self.position - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order, self.position = state_dict["order"], int(state_dict["position"])


def saves_average_and_sampler(not_saved: tuple[str, ...] = ()) -> Workload:
    sampler, made = Sampler(), dict[str, Average]()

    def state(model: nn.Module) -> dict[str, Any]:
        made["average"] = Average(model)
        return {"average": made["average"], "sampler": sampler}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        adam = torch.optim.Adam(model.parameters())
        adam.register_step_post_hook(lambda *_: made["average"].update())
        return adam

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return reversed_loss(model, x) * (1 + sampler.next())

    return Workload(net(), inputs, loss, optimizer, state=state, not_saved=not_saved)


def forgets_the_sampler() -> Workload:
    return saves_average_and_sampler(not_saved=("sampler",))


def forgets_python_random() -> Workload:
    return Workload(Drawing(), inputs, reversed_loss, not_saved=("random.python",))


class HasGenerator(nn.Module):
    """Draws from a separate generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.generator = net(), np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out * float(self.generator.normal(1, 0.1))


class SavesGenerator(HasGenerator):
    def get_extra_state(self) -> Any:
        return self.generator.bit_generator.state

    def set_extra_state(self, state: Any) -> None:
        self.generator.bit_generator.state = state  # which refuses other texts


def forgets_its_generator() -> Workload:
    return Workload(HasGenerator(), inputs, reversed_loss)


def saves_its_generator() -> Workload:
    return Workload(SavesGenerator(), inputs, reversed_loss)


class OnBase(nn.Module):
    """Trains layers on a base that is the same in each build."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.net = nn.Linear(WIDTH, WIDTH), net()
        nn.init.eye_(self.base.weight)
        nn.init.zeros_(self.base.bias)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(self.base(x))
        return out


def base_not_saved() -> Workload:
    return Workload(OnBase(), inputs, reversed_loss, not_saved=["base.*"])


def wrong_state() -> Workload:
    return Workload(net(), inputs, reversed_loss, state={"sampler": object()})


def unused_parameters(optimizer: Callable[[nn.Module], Any] = adam) -> Workload:
    """A layer that no step uses: DDP refuses it unless it searches for such parameters."""
    model = nn.ModuleDict({"used": net(), "unused": net()})

    class OneOfTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.parts["used"](x)
            return out

    return Workload(OneOfTwo(), inputs, reversed_loss, optimizer)


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


def score_before_penalty() -> Workload:
    """A second derivative after another forward pass, whose parameters `fully_shard` frees."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        score = model(x).mean()
        x = x.clone().requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return score + (slope.norm(dim=1) - 1).square().mean()

    return Workload(net(), inputs, loss)


def raises_in_the_loss() -> Workload:
    """An error of another cause beside it."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"setStorage: {float(model(x).sum())}")

    return Workload(net(), inputs, loss)


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


def schedule_free(model: nn.Module | None = None) -> Workload:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters()).train()

    return Workload(model or net(), inputs, reversed_loss, optimizer)


def schedule_free_and_nudged_weight() -> Workload:
    """A load that changes a weight."""
    model = net()

    def nudge(module: nn.Module, *_: Any) -> None:
        module[2].bias.data += 0.01

    model.register_load_state_dict_post_hook(nudge)
    return schedule_free(model)


def schedule_free_and_counter() -> Workload:
    """Training depends on a counter that no checkpoint contains."""

    class Counting(nn.Sequential):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            return super().forward(x) * (1 + 0.01 * self.passes)

    return schedule_free(Counting(*net()))


class ForgetsStart(Prodigy):
    """Its load also drops an entry that a new optimizer has."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.state[self.param_groups[0]["params"][1]].pop("p0", None)


def prodigy(make: type[Prodigy] = Prodigy) -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: make(model.parameters()))


def prodigy_and_lost_start() -> Workload:
    return prodigy(ForgetsStart)
