"""The unwrapped twin of a parallel run: it takes the run's steps on the same share of a batch, and at each
use of gradients it continues with the ranks' gradients in place of its own."""

import copy
import math
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcpbench.compare.controls import jitter
from dcpbench.compare.leaves import same_leaves
from dcpbench.compare.losses import coarsest_eps
from dcpbench.compare.whole_tensors import dense, magnitudes, real_elements
from dcpbench.core.state import Name
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import CLIPPING, GradientUse
from dcpbench.state.layout import called_modules
from dcpbench.state.snapshot import (
    Leaves,
    TensorLeaf,
    named_parameters,
    of_kind,
    plain_fqn,
    retained,
    snapshot_model,
)
from dcpbench.twin.gradients import measured_tolerances
from dcpbench.workloads.batch import Batch, map_tensors
from dcpbench.workloads.optimizers import each_optimizer, repeats_on_parts
from dcpbench.workloads.parallelisms import is_trained

_JITTERED = 2
"""The number of passes or steps with slightly different values that measure noise."""
_STEP_EPSILON = 2**-9
"""The relative change of gradients that measures how exactly a step repeats, for optimizers that compute in
bfloat16."""
_AFTER_USE = 16
"""The magnitude of a gradient that only torch's clipping has changed since its last use, as a multiple of it:
a norm of parts is rounded several times."""


@dataclass(frozen=True)
class TakenStep:
    """A step that a twin has taken.

    Args:
        loss: of this rank's share.
        uses: its gradients at each use.
        moves: whether it has moved parameters between two backward passes other than by a use.
        buffers: those that a jittered step writes, after it.
        worst: the effect of roundings that all have the worst sign as a multiple of that of random ones, in
            the sum over a module's input that gives such a buffer.
    """

    loss: float
    uses: list[GradientUse]
    moves: bool = False
    buffers: Leaves = field(default_factory=dict)
    worst: float = 1.0

    def has_uses_of(self, uses: Sequence[GradientUse]) -> bool:
        """Return whether gradients were used as in these uses."""
        return [use.by for use in self.uses] == [use.by for use in uses]


