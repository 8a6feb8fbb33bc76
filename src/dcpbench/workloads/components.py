"""What a run trains with beside model, optimizer and scheduler, and saves: a class for each value of the
group `component`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dcpbench.verify.perturb import perturb_model, perturbed
from dcpbench.verify.snapshot import Leaves, named_parameters, snapshot_model, snapshot_nested
from dcpbench.workloads.stateful import ModelState


@dataclass(frozen=True)
class ComponentContext:
    """What a component is made for: a device; the seed of the cell's data, the same for every run; a plain
    model with the run's weights, another one each time, and how that is put under the run's parallelism."""

    device: torch.device
    data_seed: int
    model: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]


class Component:
    """Nothing: plain training, of which others, made for their `ComponentContext`, change a part."""

    def __init__(self, surroundings: ComponentContext | None = None) -> None:
        """There is nothing to make."""

    def prepare(self, model: nn.Module, step: int) -> None:
        """Have the model be as it is in this step, before that is taken or what was saved after it loaded."""

    def number_of_batch(self, step: int) -> int:
        """Which batch is the next one, to be trained on in this step; both are counted from 1."""
        return step

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step with these gradients."""
        optimizer.step()

    def follow(self, model: nn.Module) -> None:
        """Told that the model has taken a step."""

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        """What goes into a checkpoint: one `Stateful` for each top-level key."""
        return {}

    def leaves(self) -> Leaves:
        """The same as a comparison looks at it."""
        return snapshot_nested({key: one.state_dict() for key, one in self.state(StateDictOptions()).items()})

    def forget(self, seed: int) -> None:
        """Hold other values."""


class Ema(Component):
    """An exponential moving average of the model by torch's `AveragedModel`, spread over the ranks as the
    model is and saved by the same functions. Under DDP it is a plain one on every rank: it is not trained."""

    def __init__(self, surroundings: ComponentContext, decay: float) -> None:
        self.average = AveragedModel(surroundings.model(), multi_avg_fn=get_ema_multi_avg_fn(decay))
        wrapped = surroundings.wrap(self.average.module)
        self.average.module = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def follow(self, model: nn.Module) -> None:
        self.average.update_parameters(model)

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        return {"ema": ModelState(self.average, options)}

    def leaves(self) -> Leaves:
        return {f"ema.{name}": leaf for name, leaf in snapshot_model(self.average).items()}

    def forget(self, seed: int) -> None:
        perturb_model(self.average, seed)


class Freezing(Component):
    """The parameters of the first layer are frozen in some steps, and trained in the others.

    Args:
        first: the first of these steps.
        last: the last one; None, if there is none.
    """

    def __init__(self, surroundings: ComponentContext, first: int = 0, last: int | None = None) -> None:
        self._first, self._last = first, last

    def prepare(self, model: nn.Module, step: int) -> None:
        frozen = self._first <= step and (self._last is None or step <= self._last)
        parameters = named_parameters(model)
        layer = next(iter(parameters)).rpartition(".")[0]
        for name, parameter in parameters.items():
            if name.rpartition(".")[0] == layer:
                parameter.requires_grad_(not frozen)


class GradScaling(Component):
    """Gradients of a loss that a `GradScaler` scales, by more the longer none overflows."""

    def __init__(self, surroundings: ComponentContext, **options: Any) -> None:
        self.scaler = torch.amp.GradScaler(surroundings.device.type, **options)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        return {"grad_scaler": self.scaler}

    def forget(self, seed: int) -> None:
        state = self.scaler.state_dict()
        counted = state["_growth_tracker"] + state["growth_interval"]  # a state has less
        self.scaler.load_state_dict({**perturbed(state), "_growth_tracker": counted})


class DataLoading(Component):
    """The order of batches by torchdata's `StatefulDataLoader`, which shuffles them anew in each epoch and
    goes on with the next one where it was saved.

    Args:
        batches: of an epoch.
        one_generator: whether the loader shuffles by the generator that it also draws the seeds of its
            workers from, `generator=`; else a sampler has one of its own.
    """

    def __init__(self, surroundings: ComponentContext, batches: int, one_generator: bool) -> None:
        self._batches, self._one_generator = batches, one_generator
        self._start_over(surroundings.data_seed)

    def _start_over(self, seed: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader  # not everyone has it
        from torchdata.stateful_dataloader.sampler import RandomSampler

        numbers, generator = range(1, self._batches + 1), torch.Generator().manual_seed(seed)
        if self._one_generator:
            order: dict[str, Any] = {"shuffle": True}
        else:
            own = torch.Generator().manual_seed(seed)
            order = {"sampler": RandomSampler(numbers, generator=own)}
        self.loader = StatefulDataLoader(numbers, batch_size=None, generator=generator, **order)
        self._epoch: Iterator[int] | None = None

    def number_of_batch(self, step: int) -> int:
        for _ in range(2):
            self._epoch = self._epoch or iter(self.loader)
            for number in self._epoch:
                return number
            self._epoch = None
        raise AssertionError("an epoch without batches")

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        return {"data_loader": self}

    def forget(self, seed: int) -> None:
        self._start_over(seed)
        self.number_of_batch(1)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)
        self._epoch = None
