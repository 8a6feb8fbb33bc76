"""The unwrapped twin of a parallel run: its passes over this rank's share of a batch, the noise of its
kernels, and its optimizer steps on the ranks' gradients."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcpbench.verify.perturb import jitter
from dcpbench.verify.snapshot import (
    Leaves,
    TensorLeaf,
    named_parameters,
    named_parts,
    of_kind,
    plain_fqn,
    retained,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.verify.training import step_tolerances
from dcpbench.verify.whole_tensors import Exchange, assembled, real_elements
from dcpbench.workloads.optimizers import each_of, repeats_on_parts
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.workload import Tensors, each_tensor

_JITTERED = 2
"""How many passes, or steps, that are a little different measure noise."""
_STEP_SHARE = 2**-9
"""By what part of themselves gradients are made different to measure a step that does not repeat exactly: its
optimizer may compute in bfloat16."""


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass over this rank's share of a batch: its loss; the gradients by FQN, elements
    in float64; the buffers after it."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: Leaves


class Twin:
    """A plain run that is in the state of a parallel one.

    Args:
        run: from `build_run.build_twin`.
        dtypes: those that the parallel run computes in.

    Attributes:
        computes_in: these, and those that modules return, as under autocast.
        steps_in_backward: whether its optimizer has stepped in a backward pass.
    """

    def __init__(self, run: TrainingRun, dtypes: Iterable[torch.dtype]) -> None:
        self.run, self.model = run, run.model
        self.computes_in = set(dtypes)
        self.steps_in_backward = False
        self._batch: Tensors = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by FQN, tied ones under the first of their names."""
        return {plain_fqn(self.model, name): value for name, value in self.model.named_parameters()}

    def begin(self, batch: Tensors, group: dist.ProcessGroup | None) -> None:
        """Begin a step with this batch; collective over `group`, if there is one: with the buffers of its
        first rank."""
        self._batch = batch
        for buffer in self.model.buffers() if group else ():
            received = buffer.to(torch.device("cpu"))
            dist.broadcast(received, 0, group=group)
            buffer.copy_(received)
        self._begin_again = self._kept()

    def loss_of_whole(self) -> float:
        """Return the loss of the whole batch."""
        with self._undone(), torch.no_grad(), self.run.random.drawn_from():
            return float(self.run.loss_of(self._batch))

    def passed(self) -> Pass:
        """Pass over this rank's share of the batch."""

        def stepped(*_: Any) -> None:
            self.steps_in_backward = True

        hooks = [one.register_step_pre_hook(stepped) for one in each_of(self.run.optimizer)]
        hooks += [module.register_forward_hook(self._note_dtype) for module in self.model.modules()]
        made = self._passed(self._batch)
        for hook in hooks:
            hook.remove()
        return made

    def passed_again(self) -> Pass:
        """Pass over it once more, as from the beginning of the step, of which nothing stays."""
        with self._undone():
            self._begin_again()
            return self._passed(self._batch)

    @contextmanager
    def changed(self, change: Callable[[nn.Module], None]) -> Iterator[None]:
        """Context manager: within, other parameters require gradients."""
        required = {value: value.requires_grad for value in self.model.parameters()}
        change(self.model)
        yield
        for value, was in required.items():
            value.requires_grad_(was)

    def jittered(self) -> list[Pass]:
        """Pass over it again, with parameters and inputs that are different by a rounding."""
        share = max((_unit(one) for one in self.computes_in), default=0.0)
        passes = []
        for number in range(_JITTERED):
            other = each_tensor(torch.clone, self._batch)
            each_tensor(lambda one: jitter([one], share, seed=_JITTERED) or one, other)
            with self._undone():
                self._begin_again()
                jitter(self.model.parameters(), share, seed=number)
                passes.append(self._passed(other))
        return passes

    def step(
        self, gradients: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], inexact: "Inexact"
    ) -> dict[str, torch.Tensor]:
        """Step on the ranks' gradients.

        Args:
            gradients: this rank's.
            whole: those of all ranks, whole.
            inexact: the parameters whose step does not repeat exactly.

        Returns:
            how far each element of these, and of their state, may be away.
        """
        others = list[Leaves]()
        for number in range(_JITTERED if inexact.measured else 0):
            optimizer = copy.deepcopy(self.run.optimizer.state_dict())
            with self._undone():
                self._set_gradients(gradients, whole)
                mine = [one.grad for one in self.model.parameters() if one.grad is not None]
                share = max([_STEP_SHARE, *(_unit(one.dtype) for one in mine)])  # less is rounded away
                jitter(mine, share, seed=number)
                self.run.optimizer.step()
                others.append(retained(state_of(self.run)))
            self.run.optimizer.load_state_dict(optimizer)
        self._set_gradients(gradients, whole)
        self.run.step()
        if not (inexact.measured or inexact.rounded):
            return {}
        state = state_of(self.run)
        rounded: dict[str, torch.Tensor] = {}
        for name, leaf in state.items():
            if isinstance(leaf, TensorLeaf) and _is_of(name, inexact.rounded) and leaf.extent.numel:
                size = leaf.local.double().abs()
                if inexact.other_kernels and leaf.dtype.is_floating_point:
                    rounded[name] = torch.full_like(size, torch.finfo(leaf.dtype).eps * float(size.max()))
                elif _is_narrow(leaf.local):
                    rounded[name] = torch.finfo(leaf.dtype).eps * size
        measured = step_tolerances(state, others).items()
        return rounded | {name: one for name, one in measured if _is_of(name, inexact.measured)}

    @torch.no_grad()
    def take_over(self, run: TrainingRun, exchange: Exchange) -> None:
        """Take the values of tensors from a run, whose step this one has repeated; collective."""
        tensors = assembled(state_of(run), exchange)
        for name, leaf in state_of(self.run).items():
            if name in tensors:
                leaf.local.copy_(tensors[name])

    def _passed(self, batch: Tensors) -> Pass:
        self.model.zero_grad()
        with self.run.recording() as gradients:
            loss = float(self.run.backward(batch).detach())
        elements = {name: real_elements(dense(value)) for name, value in gradients.items()}
        return Pass(loss, elements, retained(of_kind("buffer", snapshot_model(self.model))))

    def _note_dtype(self, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self.computes_in.add(output.dtype)

    def _kept(self) -> Callable[[], None]:
        """Return what restores parameters, buffers and generators as they are now, and the attributes of
        modules, such as a counter of steps."""
        model, states = self.model, dict(self.run.random.states)
        held = [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
        attributes = [(module, dict(vars(module))) for module in model.modules()]

        @torch.no_grad()
        def restore() -> None:
            self.run.random.states = dict(states)
            for module, before in attributes:
                vars(module).clear()
                vars(module).update(before)
            for tensor, was in zip((*model.parameters(), *model.buffers()), held, strict=True):
                tensor.copy_(was)

        return restore

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Context manager: restore what changes within."""
        restore = self._kept()
        yield
        restore()

    def _set_gradients(
        self, gradients: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name in gradients and gradients[name].is_sparse:
                parameter.grad = gradients[name].clone()
            elif name in whole:
                parameter.grad = whole[name].view_as(parameter).to(parameter.device, copy=True)


@dataclass(frozen=True)
class Inexact:
    """The parameters whose optimizer step does not do, bit for bit, on whole tensors what it does on parts.

    Args:
        measured: those where it may differ by as much as it does for other gradients.
        rounded: those where it may differ by a rounding: of 16 bits, or of any type, in relation to the
            largest element, on `other_kernels`.
    """

    measured: frozenset[str] = frozenset()
    rounded: frozenset[str] = frozenset()
    other_kernels: bool = False

    @property
    def bound(self) -> str:
        """How steps are compared, as a row has it."""
        return "measured" if self.measured else "rounding" if self.rounded else "bits"


def inexact_steps(run: TrainingRun, twin: TrainingRun, split: bool) -> Inexact:
    """Find the steps that do not repeat exactly.

    Where tensors are `split` these are steps of optimizers that are not known to go by elements. Fused steps,
    and those of 16 bits, may differ by a rounding: torch computes the elements at the end of a tensor, which
    do not fill a vector, in another way. So may all, where the parameters are on another device than the
    twin's.
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


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2


def _is_of(name: str, parameters: Iterable[str]) -> bool:
    """Whether a piece of state is one of these parameters, or what an optimizer has of one."""
    return name in parameters or name.startswith(tuple(f"state.{one}." for one in parameters))


def state_of(run: TrainingRun) -> Leaves:
    """Tensors of model and component; state and hyperparameters of the optimizer."""
    parts = named_parts(run.model)
    model = snapshot_model(run.model, parts)
    held = {**of_kind("param", model), **of_kind("buffer", model), **run.component.leaves()}
    tensors = {name: leaf for name, leaf in held.items() if isinstance(leaf, TensorLeaf)}
    optimizer = snapshot_optimizer(run.model, run.optimizer, parts)
    return {**tensors, **{name: leaf for name, leaf in optimizer.items() if not name.endswith(".params")}}


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The same gradient, not sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _unit(dtype: torch.dtype) -> float:
    """A rounding in a dtype: the distance of 1 to the next number; half of it in those of 16 bits."""
    return torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else 1.0)
