"""Training, compared one step at a time: an unwrapped twin stands at the ranks' parameters at every step,
computes its own gradients of the same batch, and then steps on the ranks' gradients."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from dcpbench.config.mesh import SHARE_DATA, dp_degree
from dcpbench.records.findings import Finding
from dcpbench.scenarios import known_defects
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.plain_runs import copy_tensors, exchange_of
from dcpbench.verify.compare_layouts import compare_replicas, gathered
from dcpbench.verify.perturb import all_different, compared_names, controllable, jitter
from dcpbench.verify.snapshot import (
    Leaves,
    TensorLeaf,
    local_part,
    named_parameters,
    plain_fqn,
    retained,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.verify.tolerances import loss_name, losses_close, rounding
from dcpbench.verify.training import (
    GradientBound,
    GradientPart,
    TwinGradient,
    changed_beyond,
    compare_gradient,
    compare_step,
    loss_share,
    step_tolerances,
)
from dcpbench.verify.whole_tensors import Parts, any_rank, real_elements, summed
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.optimizers import each_of, repeats_on_parts
from dcpbench.workloads.parallelisms import broadcasts_buffers, reduced_in, runs_other_kernels
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.workload import Tensors, each_tensor

GRADIENT, STEP, REPLICAS, LOSS = "gradient_close", "step_equal", "replicas_equal", "batch_loss_close"
CHECKS = (GRADIENT, STEP, REPLICAS, LOSS)
"""The checks of this module."""

_JITTERED = 2
"""How many twins with parameters and inputs that are a little different measure noise."""
_STEP_SHARE, _OTHER_DEVICE_SHARE = 2**-9, 2**-22
"""By what part of themselves gradients are made different to measure a step that does not repeat exactly:
of an optimizer that reduces over tensors, maybe in bfloat16; on another device than the twin's."""

_IN_BACKWARD = "the optimizer steps in the backward pass, and the twin cannot step on other gradients"


