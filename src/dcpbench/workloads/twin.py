"""The unwrapped twin of a parallel run: its forward and backward passes over this rank's share of a batch,
the noise of its kernels, and its optimizer steps with the ranks' gradients."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcpbench.verify.layout import ParameterParts, called_modules
from dcpbench.verify.losses import rounding
from dcpbench.verify.perturb import jitter
from dcpbench.verify.snapshot import (
    Leaves,
    TensorLeaf,
    named_parameters,
    named_parts,
    names_parameters,
    of_kind,
    plain_fqn,
    retained,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.verify.training import step_tolerances
from dcpbench.verify.whole_tensors import Exchange, assembled, dense, magnitudes, real_elements
from dcpbench.workloads.batch import Batch, mapped
from dcpbench.workloads.generators import set_generator, state_of_generator
from dcpbench.workloads.optimizers import each_of, kept, repeats_on_parts
from dcpbench.workloads.parallelisms import is_trained
from dcpbench.workloads.training_run import TrainingRun

_JITTERED = 2
"""The number of passes or steps with slightly different values that measure noise."""
_CONTAINERS = (dict, OrderedDict, list, set, deque)
_STEP_SHARE = 2**-9
"""The relative change of gradients that measures how exactly a step repeats, for optimizers that compute in
bfloat16."""


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass: the loss, the gradients by FQN with elements in float64, their magnitudes
    summed over the parts that accumulate, and the buffers after it."""

    loss: float
    gradients: dict[str, torch.Tensor]
    sizes: dict[str, torch.Tensor]
    buffers: Leaves


