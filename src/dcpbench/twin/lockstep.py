"""Compare training one step at a time: an unwrapped twin has the ranks' parameters in every step, computes
its own gradients of the same batch, and then steps with the ranks' gradients."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from dcpbench.compare.across_layouts import compare_replicas
from dcpbench.compare.controls import compared_names, names_of_control, perturbed_leaves
from dcpbench.compare.leaves import Comparison
from dcpbench.compare.losses import batch_loss_tolerance, coarsest_eps, compare_losses, loss_name
from dcpbench.compare.whole_tensors import (
    Parts,
    dense,
    local_gradient,
    summed,
)
from dcpbench.config.mesh import dp_degree, dp_rank
from dcpbench.config.schema import Config
from dcpbench.core.mismatch import SECOND_DERIVATIVES, Mismatch, Problem
from dcpbench.core.rank_report import NOTHING, Compared
from dcpbench.core.state import Name, names_with_texts
from dcpbench.runs.build_run import build_twin, reduction_dtype, skip_groups_by_shape
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.put import copy_tensors
from dcpbench.runs.run import GradientUse, Run, use_recorder, use_suffixes
from dcpbench.state.snapshot import TensorLeaf, named_parts, parts_of_each, snapshot_parameters
from dcpbench.torch_private import FUNCTORCH_CONFIG, RUN_BACKWARD
from dcpbench.twin.gradients import (
    GradientBound,
    GradientPart,
    TwinGradient,
    TwinGradients,
    compare_gradient,
    compare_step,
    is_close,
    perturbed_beyond,
)
from dcpbench.twin.twin import Twin, tolerance_of_steps
from dcpbench.workloads.parallelisms import broadcasts_buffers, runs_other_kernels
from dcpbench.workloads.workload import Batches
from dcpbench.workloads.world import World

GRADIENT, STEP, REPLICAS, LOSS = "gradient_close", "step_equal", "replicas_equal", "batch_loss_close"
TRAINING_CHECKS = (GRADIENT, STEP, REPLICAS, LOSS)
"""The checks that `Lockstep` makes."""

NO_REPLICAS = "no two ranks have the same part of anything"
_LATE = "fully_shard uses some gradients a step late (docs/findings/second-derivatives-fsdp2.md)"
_OTHER_USES = "ranks and twin take different optimizer steps, or clip gradients differently often"
_MOVES = (
    "step moves parameters between two backward passes, other than by a step of an optimizer; the twin would "
    "need the ranks' gradient there"
)


Explain = Callable[[Mapping[str, Comparison], TwinGradients], Mapping[str, Compared]]
"""Names the defects that cause mismatches of checks."""
_Gradients = tuple[GradientUse, list[GradientUse]]
"""The twin's gradients at a use, and those of the jittered steps."""
_Sums = Iterator[tuple[str, bool, list[torch.Tensor]]]
"""Sums over ranks, as from `summed`."""


