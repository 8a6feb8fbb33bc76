"""Workloads as people write them: batches, losses and models of every kind."""

import weakref
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_sequence

from dcpbench.workloads.workload import Workload

WIDTH, SAMPLES = 8, 8


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def inputs(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(SAMPLES, WIDTH, generator=generator)


def reversed_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x).to(x.dtype), x.flip(1))  # torch 2.11 refuses two dtypes


def wrongly_loaded(model: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    """Return the model, which each load changes."""

    def wrong(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            change(module)

    model.register_load_state_dict_post_hook(wrong)
    return model


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list[str]


class Unknown:
    """A container with a weak reference to itself, as of a graph."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.parent = x, weakref.ref(self)


def zero_head(lr: float = 0.1) -> Workload:
    """The loss of step 1 is the same for each seed; all losses are if the learning rate is zero."""
    model = net()
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    batch = torch.linspace(0, 1, 64).reshape(8, 8)
    return Workload(
        model, lambda _: batch, reversed_loss, lambda model: torch.optim.SGD(model.parameters(), lr)
    )


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


def drawn_when_built() -> Workload:
    data = torch.randn(64, WIDTH)
    return Workload(net(), lambda generator: data[torch.randperm(64, generator=generator)[:8]], reversed_loss)


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


def exact_labels() -> Workload:
    """Labels that must arrive as they are, in the only tensor of a batch with a decimal point."""
    labels = nn.Sequential(nn.EmbeddingBag(50, WIDTH), nn.Linear(WIDTH, 3))

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        draw = partial(torch.randint, generator=generator)
        return draw(50, (SAMPLES, 6)), draw(2, (SAMPLES, 3)).float()

    def loss(model: nn.Module, share: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert set(share[1].unique().tolist()) <= {0.0, 1.0}
        return F.binary_cross_entropy_with_logits(model(share[0]), share[1])

    return Workload(labels, batch, loss)


def packed_values() -> Workload:
    """Packed sequences whose length divides by their number."""

    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(12, WIDTH, generator=generator), "ends": torch.tensor([3, 5, 6, 12])}

    def loss(model: nn.Module, share: dict[str, torch.Tensor]) -> torch.Tensor:
        assert share["ends"][-1] == len(share["x"])
        return reversed_loss(model, share["x"])

    return Workload(net(), batch, loss)


def equal_images() -> Workload:
    """Images with as many boxes as there are images."""

    def batch(generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
        return [{"boxes": torch.rand(4, WIDTH, generator=generator)} for _ in range(4)]

    def loss(model: nn.Module, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([reversed_loss(model, image["boxes"]) for image in images]).mean()

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
    """A container that dcpbench does not know."""

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


def several_losses() -> Workload:
    def loss(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = model(x)
        return {"mse": F.mse_loss(out, x.flip(1)), "l1": F.l1_loss(out, x.flip(1))}

    return Workload(net(), inputs, loss)


def loss_of_each_sample() -> Workload:
    return Workload(net(), inputs, lambda m, x: {"mse": (m(x) - x).square().mean(1)})


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


class RaisesOnceLoaded(nn.Module):
    """Raises in the first pass after a load, or in the load of the state after two steps."""

    def __init__(self, error: Exception, in_load: bool = False) -> None:
        super().__init__()
        self.net, self.error, self.in_load, self.passes, self.is_loaded = net(), error, in_load, 0, False

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": self.passes}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.passes, self.is_loaded = state["passes"], state["passes"] == 2
        if self.is_loaded and self.in_load:
            raise self.error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.is_loaded:
            raise self.error
        return self.net(x)


def raises_once_loaded() -> Workload:
    return Workload(RaisesOnceLoaded(ValueError("it was loaded")), inputs, reversed_loss)


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
    model = wrongly_loaded(WithScalar(()), lambda module: module.scale.add_(1))
    return Workload(model, inputs, reversed_loss)


def one_element() -> Workload:
    return Workload(WithScalar((1,)), inputs, reversed_loss)


def channels_last() -> Workload:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x.flip(1))

    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3, padding=1))
    model = model.to(memory_format=torch.channels_last)
    return Workload(model, lambda g: torch.rand(SAMPLES, 4, 5, 5, generator=g), loss)


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