@dataclass
class _Seen:
    """What one check has seen: what it found, what it compared, for which names its control fired."""

    found: list[Finding] = field(default_factory=list)
    compared: dict[str, bool] = field(default_factory=dict)
    fired: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pass:
    """A forward and backward pass of the twin on this rank's share of the batch: its loss, the gradients by
    FQN, elements in float64, and the buffers after it."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: Leaves


@dataclass(frozen=True)
class _Losses:
    """The losses of a step: the ranks' mean, the twin's, and the mean magnitude of those of its shares."""

    ranks: float
    twin: float
    size: float


class Lockstep:
    """Trains a run beside its twin and records the checks of training.

    Args:
        twin: the unwrapped model, in the state of the run.
        where: which run it is, in words.
    """

    def __init__(self, cell: Cell, run: TrainingRun, twin: TrainingRun, where: str) -> None:
        self._cell, self._run, self._twin, self._where = cell, run, twin, where
        self._seen = {check: _Seen() for check in (GRADIENT, STEP)}
        self._losses: dict[int, _Losses] = {}
        self._exchange = exchange_of(cell.world, run)
        self._defects = known_defects.gradients_of(cell, twin)
        self._parts = Parts.of(_of_kind("param", snapshot_model(run.model)), self._exchange)
        self._noise = runs_other_kernels(cell.config, run.sizes)
        self._reduced_in, self._why_no_gradient = reduced_in(run.model, cell.config.parallel)
        self._computes_in = set(run.dtypes)
        self._inexact, self._step_share = self._steps_that_do_not_repeat()
        self._bound_used, self._alive = 0.0, False
        self._stopped: str | None = None
        self._batch: Tensors = None

    @property
    def twin_losses(self) -> list[float]:
        """The twin's losses of the steps taken."""
        return [one.twin for one in self._losses.values()]

    def train(self, batches: Batches, until: int) -> list[float]:
        """Train the run up to and including step `until`; return the losses of the steps."""
        cell, run, before = self._cell, self._run, len(self._run.train_state.losses)
        with cell.phase("verify", "training"):
            self._compare_state(run.train_state.step, {})
        while run.train_state.step < until:
            with cell.phase("train"), run.recording() as gradients:
                run.train(batches, run.train_state.step + 1)
            if self._stopped is None:
                with cell.phase("verify", "training"):
                    self._follow(batches, gradients)
        with cell.phase("verify", "training"):
            self._record()
        return run.train_state.losses[before:]

    def _steps_that_do_not_repeat(self) -> tuple[set[str], float]:
        """The parameters whose optimizer does not do, bit for bit, the same with parts as with whole tensors,
        and by what part gradients are made different to measure by how much."""
        twin, here = self._twin, named_parameters(self._run.model)
        if any(value.device.type != self._twin.world.device.type for value in here.values()):
            return {*named_parameters(twin.model)}, _OTHER_DEVICE_SHARE
        several = [] if self._parts.complete else each_of(twin.optimizer)
        of_one = {
            id(value)
            for one in several
            if not repeats_on_parts(one)
            for group in one.param_groups
            for value in group["params"]
        }
        names = named_parameters(twin.model).items()
        return {name for name, value in names if id(value) in of_one}, _STEP_SHARE

    def _follow(self, batches: Batches, gradients: Mapping[str, torch.Tensor]) -> None:
        """Have the twin take the step that the run has taken with these gradients, and compare."""
        run, twin, step = self._run, self._twin, self._run.train_state.step
        self._begin_with_same_buffers()
        self._batch = batch = twin.next_batch(batches)
        begin = self._kept()
        whole_loss = self._loss_of_whole(batch) if self._cell.world.rank == 0 else 0.0
        with self._stopped_by_steps():
            own = self._pass(batch)
        if any_rank(self._stopped is not None, self._exchange):
            self._stopped = _IN_BACKWARD
            return
        draws_otherwise = self._noise and run.draws
        others = self._jittered(batch, begin) if self._noise and not draws_otherwise else []
        here = {name: _local(value) for name, value in gradients.items()}
        whole = self._parts.gather(here)
        self._alive |= any(bool(value.any()) for value in whole.values())
        if draws_otherwise:
            why = "the model draws random numbers in training, and not as the twin does"
            self._cell.report.not_applied |= dict.fromkeys((GRADIENT, LOSS), why)
        else:
            self._note_loss(step, whole_loss, own.loss)
        if self._why_no_gradient:
            self._cell.report.not_applied[GRADIENT] = self._why_no_gradient
        elif not draws_otherwise:
            self._compare_gradients(step, here, whole, own, others)
        tolerances = step_tolerances(own.buffers, [other.buffers for other in others])
        tolerances |= self._step(gradients, whole)
        twin.finish_step(run.train_state.losses[-1])
        wrong = self._compare_state(step, tolerances)
        if any_rank(wrong or bool(tolerances), self._exchange):
            copy_tensors(run, twin, self._exchange)

    def _begin_with_same_buffers(self) -> None:
        """Have the twin begin a step with the first rank's buffers where its run does."""
        group = self._cell.world.group
        if group is None or not broadcasts_buffers(self._run.model):
            return
        for buffer in self._twin.model.buffers():
            received = buffer.to(torch.device("cpu"))
            dist.broadcast(received, 0, group=group)
            buffer.copy_(received)

    @contextmanager
    def _stopped_by_steps(self) -> Iterator[None]:
        """Context manager: a step of the twin's optimizer stops the comparison."""

        def stop(*_: Any) -> None:
            self._stopped = _IN_BACKWARD

        hooks = [one.register_step_pre_hook(stop) for one in each_of(self._twin.optimizer)]
        yield
        for hook in hooks:
            hook.remove()

    def _pass(self, batch: Tensors) -> _Pass:
        twin = self._twin
        twin.model.zero_grad()
        with twin.recording() as gradients, self._noting_dtypes():
            loss = float(twin.backward(batch))
        elements = {name: real_elements(_dense(value)) for name, value in gradients.items()}
        return _Pass(loss, elements, retained(_of_kind("buffer", snapshot_model(twin.model))))

    @contextmanager
    def _noting_dtypes(self) -> Iterator[None]:
        """Context manager: note the floating-point dtypes that the twin's modules return, as under
        autocast."""

        def note(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                self._computes_in.add(output.dtype)

        hooks = [module.register_forward_hook(note) for module in self._twin.model.modules()]
        yield
        for hook in hooks:
            hook.remove()

    def _kept(self) -> Callable[[], None]:
        """Return what brings back the twin's parameters, buffers and generators as they are now, and its
        modules' attributes, such as a counter of steps."""
        twin = self._twin
        states, held = dict(twin.random.states), [one.detach().clone() for one in _tensors(twin.model)]
        attributes = [(module, dict(vars(module))) for module in twin.model.modules()]

        def bring_back() -> None:
            twin.random.states = dict(states)
            for module, before in attributes:
                vars(module).clear()
                vars(module).update(before)
            with torch.no_grad():
                for tensor, was in zip(_tensors(twin.model), held, strict=True):
                    tensor.copy_(was)

        return bring_back

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Context manager: undo what becomes of the twin."""
        bring_back = self._kept()
        yield
        bring_back()

    def _loss_of_whole(self, batch: Tensors) -> float:
        with self._undone(), torch.no_grad(), self._twin.random.drawn_from():
            return float(self._twin.loss_of(batch))

    def _jittered(self, batch: Tensors, begin: Callable[[], None]) -> list[_Pass]:
        """Passes of twins that `begin` as the twin did, parameters and inputs different by a rounding."""
        share = max((_unit(one) for one in self._computes_in), default=0.0)
        passes = []
        for number in range(_JITTERED):
            other = each_tensor(torch.clone, batch)
            with self._undone():
                begin()
                jitter(self._twin.model.parameters(), share, seed=number)
                each_tensor(lambda one: jitter([one], share, seed=_JITTERED) or one, other)
                passes.append(self._pass(other))
        return passes

    def _compare_gradients(
        self,
        step: int,
        here: Mapping[str, torch.Tensor],
        whole: Mapping[str, torch.Tensor],
        own: _Pass,
        others: list[_Pass],
    ) -> None:
        seen, twins = self._seen[GRADIENT], named_parameters(self._twin.model)
        leaves = _of_kind("param", snapshot_model(self._run.model))
        names = [name for name, value in _first_names(self._twin.model).items() if value.numel()]
        mine: dict[str, list[torch.Tensor]] = {}
        if self._counts:
            for name, one in own.gradients.items():
                noise = [other.gradients[name] - one for other in others if name in other.gradients]
                mine[name] = [one, one.abs(), *noise]
        elements = {name: twins[name].numel() * (1 + twins[name].is_complex()) for name in names}
        for name, present, sums in summed(names, mine, elements, 2 + len(others), self._exchange):
            if name not in leaves or leaves[name].extent.shape != tuple(twins[name].shape):
                continue  # of another stage of a pipeline
            bound = self._bound(leaves[name].dtype)
            twin = TwinGradient.of(bound, *sums) if present else None
            part = GradientPart(leaves[name], here.get(name), whole.get(name))
            finding, used = compare_gradient(name, step, part, self._defects.expected(name, twin))
            self._bound_used = max(self._bound_used, used)
            if finding:
                mark = self._defects.mark(finding, step, part, twin, own.gradients.get(name))
                seen.found.append(mark)
            if twin is None or not twin.can_tell(bound.control):
                continue
            had = leaves[name].extent.numel > 0
            seen.compared[name] = seen.compared.get(name, False) or had
            if had and not seen.fired.get(name):
                control = compare_gradient(name, step, part, twin.made_different(bound.control))
                seen.fired[name] = control[0] is not None

    def _bound(self, dtype: torch.dtype) -> GradientBound:
        eps = rounding([dtype, self._reduced_in] if self._reduced_in else [dtype])
        return GradientBound(dp_degree(self._run.sizes), eps, self._noise)

    @property
    def _counts(self) -> bool:
        """Whether this rank's share of the batch counts: of the ranks that have the same, the first does."""
        rest, counts = self._cell.world.rank, True
        for name, size in reversed([*self._run.sizes.items()]):
            rest, coordinate = divmod(rest, size)
            counts &= coordinate == 0 or name not in SHARE_DATA
        return counts and rest == 0

    def _note_loss(self, step: int, whole: float, own: float) -> None:
        """Note the losses of a step: the twin's of the whole batch or, where the loss of a batch is not the
        mean of the losses of its shares, their mean."""
        group, count = self._cell.world.group, dp_degree(self._run.sizes)
        everybody = gathered((whole, own if self._counts else None), group)
        shares = [loss for _, loss in everybody if loss is not None]
        twin, mean = everybody[0][0], sum(shares) / count
        size = sum(map(abs, shares)) / count
        if not abs(twin - mean) <= loss_share(self._computes_in) * max(abs(twin), size):
            why = "the loss of a batch is not the mean of its shares' losses: these are compared"
            self._cell.report.not_applied[f"{LOSS} of whole batches"] = why
            twin = mean
        self._losses[step] = _Losses(self._run.train_state.losses[-1], twin, size)

    def _step(
        self, gradients: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Have the twin step on the ranks' gradients; return how far tensors may be away after a step that
        does not repeat exactly."""
        twin, others = self._twin, list[Leaves]()
        for number in range(_JITTERED if self._inexact else 0):
            optimizer = copy.deepcopy(twin.optimizer.state_dict())
            with self._undone():
                self._set_gradients(gradients, whole)
                mine = []
                for parameter in twin.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad.clone()  # not what the twin steps on
                        mine.append(parameter.grad)
                share = max([self._step_share, *(_unit(one.dtype) for one in mine)])  # less is rounded away
                jitter(mine, share, seed=number)
                twin.optimizer.step()
                others.append(retained(_state(twin)))
            twin.optimizer.load_state_dict(optimizer)
        self._set_gradients(gradients, whole)
        twin.step()
        tolerances = step_tolerances(_state(twin), others)
        names = tuple(f"state.{name}." for name in self._inexact)
        return {
            name: one for name, one in tolerances.items() if name in self._inexact or name.startswith(names)
        }

    def _set_gradients(
        self, gradients: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]
    ) -> None:
        for name, parameter in _first_names(self._twin.model).items():
            parameter.grad = None
            if name in gradients and gradients[name].is_sparse:
                parameter.grad = gradients[name].clone()
            elif name in whole:
                parameter.grad = whole[name].view_as(parameter).to(parameter.device)

    def _compare_state(self, step: int, tolerances: Mapping[str, torch.Tensor]) -> bool:
        """Compare the state after a step with the twin's; return whether this rank's is wrong."""
        seen, twin, actual = self._seen[STEP], _state(self._twin), _state(self._run)
        elsewhere = set[str]()
        if self._run.pipeline:
            elsewhere = set[str]().union(*gathered({*actual}, self._cell.world.group)) - actual.keys()
        found = compare_step(step, twin, actual, elsewhere, tolerances)
        seen.found += found
        seen.compared |= compared_names(actual)
        due = [name for name in controllable(actual) if not seen.fired.get(name)]
        other = changed_beyond(all_different({name: actual[name] for name in due}), tolerances)
        reported = {one.name for one in compare_step(step, twin, other, twin)}
        seen.fired |= {name: name in reported for name in due}
        return bool(found)

    def _record(self) -> None:
        cell = self._cell
        if self._seen[GRADIENT].compared:
            cell.measure("gradient_bound_used", self._bound_used)
            cell.report.bounds["gradient_bound"] = self._bound(torch.float32).name
        cell.report.bounds["step_bound"] = "measured" if self._inexact else "bits"
        if self._stopped:
            cell.report.not_applied |= dict.fromkeys((GRADIENT, STEP, LOSS), self._stopped)
        else:
            self._record_losses()
            for check, seen in self._seen.items():
                if check == GRADIENT and (self._why_no_gradient or GRADIENT in cell.report.not_applied):
                    continue
                fired = seen.fired if self._alive or check != GRADIENT else dict.fromkeys(seen.fired, False)
                cell.check(check, seen.found, self._where, seen.compared)
                cell.control(check, fired, self._where)
        self._compare_replicas()

    def _record_losses(self) -> None:
        """Compare the losses; the control of each is the twin's loss of another step. They mean something if
        they are finite and not zero, and there was a gradient."""
        if LOSS in self._cell.report.not_applied:
            return
        alive = self._run.alive[-len(self._losses) :]
        found, fired = list[Finding](), dict[str, bool]()
        others = [*self.twin_losses, *([self._loss_of_whole(self._batch)] if len(self._losses) == 1 else [])]
        for (step, one), lives in zip(self._losses.items(), alive, strict=True):
            found += self._far(step, one.twin)
            means = math.isfinite(one.ranks) and one.ranks != 0.0 and lives
            fired[loss_name(step)] = means and any(self._far(step, other) for other in others)
        self._cell.check(LOSS, found, self._where, [*fired])
        self._cell.control(LOSS, fired, self._where)

    def _far(self, step: int, twin: float) -> list[Finding]:
        one = self._losses[step]
        near = loss_share(self._computes_in) * max(abs(twin), one.size)
        return losses_close([twin], [one.ranks], step, near / abs(twin) if twin else 0.0)

    def _compare_replicas(self) -> None:
        """Compare what several ranks have."""
        cell = self._cell
        state = {name: leaf for name, leaf in _state(self._run).items() if isinstance(leaf, TensorLeaf)}
        leaves = {name: leaf for name, leaf in state.items() if leaf.kind != "buffer"}
        fired, found = compare_replicas(leaves, cell.world.group)
        if fired:
            cell.check(REPLICAS, found, self._where, [*fired])
            cell.control(REPLICAS, fired, self._where)
        else:
            cell.report.not_applied[REPLICAS] = "no two ranks have the same part of anything"


def _state(run: TrainingRun) -> Leaves:
    """Tensors of model and component; state and hyperparameters of the optimizer."""
    held = {**snapshot_model(run.model), **run.component.leaves()}
    tensors = {name: leaf for name, leaf in held.items() if isinstance(leaf, TensorLeaf)}
    optimizer = snapshot_optimizer(run.model, run.optimizer)
    return {**tensors, **{name: leaf for name, leaf in optimizer.items() if not name.endswith(".params")}}


def _of_kind(kind: str, leaves: Leaves) -> dict[str, TensorLeaf]:
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf) and leaf.kind == kind}


def _first_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by FQN, tied ones under the first of their names."""
    return {plain_fqn(model, name): value for name, value in model.named_parameters()}


def _tensors(model: nn.Module) -> Iterable[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, dense."""
    if isinstance(gradient, DTensor) and any(one.is_partial() for one in gradient.placements):
        whole = [Replicate() if one.is_partial() else one for one in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    return local_part(_dense(gradient))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _unit(dtype: torch.dtype) -> float:
    """A rounding in a dtype: the distance of 1 to the next number; half of it in those of 16 bits."""
    return torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else 1.0)
