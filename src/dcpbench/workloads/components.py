"""Parts of a run in addition to model, optimizer and scheduler, which are saved too: a class for each value
of the group `component`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dcpbench.state.snapshot import named_parameters
from dcpbench.torch_private import GROWTH_TRACKER


@dataclass(frozen=True)
class ComponentContext:
    """Everything that a component is built from.

    Args:
        device: of the run.
        data_seed: the same for every run of a cell.
        model: builds another plain model with the weights of the run.
        wrap: puts a plain model under the parallelism of the run.
    """

    device: torch.device
    data_seed: int
    model: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]


class Component:
    """Plain training, without a component. Subclasses, built from a `ComponentContext`, change a part.

    Attributes:
        objects: that checkpoints have, by name: modules, and others with `state_dict` and `load_state_dict`.
    """

    objects: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, context: ComponentContext) -> None:
        """Build nothing."""

    def prepare(self, model: nn.Module, step: int) -> None:
        """Prepare the model for a step. Called before the step is taken, and before a load of a checkpoint
        that was saved after it."""

    def number_of_batch(self, step: int) -> int:
        """Return the number of the batch for a step; both are counted from 1."""
        return step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the factor of the loss, before they are clipped."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step with these gradients."""
        optimizer.step()

    def follow(self, model: nn.Module) -> None:
        """Update the component after a step of the model."""

    def forget(self, seed: int) -> None:
        """Change the values that are the same after all values of its objects have been changed."""


class Ema(Component):
    """An exponential moving average of the model by torch's `AveragedModel`, sharded and saved as the model
    is. Under DDP each rank has a plain one, which is not trained."""

    def __init__(self, context: ComponentContext, decay: float) -> None:
        self.average = AveragedModel(context.model(), multi_avg_fn=get_ema_multi_avg_fn(decay))
        wrapped = context.wrap(self.average.module)
        self.average.module = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        self.objects = {"ema": self.average}

    def follow(self, model: nn.Module) -> None:
        self.average.update_parameters(model)


class Freezing(Component):
    """Freezes the parameters of the first layer in the steps from `first` to `last`, or without end if that
    is None."""

    def __init__(self, context: ComponentContext, first: int = 0, last: int | None = None) -> None:
        self._first, self._last = first, last

    def prepare(self, model: nn.Module, step: int) -> None:
        frozen = self._first <= step and (self._last is None or step <= self._last)
        parameters = named_parameters(model)
        layer = next(iter(parameters)).rpartition(".")[0]
        for name, parameter in parameters.items():
            if name.rpartition(".")[0] == layer:
                parameter.requires_grad_(not frozen)


class GradScaling(Component):
    """Scales the loss by a `GradScaler`, by more the longer no gradient overflows."""

    def __init__(self, context: ComponentContext, **options: Any) -> None:
        self.scaler = torch.amp.GradScaler(context.device.type, **options)
        self.objects = {"grad_scaler": self.scaler}

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def forget(self, seed: int) -> None:
        state = self.scaler.state_dict()
        counted = state[GROWTH_TRACKER.name] + state["growth_interval"]  # more than a state can have
        self.scaler.load_state_dict({**state, GROWTH_TRACKER.name: counted})


class DataLoading(Component):
    """The order of batches by torchdata's `StatefulDataLoader`, which shuffles the `batches` of each epoch,
    and continues with the next one after a load."""

    def __init__(self, context: ComponentContext, batches: int) -> None:
        self._batches, self._seed = batches, context.data_seed
        self.objects = {"data_loader": self}
        self._start_over(self._seed, batches)

    def _start_over(self, seed: int, batches: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader  # an optional dependency
        from torchdata.stateful_dataloader.sampler import RandomSampler

        numbers = range(1, batches + 1)
        # The loader's generator also draws the seeds of workers (docs/findings/data-loader-generator.md).
        sampler = RandomSampler(numbers, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed)
        self.loader = StatefulDataLoader(numbers, batch_size=None, generator=generator, sampler=sampler)
        self._numbers: Iterator[int] = chain.from_iterable(repeat(self.loader))  # of all epochs

    def number_of_batch(self, step: int) -> int:
        return next(self._numbers)

    def forget(self, seed: int) -> None:
        self._start_over(seed, self._batches + 1)
        for step in range(self._batches + 1):  # to a position that no state has
            self.number_of_batch(step)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start_over(self._seed, self._batches)
        self.loader.load_state_dict(state_dict)