class Lockstep:
    """Compares a run, after each training step, with its twin, which then takes the same step.

    Args:
        world: the ranks that train the run.
        twin: an unwrapped run in the state of the run.
        explain: attributes mismatches of gradients to known defects, if one can affect the cell.

    Attributes:
        not_applied: why checks are not made.
        twin_losses: the mean of the twin's losses of the shares of each batch.
        bound_used: the largest difference of a gradient as a part of its tolerance.
        why_not_resumed: why a resumed run cannot repeat these steps, if the results show that.
    """

    def __init__(
        self, config: Config, world: World, run: OwnRun, twin: OwnRun, explain: Explain | None
    ) -> None:
        skip_groups_by_shape(config, run, twin)
        self._world, self._run, self._explain = world, run, explain
        self._results = dict.fromkeys((GRADIENT, STEP), NOTHING)
        self.not_applied: dict[str, str] = {}
        self.twin_losses: dict[int, float] = {}
        self._loss_sizes: dict[int, float] = {}
        self._shares: dict[int, tuple[int, float]] = {}
        self._exchange = world.exchange_of(run.model)
        self._own_parts, self._twin_parts = named_parts(run.model), named_parts(twin.model)
        self._leaves = snapshot_parameters(self._own_parts)
        self._parts = Parts.of(self._leaves, self._exchange)
        self._noise, self._compiled = runs_other_kernels(config, run.sizes), config.compile
        self._reduced_in, why_no_gradient = reduction_dtype(run.model, config.parallel)
        if why_no_gradient:
            self.not_applied[GRADIENT] = why_no_gradient
        self._tolerance = tolerance_of_steps(run, twin, split=not self._parts.complete)
        again = partial(build_twin, config, world, config.seed)
        self._takes_more = bool(self._noise or self._tolerance.repeats)
        self._twin = Twin(twin, run.compute_dtypes, again if self._takes_more else None, self._tolerance)
        self.bound_used, self._had_gradient, self._worst = 0.0, False, 1.0
        self.why_not_resumed: str | None = None
        self._is_fully_sharded = any(isinstance(module, FSDPModule) for module in run.model.modules())
        self._second_derivatives = set[int]()
        self._unfrozen = set[str]()
        self._results[STEP] += self._compare_state(run.train_state.step, {})

    @property
    def follows(self) -> bool:
        """Whether the twin can still take the run's steps."""
        return STEP not in self.not_applied

    @property
    def bounds(self) -> dict[str, str]:
        """The names of the bounds that gradients and steps are compared by, as columns of the row."""
        bounds = {"step_bound": self._tolerance.bound}
        if self._results[GRADIENT].names:
            bounds["gradient_bound"] = self._bound(torch.float32).name
        return bounds

    def train(self, batches: Batches) -> list[GradientUse]:
        """Train the run for one step, and return its uses of gradients."""
        uses = list[GradientUse]()
        self._run.train_step(batches, use_recorder(uses, self._run.model))
        return uses

    def follow(self, batches: Batches, uses: Sequence[GradientUse]) -> None:
        """Compare the step that the run has just taken, with these uses of gradients, and take it with the
        twin."""
        run, twin, step = self._run, self._twin, self._run.train_state.step
        group = self._world.group if broadcasts_buffers(run.model) else None
        batch = twin.run.next_batch(batches)
        self._unfreeze()
        twin.begin(batch, group, run.grad_norm)
        order = [use.by for use in uses]
        alike = not run.user_step or all(theirs == order for theirs in self._world.gathered(order))
        used = [self._with_full(use) for use in uses] if alike else []
        with _noting_second_derivatives() if self._is_fully_sharded else nullcontext([False]) as twice:
            taken = twin.take_step(used)
        flags = [not (alike and taken.has_uses_of(used)), bool(twin.why_not_copied), taken.moves, any(twice)]
        writes = 0.0
        if self._takes_more:
            decided = [*flags[:3], bool(twin.written_buffers)]
            *stops, writes = self._world.summed(decided)
            if self._stops(*stops):
                return
        draws = bool(run.random.drawn)
        if self._noise and draws:
            self.not_applied |= dict.fromkeys((GRADIENT, LOSS), why_drawn(self._compiled))
        others = twin.jittered_steps(used, draws) if self._noise and (writes or not draws) else []
        self._worst = max((other.worst for other in others), default=1.0)
        tolerances = twin.tolerances(used, others)
        twin.run.finish_step(run.train_state.losses[-1])
        compared = self._compare_state(step, tolerances)
        flags.append(bool(compared.found or tolerances))
        compares = bool(used) and GRADIENT not in self.not_applied
        gradients = [
            (taken.uses[number], [other.uses[number] for other in others if other.has_uses_of(used)])
            if compares and not flags[0]
            else (GradientUse("", {}), [])
            for number in range(len(used) or 1)
        ]
        sums = self._summed(gradients[0], flags, compares)  # what is decided, and the first sums, at once
        *_, (totals, *_) = next(sums)
        unlike, uncopied, moves, differentiates_twice, wrong = totals.tolist()
        self._second_derivatives |= {step} if differentiates_twice else set()
        if self._stops(unlike, uncopied, moves):
            return
        self._shares[step] = self._twin.run.samples if self._counts else 0, taken.loss
        self._results[STEP] += compared
        for number, name in enumerate(use_suffixes(used)):
            self._had_gradient |= any(bool(value.any()) for value in used[number].full.values())
            if compares:
                of_use = self._summed(gradients[number]) if number else sums
                self._compare_gradients(step, used, number, gradients[number], name, of_use)
        if wrong:
            copy_tensors(run, twin.run, self._exchange)

    def _stops(self, unlike: float, uncopied: float, moves: float) -> bool:
        """Return whether the twin cannot follow any longer, and note why; collective if it could not be
        copied on some ranks."""
        if unlike or uncopied or moves:
            why = _MOVES if moves else _OTHER_USES
            if not (unlike or moves):
                why = next(filter(None, self._world.gathered(self._twin.why_not_copied)))
            self.not_applied |= dict.fromkeys((GRADIENT, STEP, LOSS), why)
        return bool(unlike or uncopied or moves)

    def _unfreeze(self) -> None:
        """Let the twin train what the ranks train, also if it was frozen: then it is compared as the rest."""
        parts = (part for parts in parts_of_each(self._own_parts).values() for part in parts.items())
        trained = {name for name, part in parts if part.parameter.requires_grad}
        for name, value in self._twin.parameters.items():
            if name in trained and not value.requires_grad:
                value.requires_grad_(True)
                self._unfrozen.add(name)

    def _with_full(self, use: GradientUse) -> GradientUse:
        """Return a use with dense parts of gradients, unless they are sparse, and full ones; collective."""
        here = {name: local_gradient(value) for name, value in use.gradients.items()}
        sparse = {name: value for name, value in use.gradients.items() if value.is_sparse}
        return replace(use, gradients=here | sparse, full=self._parts.gather(here))

    def _compare_gradients(
        self,
        step: int,
        uses: Sequence[GradientUse],
        number: int,
        gradients: _Gradients,
        suffix: str,
        sums: _Sums,
    ) -> None:
        """Compare the gradients at a use with the twins' `sums`; `suffix` follows their names."""
        leaves, proven = self._leaves, self._results[GRADIENT].detected
        mismatches, names, detected = list[Mismatch](), dict[str, bool](), dict[str, bool]()
        parts: dict[str, GradientPart] = {}
        for name, twin in self._twin_gradients(sums):
            bound, of_use = self._bound(leaves[name].dtype), name + suffix
            mine, full = uses[number].gradients.get(name), uses[number].full.get(name)
            part = parts[name] = GradientPart(leaves[name], None if mine is None else dense(mine), full)
            mismatch, used = compare_gradient(name, step, part, twin)
            self.bound_used = max(self.bound_used, used)
            if not mismatch and name in self._unfrozen and mine is not None and bool(mine.any()):
                mismatch = Mismatch(name, Problem.only_parallel, "gradient", facts={"step": step})
            mismatches += [mismatch] if mismatch else []
            if twin is None or proven.get(of_use) or not twin.detects(bound.control):
                continue
            names[of_use] = leaves[name].extent.numel > 0
            if names[of_use]:
                control = compare_gradient(name, step, part, twin.perturbed(bound.control))
                detected[of_use] = control[0] is not None

        if self._explain and self._world.any_rank(mismatches):
            reference = self._reference(gradients)
            comparison = Comparison(reference.twins, parts, Compared(mismatches, {}, {}), is_close)
            mismatches = [*self._explain({GRADIENT: comparison}, reference)[GRADIENT].found]
        late = SECOND_DERIVATIVES if {step - 1, step} & self._second_derivatives else None
        mismatches = [replace(wrong, name=wrong.name + suffix, by=wrong.by or late) for wrong in mismatches]
        self._results[GRADIENT] += Compared(mismatches, names, detected)

    def _summed(self, gradients: _Gradients, flags: Sequence[float] = (), compares: bool = True) -> _Sums:
        """Sum the twins' gradients of all shares of a batch, if they are compared, and before them these
        flags, under no name; collective."""
        twins, (use, jittered) = self._twin.parameters, gradients
        names = [name for name, value in twins.items() if value.numel() and compares]
        mine: dict[str, list[torch.Tensor]] = {}
        if self._counts:
            for name, gradient in use.gradients.items():
                noise = [other.gradients[name] - gradient for other in jittered if name in other.gradients]
                mine[name] = [gradient, use.sizes[name], *noise]
        elements = {name: twins[name].numel() * (1 + twins[name].is_complex()) for name in names}
        count = 2 + len(jittered)
        if flags:
            names, mine[""], elements[""] = ["", *names], [torch.tensor(flags)] * count, len(flags)
        return summed(names, mine, elements, count, self._exchange)

    def _twin_gradients(self, summed_up: _Sums) -> Iterator[tuple[str, TwinGradient | None]]:
        """Yield the twins' gradients; a parameter of another stage of a pipeline has none."""
        twins, leaves = self._twin.parameters, self._leaves
        for name, present, sums in summed_up:
            if name in leaves and leaves[name].extent.shape == tuple(twins[name].shape):
                yield name, TwinGradient.of(self._bound(leaves[name].dtype), *sums) if present else None

    def _reference(self, gradients: _Gradients) -> TwinGradients:
        """Build the reference for known defects; collective."""
        bound = {name: self._bound(leaf.dtype) for name, leaf in self._leaves.items()}
        twins = {
            name: twin
            for name, twin in self._twin_gradients(self._summed(gradients))
            if twin and twin.detects(bound[name].control)
        }
        return TwinGradients(twins, gradients[0].gradients)

    def _bound(self, dtype: torch.dtype) -> GradientBound:
        eps = coarsest_eps([dtype, self._reduced_in] if self._reduced_in else [dtype])
        return GradientBound(dp_degree(self._run.sizes), eps, self._noise, self._run.accumulate, self._worst)

    @property
    def _counts(self) -> bool:
        """Whether this rank is the first of those with its share of the batch, whose gradients are summed."""
        sizes, rank = self._run.sizes, self._world.rank
        return all(dp_rank(sizes, other) != dp_rank(sizes, rank) for other in range(rank))

    def _exchange_losses(self) -> None:
        """Note the mean of the twin's losses of each step, and of their magnitudes; collective."""
        self._run.exchange_losses()
        numbers = [
            number
            for samples, loss in self._shares.values()
            for number in (samples * loss, samples * abs(loss), samples)
        ]
        sums = self._world.summed(numbers) if numbers else []
        for step, *of_step in zip(self._shares, sums[::3], sums[1::3], sums[2::3], strict=True):
            self.twin_losses[step], self._loss_sizes[step] = (one / of_step[2] for one in of_step[:2])

    def _compare_state(self, step: int, tolerances: Mapping[Name, torch.Tensor]) -> Compared:
        """Compare the state after a step with the twin's."""
        twin, proven = self._twin.run.trained_state(self._twin_parts), self._results[STEP].detected
        self._actual = actual = self._run.trained_state(self._own_parts)
        elsewhere = set[Name]()
        if self._run.pipeline:
            elsewhere = set[Name]().union(*self._world.gathered({*actual})) - actual.keys()
        mismatches = compare_step(step, twin, actual, elsewhere, tolerances)
        due = [text for text in names_of_control(actual) if not proven.get(text)]
        other = perturbed_beyond(
            perturbed_leaves({name: actual[name] for name in names_with_texts(actual, due)}), tolerances
        )
        control = compare_step(step, twin, other, twin, closely=False) if due else ()
        reported = {mismatch.name for mismatch in control}
        detected = {name: name in reported for name in due}
        return Compared(mismatches, compared_names(actual), detected)

    def results(self, unrestored: Sequence[float]) -> dict[str, Compared]:
        """Return the results by check, after the last step; collective. Gradients that are all zero prove
        nothing. Losses of an `unrestored` run are for the control of losses."""
        self._exchange_losses()
        made = {**self._results}
        late = any(mismatch.by == SECOND_DERIVATIVES for mismatch in made[GRADIENT].found)
        if self._second_derivatives and self._world.any_rank(late):
            self.why_not_resumed = _LATE
        if not self._had_gradient:
            made[GRADIENT] += Compared((), {}, dict.fromkeys(made[GRADIENT].detected, False))
        if LOSS not in self.not_applied:
            made[LOSS] = self._compare_losses(unrestored)
        made[REPLICAS] = self._compare_replicas()
        if not made[REPLICAS].detected:
            self.not_applied[REPLICAS] = NO_REPLICAS
        return {check: compared for check, compared in made.items() if check not in self.not_applied}

    def _compare_losses(self, unrestored: Sequence[float]) -> Compared:
        """Compare the losses. The control of each is the loss of another step, also before these, or of a run
        with other parameters; a loss that is not finite, or zero, or has no gradient proves nothing."""
        losses = self._run.train_state.losses
        others = [*losses, *unrestored]
        had_gradient = self._run.had_gradient[-len(self.twin_losses) :]
        mismatches, detected = list[Mismatch](), dict[str, bool]()
        for (step, twin), lives in zip(self.twin_losses.items(), had_gradient, strict=True):
            loss = losses[step - 1]
            mismatches += self._far(step, twin)
            usable = math.isfinite(loss) and loss != 0.0 and lives
            detected[loss_name(step)] = usable and any(self._far(step, other) for other in others)
        return Compared(mismatches, dict.fromkeys(detected, True), detected)

    def _far(self, step: int, twin: float) -> list[Mismatch]:
        near = batch_loss_tolerance(self._twin.compute_dtypes) * max(abs(twin), self._loss_sizes[step])
        loss = self._run.train_state.losses[step - 1]
        return compare_losses([twin], [loss], step, near / abs(twin) if twin else 0.0)

    def _compare_replicas(self) -> Compared:
        """Compare parameters and optimizer state that several ranks have."""
        actual = self._actual if self.follows else self._run.trained_state(self._own_parts)
        leaves = {
            name: leaf
            for name, leaf in actual.items()
            if isinstance(leaf, TensorLeaf) and leaf.kind != "buffer"
        }
        return compare_replicas(leaves, self._world.group)


