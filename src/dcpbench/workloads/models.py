"""The models of the matrix, and how their parameters are put into groups for an optimizer."""

import itertools
import pkgutil
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812


class Mlp(nn.Module):
    """Linear layers `net1`, `net2`, ... with a GELU after each.

    PyTorch's checkpoint tests use ReLU instead. With it a net can die (loss and gradients 0.0 whatever was
    restored), and rounding sometimes decides whether a unit near its kink has a gradient.

    Args:
        sizes: widths, input first; layer i maps `sizes[i - 1]` to `sizes[i]`.
    """

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.input_size = sizes[0]
        self.output_size = sizes[-1]
        for index, (width_in, width_out) in enumerate(itertools.pairwise(sizes), start=1):
            self.add_module(f"net{index}", nn.Linear(width_in, width_out))

    @property
    def layers(self) -> list[nn.Module]:
        """The layers; a stage of a pipeline has some of them."""
        return [child for name, child in self.named_children() if name.startswith("net")]

    @property
    def in_training_step(self) -> bool:
        """Whether a forward pass is part of a training step."""
        return self.training and torch.is_grad_enabled()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map a batch of shape (batch, sizes[0]) to (batch, sizes[-1])."""
        for number, layer in enumerate(self.layers, start=1):
            inputs = F.gelu(layer(self.before(number, inputs)))
        return inputs

    def before(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return the input of a layer, counted from 1, from the output of the one before."""
        return inputs


