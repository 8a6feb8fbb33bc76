"""The `Stateful` objects of a checkpoint: model and optimizer by DCP's public functions, and objects with
state of their own. `dcp.save` calls `state_dict`; `dcp.load` fills a state dict and passes it to
`load_state_dict`."""

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dcpbench.compare.leaves import bits
from dcpbench.state.snapshot import Leaves, snapshot_model, snapshot_nested
from dcpbench.workloads.batch import Batch
from dcpbench.workloads.optimizers import each_optimizer

ObjectsByName = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]]
"""Objects by name, or a function of the wrapped model that returns them."""
TAKEN = ("model", "optimizer", "scheduler", "noise", "tensor_object", "train_state", "random")
"""The other top-level keys of a checkpoint."""


class ModelState:
    """A model under any parallelism, saved under its plain FQNs. If frozen parameters are left out, a load
    does not change them.

    Args:
        is_left_out: whether an FQN is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        options: StateDictOptions,
        is_left_out: Callable[[str], bool] | None = None,
    ) -> None:
        self.model, self._is_left_out = model, is_left_out
        strict = options.strict and not options.ignore_frozen_params and is_left_out is None
        self.options = replace(options, strict=strict)

    def state_dict(self) -> dict[str, Any]:
        state = get_model_state_dict(self.model, options=self.options)
        if self._is_left_out is None:
            return state
        return {name: tensor for name, tensor in state.items() if not self._is_left_out(name)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict, options=self.options)


class SavedObjects:
    """The objects of a run, by name: modules, which are saved under their FQNs, and others with `state_dict`
    and `load_state_dict`.

    Args:
        is_not_saved: whether a name is left out of checkpoints.
    """

    def __init__(
        self, objects: Mapping[str, Any], is_not_saved: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._every = [*objects.values()]
        saved = {name: holder for name, holder in objects.items() if not is_not_saved(name)}
        self.modules = {name: holder for name, holder in saved.items() if isinstance(holder, nn.Module)}
        self.others = {name: holder for name, holder in saved.items() if name not in self.modules}
        for name, module in self.modules.items():
            if not snapshot_model(module):
                what = f"{name!r} is a {type(module).__name__} with an empty state dict"
                raise ValueError(f"state of the Workload: {what}; leave it out")

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        """Return what a checkpoint contains: a `Stateful` for each."""
        options = replace(options, ignore_frozen_params=False)
        return {name: ModelState(module, options) for name, module in self.modules.items()} | self.others

    def leaves(self) -> Leaves:
        """Return the state of all for comparison."""
        return self.module_leaves() | snapshot_nested(
            {name: stateful.state_dict() for name, stateful in self.others.items()}
        )

    def module_leaves(self) -> Leaves:
        """Return the state of the modules, which a twin has too."""
        return {
            (name, *below): leaf
            for name, module in self.modules.items()
            for below, leaf in snapshot_model(module).items()
        }

    def copy_from(self, source: "SavedObjects") -> None:
        """Bring all into the state of the same objects of another run, also those that are not saved."""
        for saved_object, source_object in zip(self._every, source._every, strict=True):
            saved_object.load_state_dict(copy.deepcopy(source_object.state_dict()))


class OptimizerState:
    """An optimizer, or several as one, saved under the FQNs of its parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> None:
        self.model = model
        self.optimizer = optimizer
        self.options = options

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, each_optimizer(self.optimizer), options=self.options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(
            self.model, each_optimizer(self.optimizer), optim_state_dict=state_dict, options=self.options
        )


class TensorObject:
    """A tensor of shape (10, 10), the same on every rank, outside any module."""

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.rand(10, 10, generator=generator).to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data = state_dict["data"]


class MovingObject(TensorObject):
    """Tensors that each training step changes in place, in their lowest bits, so that older ones are
    detected. Their values would not survive a conversion to another dtype, or arithmetic."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        draw = partial(torch.randint, generator=torch.Generator().manual_seed(seed))
        low = draw(1, 2**20, (2, 8), dtype=torch.int32)
        tensors = {
            "denormals": low[0].view(torch.float32),
            "nans": (low[1] | 0x7F800000).view(torch.float32),  # signalling, with payloads
            "zeros": torch.where(draw(0, 2, (64,)) > 0, 0.0, -0.0),
            "flags": draw(0, 2, (64,)) > 0,
            "integers": 2**62 + draw(0, 2**20, (8,)),
            "complex": torch.complex(*draw(1, 2**20, (2, 8)).float()),
            "bf16": draw(-(2**15), 2**15, (8,), dtype=torch.int16).view(torch.bfloat16),
            "fp8": draw(0, 2**8, (16,), dtype=torch.uint8).view(torch.float8_e4m3fn),
        }
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.tensors = {name: state_dict[name] for name in self.tensors}

    def advance(self) -> None:
        """Replace each element by the next value of its dtype, and roll signs and flags."""
        for name, tensor in self.state_dict().items():
            if name in ("zeros", "flags"):
                tensor.copy_(tensor.roll(1))
            else:
                bits(tensor).add_(1)


class Noise:
    """A random generator that training draws from, the same on every rank. A load restores it."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def added(self, batch: Batch) -> Batch:
        """Return a global batch of inputs and targets with noise in its inputs."""
        inputs, targets = batch
        return inputs + self.like(inputs), targets

    def like(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return noise for a tensor, drawn on the CPU."""
        return 0.01 * torch.randn(inputs.shape, generator=self.generator).to(inputs)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])


@dataclass
class TrainState:
    """The progress of training, saved as tensors and, as an opaque value, bytes."""

    step: int = 0
    current_loss: float = -1.0
    losses: list[float] = field(default_factory=list)

    def record(self, loss: float) -> None:
        """Count a step with this loss."""
        self.step += 1
        self.current_loss = loss
        self.losses.append(loss)

    def replace_last(self, losses: list[float]) -> None:
        """Replace the last losses."""
        if losses:
            self.losses[-len(losses) :] = losses
            self.current_loss = losses[-1]

    def state_dict(self) -> dict[str, Any]:
        losses = io.BytesIO()
        torch.save(self.losses, losses)
        return {
            "step": torch.tensor(self.step, dtype=torch.int32),
            "current_loss": torch.tensor(self.current_loss, dtype=torch.float64),  # exact for a Python float
            "losses": losses,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"].item())
        self.current_loss = float(state_dict["current_loss"].item())
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"], weights_only=True)