class Twin:
    """An unwrapped run in the state of a parallel one. Steps that it takes in addition are taken by a copy.

    Args:
        run: from `build_run.build_twin`.
        dtypes: that the parallel run computes in.
        build: builds such a run again, if steps are taken in addition.
        step_tolerance: the parameters whose step does not repeat exactly.

    Attributes:
        compute_dtypes: these dtypes, and those of module outputs, as under autocast.
        why_not_copied: why it could not be copied at the beginning of the step.
    """

    def __init__(
        self,
        run: OwnRun,
        dtypes: Iterable[torch.dtype],
        build: Callable[[], OwnRun] | None,
        step_tolerance: "StepTolerance",
    ) -> None:
        self.run, self._build, self._tolerance = run, build, step_tolerance
        self._copy = partial(copy_run, steps=bool(run.user_step or step_tolerance.repeats))
        self.compute_dtypes = set(dtypes)
        self.why_not_copied: str | None = None
        self._batch: Batch = None
        self._group: dist.ProcessGroup | None = None
        self._grad_norm: float | None = None
        self._copies: tuple[OwnRun, OwnRun] | None = None
        """The beginning of the step, and a copy of that which takes a step in addition."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by FQN, tied ones under their first name."""
        return _parameters(self.run.model)

    def begin(self, batch: Batch, group: dist.ProcessGroup | None, grad_norm: float | None = None) -> None:
        """Begin a step, and keep a copy of its beginning if steps are taken in addition.

        Args:
            batch: of the step.
            group: if each forward pass gets the buffers of its first rank.
            grad_norm: the norm by which the ranks have clipped their gradients.
        """
        self._batch, self._group, self._grad_norm = batch, group, grad_norm
        if not self._build:
            return
        if self._copies is None:  # on all ranks at once: a user's code can rendezvous
            self._copies = self._build(), self._build()
        try:
            self._copy(self.run, self._copies[0])
        except Exception as error:  # noqa: BLE001 - a user's object may refuse it in any way
            self.why_not_copied = f"the model cannot be copied: {type(error).__name__}: {error}"

    def copy_at_beginning(self) -> OwnRun:
        """Return a copy of the beginning of the step. The next copy takes its place."""
        assert self._copies, "built with the first step"
        beginning, run = self._copies
        self._copy(beginning, run)
        return run

    def take_step(self, uses: Sequence[GradientUse]) -> TakenStep:
        """Take the step with the ranks' gradients."""
        return self._taken(self.run, self._batch, uses)

    @property
    def written_buffers(self) -> Leaves:
        """The floating buffers that the step has changed: no copy of them, if it was not copied before."""
        if self._copies is None:
            return {}
        buffers = _floating_buffers(self.run)
        same = same_leaves(_floating_buffers(self._copies[0]), buffers)
        return {name: leaf for name, leaf in buffers.items() if name not in same}

    def jittered_steps(self, uses: Sequence[GradientUse], draws: bool) -> list[TakenStep]:
        """Take steps that differ by a rounding in parameters, in inputs that are not a user's, in the buffers
        that the step writes and the inputs of their modules; and in random numbers, if it `draws` some: the
        ranks draw others than the twin."""
        return [self._jittered(uses, draws, number) for number in range(_JITTERED)]

    def _jittered(self, uses: Sequence[GradientUse], draws: bool, number: int) -> TakenStep:
        """Take one such step, another one for each number."""
        epsilon, written, worst = (
            max(map(_unit, self.compute_dtypes), default=0.0),
            self.written_buffers,
            [1.0],
        )
        run = self.copy_at_beginning()

        def jittered(value: torch.Tensor, seed: int = _JITTERED, least: int = -1) -> torch.Tensor:
            jitter([copied := value.clone()], epsilon, seed, least)
            return copied

        def with_jittered_input(size: int, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if not inputs or not isinstance(inputs[0], torch.Tensor):
                return inputs
            worst.append(math.sqrt(inputs[0].numel() / size))
            # All up: random signs cancel in a mean, which is then rounded to the same number.
            return (jittered(inputs[0], number, least=3), *inputs[1:])

        if draws:
            run.random.seed(number)
        buffers = _floating_buffers(run)
        jitter(chain(run.model.parameters(), (buffers[name].local for name in written)), epsilon, seed=number)
        of_model = {name: leaf for name, leaf in written.items() if len(name) == 1}
        sizes = {str(name[0]).rpartition(".")[0]: leaf.extent.numel for name, leaf in of_model.items()}
        with ExitStack() as hooks:
            for name, module in run.model.named_modules():
                if size := sizes.get(name):
                    change = partial(with_jittered_input, size)
                    hooks.callback(module.register_forward_pre_hook(change).remove)
            # A user's inputs can be labels or masks, which a loss accepts exactly as they are.
            taken = self._taken(
                run, self._batch if run.has_user_code else map_tensors(jittered, self._batch), uses
            )
        buffers = _floating_buffers(run)
        return replace(taken, buffers=retained({name: buffers[name] for name in written}), worst=max(worst))

    def tolerances(
        self, uses: Sequence[GradientUse], jittered: Sequence[TakenStep]
    ) -> dict[Name, torch.Tensor]:
        """Return the tolerance of each element of the present state that is not exact, by name, after a step
        and these jittered ones."""
        step_tolerance = self._tolerance
        if not (step_tolerance.measured or step_tolerance.rounded or jittered):
            return {}
        state = self.run.trained_state()
        rounded: dict[Name, torch.Tensor] = {}
        for name, leaf in state.items():
            if isinstance(leaf, TensorLeaf) and _is_of(name, step_tolerance.rounded) and leaf.extent.numel:
                size = leaf.local.double().abs() * len(uses)
                if step_tolerance.other_kernels and leaf.dtype.is_floating_point:
                    rounded[name] = torch.full_like(size, torch.finfo(leaf.dtype).eps * float(size.max()))
                elif _is_narrow(leaf.local):
                    rounded[name] = torch.finfo(leaf.dtype).eps * size
        others = [self._state_after(uses, number) for number in range(step_tolerance.repeats)]
        measured = {
            name: tolerance
            for name, tolerance in measured_tolerances(state, others).items()
            if _is_of(name, step_tolerance.measured)
        }
        worst = max((taken_again.worst for taken_again in jittered), default=1.0)
        of_buffers = measured_tolerances(state, [taken_again.buffers for taken_again in jittered], worst)
        return of_buffers | rounded | measured

    def _state_after(self, uses: Sequence[GradientUse], number: int) -> Leaves:
        """Return the state after a step with slightly different gradients, others for each number."""
        others = [replace(use, full={name: full.clone() for name, full in use.full.items()}) for use in uses]
        for use in others:
            epsilon = max(
                [_STEP_EPSILON, *(_unit(full.dtype) for full in use.full.values())]
            )  # less rounds away
            jitter(use.full.values(), epsilon, seed=number)
        run = self.copy_at_beginning()
        self._taken(run, self._batch, others)
        return retained(run.trained_state())

    def _taken(self, run: OwnRun, batch: Batch, uses: Sequence[GradientUse]) -> TakenStep:
        names = {value: name for name, value in _parameters(run.model).items()}
        sizes: dict[str, torch.Tensor] = {}
        sums: dict[str, int] = {}
        taken: list[GradientUse] = []
        before: dict[str, torch.Tensor] = {}
        moved: set[str] = set()

        def add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
            name, size = names[parameter], magnitudes(gradient)
            if run.user_step:
                if not torch.equal(before.setdefault(name, parameter), parameter):
                    moved.add(name)
                before[name] = parameter.detach().clone()
            if parameter.grad is None or not bool(dense(parameter.grad).any()):
                sizes[name], sums[name] = size, 1
            else:
                sizes[name] = sizes.get(name, 0) + size
                sums[name] = sums.get(name, 1) + 1

        def use(by: str, parameters: list[nn.Parameter]) -> None:
            number, parameters_by_name = (
                len(taken),
                {names[value]: value for value in parameters if value in names},
            )
            gradients = {
                name: real_elements(dense(value.grad))
                for name, value in parameters_by_name.items()
                if value.grad is not None
            }
            magnitudes_of = {
                # Bounds are for as many sums as parts accumulate.
                name: sums[name] / run.accumulate * sizes[name] if name in sums else _AFTER_USE * value.abs()
                for name, value in gradients.items()
            }
            taken.append(GradientUse(by, gradients, sizes=magnitudes_of))
            for name in parameters_by_name if by != CLIPPING else ():  # the ranks' gradient moves it
                before.pop(name, None)
            if number < len(uses) and uses[number].by == by:
                for name, value in parameters_by_name.items():
                    _replace_gradient(value, name, uses[number])
                    sums.pop(name, None)

        run.model.zero_grad()
        with ExitStack() as hooks:
            for trained in names:
                if trained.requires_grad:
                    hooks.callback(trained.register_hook(partial(add, trained)).remove)
            for module in run.model.modules():
                hooks.callback(module.register_forward_hook(self._note_dtype).remove)
            for module in called_modules(run.model) if self._group else ():
                hooks.callback(module.register_forward_pre_hook(self._receive_buffers).remove)
            loss = float(run.take_step(batch, use, self._grad_norm))
        return TakenStep(loss, taken, bool(moved))

    def _receive_buffers(self, module: nn.Module, _: Any) -> None:
        """Replace buffers by those of the first rank, as DDP does before a forward pass; collective."""
        trained = filter(is_trained, called_modules(module))
        for buffer in chain.from_iterable(part.buffers() for part in trained):
            received = buffer.to(torch.device("cpu"))
            dist.broadcast(received, 0, group=self._group)
            buffer.data.copy_(received)  # a backward pass may still need it, as with DDP

    def _note_dtype(self, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self.compute_dtypes.add(output.dtype)


def _floating_buffers(run: OwnRun) -> Leaves:
    buffers = of_kind("buffer", {**snapshot_model(run.model), **run.saved.module_leaves()})
    return {name: leaf for name, leaf in buffers.items() if leaf.dtype.is_floating_point}


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_fqn(model, name): value for name, value in model.named_parameters()}


def _replace_gradient(parameter: nn.Parameter, name: str, use: GradientUse) -> None:
    """Give a parameter of the twin the ranks' gradient at a use."""
    part, full = use.gradients.get(name), use.full.get(name)
    if part is not None and part.is_sparse:
        parameter.grad = part.clone()
    elif full is None:
        parameter.grad = None
    elif parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = full.view_as(parameter).to(parameter.device, copy=True)
    else:  # in place: torch's clipping already has it
        with torch.no_grad():
            parameter.grad.copy_(full.view_as(parameter))


@torch.no_grad()
def copy_run(run: OwnRun, copied_to: OwnRun, steps: bool) -> None:
    """Bring a run into the state of another unwrapped one that was built in the same way. Functions and hooks
    stay: they refer to objects of the run that they were built for.

    Args:
        steps: whether the optimizers' state is copied, so that steps can be taken.
    """
    parameters = [*zip(run.model.parameters(), copied_to.model.parameters(), strict=True)]
    owners: list[tuple[Any, Any]] = [*zip(run.model.modules(), copied_to.model.modules(), strict=True)]
    if steps:
        owners += zip(each_optimizer(run.optimizer), each_optimizer(copied_to.optimizer), strict=True)
    memo = {id(ours): theirs for ours, theirs in (*parameters, *owners)}
    for ours, theirs in owners:
        copied = copy.deepcopy(_copied_attributes(vars(ours), vars(theirs)), memo)
        for name in vars(theirs).keys() - vars(ours).keys():
            del vars(theirs)[name]
        vars(theirs).update(copied)
    for value, theirs in parameters:
        theirs.copy_(value)
        theirs.requires_grad_(value.requires_grad)
    copied_to.random.copy_from(run.random)
    copied_to.saved.copy_from(run.saved)


def _copied_attributes(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module or an optimizer that are copied: hooks only if a pass has added some,
    and no outputs that it has left."""

    def is_result(values: dict[str, Any], name: str) -> bool:
        return isinstance(values.get(name), torch.Tensor) and not values[name].is_leaf

    hooks = {name for name in ours if "_hooks" in name}
    if any(len(ours[name]) != len(theirs.get(name, ())) for name in hooks):
        hooks = set()
    return {
        name: value
        for name, value in ours.items()
        if name not in hooks
        and not isinstance(value, FunctionType | MethodType)
        and (not is_result(ours, name) or is_result(theirs, name))
    }


@dataclass(frozen=True)
class StepTolerance:
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


def tolerance_of_steps(run: OwnRun, twin: OwnRun, split: bool) -> StepTolerance:
    """Find the steps that do not repeat exactly.

    If tensors are `split` these are the steps of optimizers that are not known to work by elements. Fused
    steps, and steps in 16 bits, may differ by a rounding: torch has another kernel for the last elements of a
    tensor, which do not fill a vector. All may if the parameters are on another device than the twin's.
    """
    names = named_parameters(twin.model)
    if any(value.device.type != twin.world.device.type for value in run.model.parameters()):
        return StepTolerance(rounded=frozenset(names), other_kernels=True)
    if not split:
        return StepTolerance()
    groups = [
        group
        for optimizer in each_optimizer(twin.optimizer)
        if not repeats_on_parts(optimizer)
        for group in optimizer.param_groups
    ]
    theirs = {id(value) for group in groups for value in group["params"]}
    measured = frozenset(name for name, value in names.items() if id(value) in theirs)
    fused = any(group.get("fused") for group in twin.optimizer.param_groups)
    rounded = frozenset(name for name, value in names.items() if fused or _is_narrow(value))
    return StepTolerance(measured, rounded - measured, other_kernels=fused)


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 2


def _is_of(name: Name, parameters: Container[str]) -> bool:
    """Return whether a name is of one of these parameters, or of its optimizer state."""
    return name[0] in parameters or (name[0] == "state" and name[1] in parameters)


def _unit(dtype: torch.dtype) -> float:
    """Return the relative rounding of a dtype: the distance from 1 to the next number, half of it in 16
    bits; 0 for a dtype that nothing is trained in, such as that of frozen integers."""
    return coarsest_eps([dtype]) * (0.5 if dtype.itemsize == 2 else 1.0)