def compare_parameters(run: Run) -> Compared:
    """Compare the parameters whose parts several ranks have; collective."""
    ignored = getattr(run.model, "parameters_to_ignore", ())
    parameters = snapshot_parameters(named_parts(run.model)).items()
    kept: dict[Name, TensorLeaf] = {(name,): leaf for name, leaf in parameters if name not in ignored}
    return compare_replicas(kept, run.world.group)


@contextmanager
def _noting_second_derivatives() -> Iterator[list[bool]]:
    """Context manager around a step: yield a list that gets, at each backward pass, whether its gradients
    have gradients."""
    run_backward = RUN_BACKWARD.value
    twice = list[bool]()

    def noting(outputs: Any, gradients: Any, retain: bool, create: bool, *rest: Any, **more: Any) -> Any:
        twice.append(create)
        return run_backward(outputs, gradients, retain, create, *rest, **more)

    with RUN_BACKWARD.patch(noting):
        yield twice


def why_drawn(compiled: bool) -> str:
    """Return why the gradients of a model that draws random numbers are not compared with the twin's."""
    why = "the model draws random numbers in training, and the twin draws others"
    budget = FUNCTORCH_CONFIG.value.activation_memory_budget
    if not compiled or budget >= 1:
        return why
    again = f"with activation_memory_budget={budget} the backward pass can draw others as well"
    return f"{why}; {again} (pytorch#190758), unnoticed"
