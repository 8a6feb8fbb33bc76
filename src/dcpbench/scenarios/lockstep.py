"""Training, compared one step at a time: an unwrapped twin stands at the ranks' parameters at every step,
computes its own gradients of the same batch, and then steps on the ranks' gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, Replicate

from dcpbench.config.mesh import SHARE_DATA, dp_degree
from dcpbench.core.mismatch import Mismatch
from dcpbench.scenarios import known_defects
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.plain_runs import exchange_of
from dcpbench.scenarios.twin import Pass, Twin, dense, inexact_steps, state_of
from dcpbench.verify.compare_layouts import compare_replicas, gathered
from dcpbench.verify.perturb import all_different, compared_names, controllable
from dcpbench.verify.snapshot import TensorLeaf, local_part, of_kind, snapshot_model
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
from dcpbench.verify.whole_tensors import Parts, any_rank, summed, summed_numbers
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.parallelisms import broadcasts_buffers, reduced_in, runs_other_kernels
from dcpbench.workloads.training_run import TrainingRun

GRADIENT, STEP, REPLICAS, LOSS = "gradient_close", "step_equal", "replicas_equal", "batch_loss_close"
CHECKS = (GRADIENT, STEP, REPLICAS, LOSS)
"""The checks of this module."""

_OF_WHOLE = f"{LOSS} of whole batches"
_NOT_A_MEAN = (
    "the loss of a batch is not the mean of its shares' losses, as with random numbers, batch statistics or "
    "weights: the mean is compared"
)
_IN_BACKWARD = "the optimizer steps in the backward pass, and the twin cannot step on other gradients"


@dataclass
class _Seen:
    """What one check has seen: what it found, what it compared, for which names its control fired."""

    found: list[Mismatch] = field(default_factory=list)
    compared: dict[str, bool] = field(default_factory=dict)
    fired: dict[str, bool] = field(default_factory=dict)


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
        self._cell, self._run, self._twin, self._where = cell, run, Twin(twin, run.dtypes), where
        self._seen = {check: _Seen() for check in (GRADIENT, STEP)}
        self._why_not: dict[str, str] = {}
        self._losses: dict[int, _Losses] = {}
        self._exchange = exchange_of(cell.world, run)
        self._defects = known_defects.gradients_of(cell, twin)
        self._leaves = of_kind("param", snapshot_model(run.model))
        self._parts = Parts.of(self._leaves, self._exchange)
        self._noise = runs_other_kernels(cell.config, run.sizes)
        self._reduced_in, why_no_gradient = reduced_in(run.model, cell.config.parallel)
        if why_no_gradient:
            self._why_not[GRADIENT] = why_no_gradient
        self._inexact = inexact_steps(run, twin, split=not self._parts.complete)
        self._bound_used, self._alive = 0.0, False

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
            if STEP not in self._why_not:
                with cell.phase("verify", "training"):
                    self._follow(batches, gradients)
        with cell.phase("verify", "training"):
            self._record()
        return run.train_state.losses[before:]

    def _follow(self, batches: Batches, gradients: Mapping[str, torch.Tensor]) -> None:
        """Have the twin take the step that the run has taken with these gradients, and compare."""
        cell, run, twin, step = self._cell, self._run, self._twin, self._run.train_state.step
        twin.begin(twin.run.next_batch(batches), cell.world.group if broadcasts_buffers(run.model) else None)
        whole_loss = self._loss_of_whole() if cell.world.rank == 0 else 0.0
        own = twin.passed()
        if self._note_losses(step, whole_loss, own.loss):
            self._why_not |= dict.fromkeys((GRADIENT, STEP, LOSS), _IN_BACKWARD)
            return
        if self._noise and run.draws:
            why = "the model draws random numbers in training, and the twin draws others"
            self._why_not |= dict.fromkeys((GRADIENT, LOSS), why)
        others = twin.jittered() if self._noise and not run.draws else []
        here = {name: _local(value) for name, value in gradients.items()}
        whole = self._parts.gather(here)
        self._alive |= any(bool(value.any()) for value in whole.values())
        if GRADIENT not in self._why_not:
            self._compare_gradients(step, here, whole, own, others)
        tolerances = step_tolerances(own.buffers, [other.buffers for other in others])
        tolerances |= twin.step(gradients, whole, self._inexact)
        twin.run.finish_step(run.train_state.losses[-1])
        wrong = self._compare_state(step, tolerances)
        if any_rank(wrong or bool(tolerances), self._exchange):
            twin.take_over(run, self._exchange)

    def _loss_of_whole(self) -> float:
        try:
            return self._twin.loss_of_whole()
        except Exception as error:  # noqa: BLE001 - a workload's, which need not take more than a share
            why = f"the loss of a whole batch cannot be computed: {type(error).__name__}: {error}"
            self._cell.report.not_applied[_OF_WHOLE] = why
            return math.nan

    def _compare_gradients(
        self,
        step: int,
        here: Mapping[str, torch.Tensor],
        whole: Mapping[str, torch.Tensor],
        own: Pass,
        others: list[Pass],
    ) -> None:
        seen, twins = self._seen[GRADIENT], self._twin.parameters
        leaves = self._leaves
        names = [name for name, value in twins.items() if value.numel()]
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

    def _note_losses(self, step: int, whole: float, own: float) -> bool:
        """Note the losses of a step: the twin's of the whole batch or, where the loss of a batch is not the
        mean of the losses of its shares, their mean. Return whether any rank's twin stepped meanwhile."""
        share = own if self._counts else 0.0
        numbers = (whole, share, abs(share), float(self._twin.steps_in_backward))
        twin, mean, size, stepped = summed_numbers(numbers, self._exchange)
        mean, size = mean / dp_degree(self._run.sizes), size / dp_degree(self._run.sizes)
        if not abs(twin - mean) <= loss_share(self._twin.computes_in) * max(abs(twin), size):
            if LOSS not in self._why_not:
                self._cell.report.not_applied.setdefault(_OF_WHOLE, _NOT_A_MEAN)
            twin = mean
        self._losses[step] = _Losses(self._run.train_state.losses[-1], twin, size)
        return stepped > 0

    def _compare_state(self, step: int, tolerances: Mapping[str, torch.Tensor]) -> bool:
        """Compare the state after a step with the twin's; return whether this rank's is wrong."""
        seen, twin, actual = self._seen[STEP], state_of(self._twin.run), state_of(self._run)
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
        report = self._cell.report
        if self._seen[GRADIENT].compared:
            self._cell.measure("gradient_bound_used", self._bound_used)
            report.bounds["gradient_bound"] = self._bound(torch.float32).name
        report.bounds["step_bound"] = self._inexact.bound
        report.not_applied |= self._why_not
        if not self._alive:
            self._seen[GRADIENT].fired = dict.fromkeys(self._seen[GRADIENT].fired, False)
        for check, seen in self._seen.items():
            if check not in self._why_not:
                self._cell.check(check, seen.found, self._where, seen.compared)
                self._cell.control(check, seen.fired, self._where)
        if LOSS not in self._why_not:
            self._record_losses()
        self._compare_replicas()

    def _record_losses(self) -> None:
        """Compare the losses; the control of each is the twin's loss of another step. They mean something if
        they are finite and not zero, and there was a gradient."""
        alive = self._run.alive[-len(self._losses) :]
        found, fired = list[Mismatch](), dict[str, bool]()
        others = self.twin_losses
        if len(others) == 1:
            others = [*others, self._loss_of_whole()]
        for (step, one), lives in zip(self._losses.items(), alive, strict=True):
            found += self._far(step, one.twin)
            means = math.isfinite(one.ranks) and one.ranks != 0.0 and lives
            fired[loss_name(step)] = means and any(self._far(step, other) for other in others)
        self._cell.check(LOSS, found, self._where, [*fired])
        self._cell.control(LOSS, fired, self._where)

    def _far(self, step: int, twin: float) -> list[Mismatch]:
        one = self._losses[step]
        near = loss_share(self._twin.computes_in) * max(abs(twin), one.size)
        return losses_close([twin], [one.ranks], step, near / abs(twin) if twin else 0.0)

    def _compare_replicas(self) -> None:
        """Compare what several ranks have."""
        cell = self._cell
        state = {name: leaf for name, leaf in state_of(self._run).items() if isinstance(leaf, TensorLeaf)}
        leaves = {name: leaf for name, leaf in state.items() if leaf.kind != "buffer"}
        fired, found = compare_replicas(leaves, cell.world.group)
        if fired:
            cell.check(REPLICAS, found, self._where, [*fired])
            cell.control(REPLICAS, fired, self._where)
        else:
            cell.report.not_applied[REPLICAS] = "no two ranks have the same part of anything"


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, dense."""
    if isinstance(gradient, DTensor) and any(one.is_partial() for one in gradient.placements):
        whole = [Replicate() if one.is_partial() else one for one in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    return local_part(dense(gradient))