class Twin:
    """An unwrapped run in the state of a parallel one.

    Args:
        run: from `build_run.build_twin`.
        dtypes: that the parallel run computes in.

    Attributes:
        computes_in: these dtypes, and those of module outputs, as under autocast.
        loss_is_collective: whether the loss of this rank's share needed the other ranks.
    """

    def __init__(self, run: TrainingRun, dtypes: Iterable[torch.dtype]) -> None:
        self.run, self.model = run, run.model
        self.computes_in = set(dtypes)
        self.loss_is_collective = False
        self._batch: Batch = None
        self._group: dist.ProcessGroup | None = None
        self._change: Callable[[nn.Module], None] | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by FQN, tied ones under their first name."""
        return {plain_fqn(self.model, name): value for name, value in self.model.named_parameters()}

    def begin(self, batch: Batch, group: dist.ProcessGroup | None) -> None:
        """Begin a step with this batch, and with the buffers of the first rank of `group`, if there is one;
        collective over it."""
        self._batch, self._group = batch, group
        if group:
            receive_buffers(self.model, group)
        self._begin_again = self._kept()

    def loss_of_whole(self, at_beginning: bool = True) -> float:
        """Return the loss of the global batch, in the state at the beginning of the step or in this one."""
        with self._undone(), torch.no_grad():
            if at_beginning:
                self._begin_again()
            with self.run.random.drawn_from():
                return float(self.run.loss_of(self._batch))

    def passed(self) -> Pass:
        """Make the pass of the step. Note whether the loss has a collective: the model is unwrapped."""
        before = _collectives()
        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.callback(module.register_forward_hook(self._note_dtype).remove)
            made = self._passed(self._batch)
        self.loss_is_collective = _collectives() != before
        return made

    def passed_again(self) -> Pass:
        """Make the pass again from the state at the beginning of the step, and undo its effects."""
        with self._undone():
            self._restart()
            return self._passed(self._batch)

    @contextmanager
    def changed(self, change: Callable[[nn.Module], None]) -> Iterator[None]:
        """Context manager: passes that are made again begin with a change of which parameters of the model
        require gradients."""
        required = {value: value.requires_grad for value in self.model.parameters()}
        self._change = change
        try:
            yield
        finally:
            self._change = None
            for value, was in required.items():
                value.requires_grad_(was)

    def jittered(self) -> list[Pass]:
        """Make passes with parameters, and inputs that are not a user's, that differ by a rounding, and undo
        their effects."""
        return [self._passed(batch) for batch in self._jittered()]

    def _jittered(self) -> Iterator[Batch]:
        """Yield the batch, while parameters, and inputs that are not a user's, differ by a rounding."""
        share = max((_unit(one) for one in self.computes_in), default=0.0)

        def jittered(value: Any) -> Any:
            jitter([copied := value.clone()], share, seed=_JITTERED)
            return copied

        for number in range(_JITTERED):
            # A user's inputs can be labels or masks, which a loss accepts exactly as they are.
            other = self._batch if self.run.is_users else mapped(jittered, self._batch)
            with self._undone():
                self._restart()
                jitter(self.model.parameters(), share, seed=number)
                yield other

    def step(
        self,
        gradients: Mapping[str, torch.Tensor],
        full: Mapping[str, torch.Tensor],
        inexact: "Inexact",
        grad_norm: float | None,
    ) -> dict[str, torch.Tensor]:
        """Step with the ranks' gradients.

        Args:
            gradients: this rank's parts.
            full: full gradients.
            inexact: the parameters whose step does not repeat exactly.
            grad_norm: the norm by which the ranks have clipped them.

        Returns:
            the tolerance of each element of these parameters and of their optimizer state.
        """
        others = list[Leaves]()
        for number in range(inexact.repeats):
            with ExitStack() as undone:
                undone.callback(kept(self.run.optimizer, self.model))
                undone.enter_context(self._undone())
                self._set_gradients(gradients, full)
                if grad_norm is not None:
                    self.run.clip(grad_norm)
                mine = [one.grad for one in self.model.parameters() if one.grad is not None]
                jitter_gradients(mine, number)
                self.run.optimizer.step()
                others.append(retained(state_of(self.run)))
        self._set_gradients(gradients, full)
        self.run.step(grad_norm)
        return self.tolerances(inexact, others)

    def tolerances(self, inexact: "Inexact", others: list[Leaves], steps: int = 1) -> dict[str, torch.Tensor]:
        """Return the tolerance of each element of the present state that is not exact after this number of
        steps, by name; `others` are states after steps with slightly different gradients."""
        if not (inexact.measured or inexact.rounded):
            return {}
        state = state_of(self.run)
        rounded: dict[str, torch.Tensor] = {}
        for name, leaf in state.items():
            if isinstance(leaf, TensorLeaf) and _is_of(name, inexact.rounded) and leaf.extent.numel:
                size = leaf.local.double().abs()
                if inexact.other_kernels and leaf.dtype.is_floating_point:
                    rounded[name] = torch.full_like(
                        size, torch.finfo(leaf.dtype).eps * float(size.max()) * steps
                    )
                elif _is_narrow(leaf.local):
                    rounded[name] = torch.finfo(leaf.dtype).eps * size * steps
        measured = step_tolerances(state, others).items()
        return rounded | {name: one for name, one in measured if _is_of(name, inexact.measured)}

    @torch.no_grad()
    def take_over(self, run: TrainingRun, exchange: Exchange) -> None:
        """Copy the tensors of a run after the same step; collective."""
        tensors = assembled(state_of(run), exchange)
        for name, leaf in state_of(self.run).items():
            if name in tensors:
                leaf.local.copy_(tensors[name])

    def _restart(self) -> None:
        """Go back to the beginning of the step, and make the change of `changed`."""
        self._begin_again()
        if self._change:
            self._change(self.model)

    def _passed(self, batch: Batch) -> Pass:
        self.model.zero_grad()
        sizes: dict[str, torch.Tensor] = {}

        def add(name: str, gradient: torch.Tensor) -> None:
            sizes[name] = magnitudes(gradient) + sizes.get(name, 0)

        accumulated = self.parameters.items() if self.run.accumulate > 1 else ()
        with ExitStack() as hooks, self.run.recording() as gradients:
            for name, one in accumulated:
                if one.requires_grad:
                    hooks.callback(one.register_hook(partial(add, name)).remove)
            loss = float(self.run.backward(batch).detach())
        elements = {name: real_elements(dense(value)) for name, value in gradients.items()}
        sizes = sizes or {name: magnitudes(value) for name, value in gradients.items()}
        return Pass(loss, elements, sizes, retained(of_kind("buffer", snapshot_model(self.model))))

    def _note_dtype(self, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self.computes_in.add(output.dtype)

    def _kept(self) -> Callable[[], None]:
        """Return a function that restores parameters, buffers, generators, objects that are saved in addition
        and the attributes of modules, such as a counter of steps, to what they are now."""
        model, states = self.model, dict(self.run.random.states)
        restore_objects = self.run.saved.kept()
        drawn = [(one, state_of_generator(one)) for one in self.run.random.of_model().values()]
        held = [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
        attributes = [(module, dict(vars(module))) for module in model.modules()]
        # Hooks, buffers and a user's own lists are in containers that a pass changes in place.
        contents = [
            (value, value.copy())
            for _, before in attributes
            for value in before.values()
            if type(value) in _CONTAINERS
        ]

        @torch.no_grad()
        def restore() -> None:
            self.run.random.states = dict(states)
            restore_objects()
            for generator, state in drawn:
                set_generator(generator, state)
            for module, before in attributes:
                vars(module).clear()
                vars(module).update(before)
            for value, was in contents:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(was)
            for tensor, was in zip((*model.parameters(), *model.buffers()), held, strict=True):
                tensor.copy_(was)

        return restore

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Context manager: undo all changes at its end."""
        restore = self._kept()
        try:
            yield
        finally:
            restore()

    def _set_gradients(self, gradients: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name in gradients and gradients[name].is_sparse:
                parameter.grad = gradients[name].clone()
            elif name in full:
                parameter.grad = full[name].view_as(parameter).to(parameter.device, copy=True)


@dataclass(frozen=True)
class Inexact:
    """The parameters whose optimizer step on full tensors is not, bit for bit, the step on parts.

    Args:
        measured: the step may differ by as much as it does for slightly different gradients.
        rounded: the step may differ by a rounding in 16 bits or, on `other_kernels`, by one of the largest
            element in any dtype.
    """

    measured: frozenset[str] = frozenset()
    rounded: frozenset[str] = frozenset()
    other_kernels: bool = False

    @property
    def repeats(self) -> int:
        """The number of steps with slightly different gradients that measure the difference."""
        return _JITTERED if self.measured else 0

    @property
    def bound(self) -> str:
        """The name of the bound of steps, a column of the row."""
        return "measured" if self.measured else "rounding" if self.rounded else "bits"


def jitter_gradients(gradients: Sequence[torch.Tensor], number: int) -> None:
    """Change gradients slightly, in place, differently for each number."""
    share = max([_STEP_SHARE, *(_unit(one.dtype) for one in gradients)])  # less would round away
    jitter(gradients, share, seed=number)


def inexact_steps(run: TrainingRun, twin: TrainingRun, split: bool) -> Inexact:
    """Find the steps that do not repeat exactly.

    If tensors are `split` these are the steps of optimizers that are not known to work by elements. Fused
    steps, and steps in 16 bits, may differ by a rounding: torch has another kernel for the last elements of a
    tensor, which do not fill a vector. All may if the parameters are on another device than the twin's.
    """
    names = named_parameters(twin.model)
    if any(value.device.type != twin.world.device.type for value in run.model.parameters()):
        return Inexact(rounded=frozenset(names), other_kernels=True)
    if not split:
        return Inexact()
    reducing = [one for one in each_of(twin.optimizer) if not repeats_on_parts(one)]
    theirs = {id(value) for one in reducing for group in one.param_groups for value in group["params"]}
    measured = frozenset(name for name, value in names.items() if id(value) in theirs)
    fused = any(group.get("fused") for group in twin.optimizer.param_groups)
    rounded = frozenset(name for name, value in names.items() if fused or _is_narrow(value))
    return Inexact(measured, rounded - measured, other_kernels=fused)


def receive_buffers(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace buffers by those of the first rank, as DDP does before a forward pass; collective."""
    for buffer in chain(*(module.buffers() for module in called_modules(model) if is_trained(module))):
        received = buffer.to(torch.device("cpu"))
        dist.broadcast(received, 0, group=group)
        buffer.data.copy_(received)  # a backward pass may still need it, as with DDP


def _collectives() -> list[int]:
    """Return how many collectives the backends of each process group of this process have begun."""
    counts = list[int]()
    groups: Any = dist.distributed_c10d._world.pg_names
    for group in groups:
        for device in group._device_types:
            with suppress(RuntimeError):  # a backend that does not count
                counts.append(group._get_backend(device)._get_sequence_number_for_group())
    return counts


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2


def _is_of(name: str, parameters: Iterable[str]) -> bool:
    """Return whether a name is of one of these parameters, or of its optimizer state."""
    return name in parameters or name.startswith(tuple(f"state.{one}." for one in parameters))


def state_of(run: TrainingRun, parts: ParameterParts | None = None) -> Leaves:
    """Return the tensors of model and component, and the state and hyperparameters of the optimizer; `parts`
    are the `named_parts` of the model, if known."""
    parts = parts or named_parts(run.model)
    model = snapshot_model(run.model, parts)
    held = {**of_kind("param", model), **of_kind("buffer", model), **run.component.saved.leaves()}
    held |= run.saved.module_leaves()
    tensors = {name: leaf for name, leaf in held.items() if isinstance(leaf, TensorLeaf)}
    optimizer = snapshot_optimizer(run.model, run.optimizer, parts)
    return tensors | {name: leaf for name, leaf in optimizer.items() if not names_parameters(name, leaf)}


def _unit(dtype: torch.dtype) -> float:
    """Return the relative rounding of a dtype: the distance from 1 to the next number, half of it in 16
    bits; 0 for a dtype that nothing is trained in, such as that of frozen integers."""
    return rounding([dtype]) * (0.5 if dtype.itemsize == 2 else 1.0)