class Dropout(Mlp):
    """An `Mlp` with dropout before each odd layer. Under tensor parallelism the input there is the same on
    all ranks of a group, and they draw the same.

    Args:
        probability: of an element to become zero.
    """

    def __init__(self, sizes: list[int], probability: float) -> None:
        super().__init__(sizes)
        self.probability = probability

    def before(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        return F.dropout(inputs, self.probability, self.training) if number % 2 else inputs


class Buffered(Mlp):
    """An `Mlp` with persistent buffers that training changes: a count of batches, and a gain that grows with
    each and scales the output."""

    seen: torch.Tensor
    gain: torch.Tensor

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("gain", torch.ones(sizes[-1]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.in_training_step:
            self.seen += 1
            self.gain *= 1.01
        return super().forward(inputs) * self.gain


class Scaled(Mlp):
    """An `Mlp` whose output is scaled by a persistent buffer without dimensions, which grows in each step."""

    scale: torch.Tensor

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.in_training_step:
            self.scale *= 1.01
        return super().forward(inputs) * self.scale


class Nested(nn.Module):
    """Five linear layers of one width: three separate ones, one in a Sequential and one in a ModuleList, as
    in PyTorch's fine-tuning test, with a GELU for each ReLU."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.input_size = self.output_size = size
        self.layer1 = nn.Linear(size, size)
        self.layer2 = nn.Linear(size, size)
        self.layer3 = nn.Linear(size, size)
        self.sequential = nn.Sequential(nn.Linear(size, size))
        self.module_list = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (self.layer1, self.layer2, self.layer3, self.sequential, *self.module_list):
            inputs = F.gelu(layer(inputs))
        return inputs


class Tied(nn.Module):
    """An embedding whose weight is also that of the head, as in language models.

    Args:
        size: of a sample, and of the output.
        width: of the layer between.
    """

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.input_size = self.output_size = size
        self.embed = nn.Linear(width, size, bias=False)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, size)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.inner(inputs @ self.embed.weight))
        output: torch.Tensor = self.head(hidden)
        return output


class Bf16(Mlp):
    """An `Mlp` in bfloat16."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.bfloat16())


class Dtypes(Mlp):
    """An `Mlp` with persistent buffers of many dtypes, without dimensions and without elements, which
    training changes; a buffer that is not persistent; and a parameter of one element that scales the output.

    Args:
        dtypes: names of torch's dtypes; there is a buffer of each.
    """

    scalar: torch.Tensor

    def __init__(self, sizes: list[int], dtypes: list[str]) -> None:
        super().__init__(sizes)
        self._moving = [f"of_{name}" for name in dtypes]
        for name in dtypes:
            self.register_buffer(f"of_{name}", torch.arange(1, 6).to(getattr(torch, name)))
        self.register_buffer("scalar", torch.ones((), dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.in_training_step:
            self.scalar += 1 / 3
            for name in self._moving:  # roll the elements: not every dtype has arithmetic
                buffer = self.get_buffer(name)
                elements = buffer.view(torch.uint8).view(buffer.numel(), -1)
                elements.copy_(elements.roll(1, 0))
        return super().forward(inputs) * self.gain


class BatchNorm(Mlp):
    """An `Mlp` with batch normalisation before each layer. Its running statistics, which are buffers, come
    from the share of each batch on a rank."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes[:-1])

    def before(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.norms[number - 1](inputs)
        return normalised


class LayerNorm(Mlp):
    """An `Mlp` with layer normalisation before each odd layer but the first. Its weights and biases are
    random: from ones and zeros a few steps would not tell two models apart."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        for number in range(3, len(sizes), 2):
            norm = nn.LayerNorm(sizes[number - 1])
            self.add_module(f"norm{number}", norm)
            for parameter in norm.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)

    def before(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = (
            self.get_submodule(f"norm{number}")(inputs) if number % 2 and number > 1 else inputs
        )
        return normalised


class ExtraState(Mlp):
    """An `Mlp` with a count and a tensor that only `get_extra_state` and `set_extra_state` know."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self._seen, self._powers = 0, torch.zeros(3)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the extra state for `state_dict`."""
        return {"seen": self._seen, "powers": self._powers}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take the extra state from `load_state_dict`."""
        self._seen, self._powers = state["seen"], state["powers"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.in_training_step:
            self._seen += 1
            self._powers = float(self._seen) ** torch.arange(3)
        return super().forward(inputs)


class Frozen(Mlp):
    """An `Mlp` whose first layer is frozen, and saved."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.get_submodule("net1").requires_grad_(False)


class Unused(Mlp):
    """An `Mlp` with a layer that no batch reaches, like an expert that no token is routed to: its parameters
    never have a gradient."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.experts = nn.ModuleDict({"unused": nn.Linear(4, 4)})


class Experts(nn.Module):
    """Experts with two linear maps and a GELU between. A rank may have some of the experts.

    Args:
        experts: how many there are.
        size: of a sample, and of the output.
        width: between the two maps.
    """

    def __init__(self, experts: int, size: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.rand(experts, width, size) / size)
        self.w2 = nn.Parameter(torch.rand(experts, size, width) / width)

    def forward(self, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map a batch of shape (batch, size) to the sum of the experts' outputs, weighted by a tensor of
        shape (batch, experts on this rank)."""
        w1, w2 = (
            weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w1, self.w2)
        )
        hidden = F.gelu(torch.einsum("ns,ews->enw", inputs, w1))
        return torch.einsum("enw,esw,ne->ns", hidden, w2, weights)


class MixtureOfExperts(nn.Module):
    """A linear layer, experts that a router weights for each sample, and a linear layer."""

    def __init__(self, experts: int, size: int, width: int) -> None:
        super().__init__()
        self.input_size = self.output_size = size
        self.first = nn.Linear(size, size)
        self.router = nn.Linear(size, experts)
        self.experts = Experts(experts, size, width)
        self.last = nn.Linear(size, size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = F.gelu(self.first(inputs))
        inputs = inputs + self.experts(inputs, self.router(inputs).softmax(-1))
        return F.gelu(self.last(inputs))


class FineTuned(nn.Module):
    """A frozen model, `pretrain`, followed by linear layers `layer1`, ... of its output's width.

    Args:
        pretrain: `target` and `options` of the pre-trained model, as in its YAML.
        layers: how many linear layers, each followed by a GELU, are trained on top of it.
    """

    def __init__(self, pretrain: dict[str, Any], layers: int) -> None:
        super().__init__()
        inner: nn.Module = pkgutil.resolve_name(pretrain["target"])(**pretrain["options"])
        self.pretrain = inner.requires_grad_(False).eval()  # which freezes its buffers
        self.input_size, self.output_size = inner.input_size, inner.output_size
        size = cast(int, inner.output_size)
        for number in range(1, layers + 1):
            self.add_module(f"layer{number}", nn.Linear(size, size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            inputs = F.gelu(layer(inputs))
        return inputs


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    """Put all parameters in one group."""
    return [{"params": list(model.parameters())}]


def biases_apart(model: nn.Module) -> list[dict[str, Any]]:
    """Put weights in one group and biases in another, at half of torch's default learning rate and without
    weight decay. Names tell them apart: FSDP1's parts of a weight have one dimension."""
    named = list(model.named_parameters())
    weights = [parameter for name, parameter in named if not name.endswith("bias")]
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": 0.0005, "weight_decay": 0.0}]


def one_empty(model: nn.Module) -> list[dict[str, Any]]:
    """Put an empty group, as of a frozen part, between the groups of `biases_apart`."""
    weights, biases = biases_apart(model)
    return [weights, {"params": [], "lr": 0.002}, biases]
