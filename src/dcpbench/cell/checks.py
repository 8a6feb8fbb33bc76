"""What scenarios verify, each check with its negative control: the power to fail, shown in the cell."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dcpbench.cell import contract, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.explained import Restored, Resumed, defects_at, explained
from dcpbench.cell.steps import Losses, ReferenceRun, other_seed
from dcpbench.core.checks import CHECKS
from dcpbench.core.rank_report import NOTHING, CheckReport, Compared
from dcpbench.verify.compare import same_leaves
from dcpbench.verify.files import compare_files
from dcpbench.verify.perturb import compare_controlled, unlike
from dcpbench.verify.resumed import ResumedRule
from dcpbench.workloads import build_run, lockstep
from dcpbench.workloads.batches import Batches, batches_of
from dcpbench.workloads.lockstep import Lockstep, TwinGradients
from dcpbench.workloads.plain_runs import copy_state, exchange_of
from dcpbench.workloads.run_state import FLAGS, State, is_small, live_state, retained_state
from dcpbench.workloads.training_run import TrainingRun

_UNRESTORED = 5
"""How many models from other seeds a loss is held against before it is said that nothing tells them apart."""

View = Callable[[TrainingRun], State]
"""What of a training run is compared: its live state, or a part of it."""


def verify_training(
    cell: Cell, reference: ReferenceRun, prepare: Callable[[TrainingRun], None] | None = None
) -> None:
    """Train once more, this time without a save and beside the unwrapped twin: every step must be right, and
    the end the very state, by the same losses, of the run that saved.

    Args:
        prepare: brings a run that was just built to where the uninterrupted one began.
    """
    trained = reference.trained
    with cell.phase("build"):
        unsaved = steps.parallel_run(cell, cell.config.seed)
        unsaved.keeps_random = trained.keeps_random
        if prepare:
            prepare(unsaved)
    cell.report.losses["continued"] = trained.train_state.losses
    until = trained.train_state.step
    if trained.why_no_twin:
        cell.report.not_applied |= dict.fromkeys(lockstep.CHECKS, trained.why_no_twin)
        steps.train(cell, unsaved, reference.data, until)
    else:
        with cell.phase("build"):
            twin = build_run.build_twin(cell.config, cell.world, cell.config.seed)
            if prepare:
                copy_state(unsaved, twin, exchange_of(cell.world, unsaved))
        where = "in the uninterrupted run"
        _, cell.report.losses["twin"] = _train_beside(cell, unsaved, twin, reference.data, until, where)
    with cell.phase("verify", "harmless"):
        never, saved = live_state(unsaved), live_state(trained)
        for check, leaves in never.items():
            where = "in the run that saved"
            cell.record("save_harmless", compare_controlled(leaves, saved[check]), where)


def _train_beside(
    cell: Cell, run: TrainingRun, twin: TrainingRun, data: Batches, until: int, where: str
) -> tuple[list[float], list[float]]:
    """Train a run up to and including step `until`, compare each step with that of a twin which is in the
    same state, and record it; return the losses of both."""

    def explain(found: Compared, reference: TwinGradients, equal: Callable[[Any], set[str]]) -> Compared:
        check = reference.check
        done = explained(cell, "twin", {check: found}, lambda: reference, lambda _, one: equal(one[check]))
        return done[check]

    before = len(run.train_state.losses)
    with cell.phase("verify", "training"):
        asked = explain if defects_at(cell, "twin") else None
        beside = Lockstep(cell.config, cell.world, run, twin, asked)
    while run.train_state.step < until:
        with cell.phase("train"), run.recording() as gradients:
            run.train(data, run.train_state.step + 1)
        if beside.follows:
            with cell.phase("verify", "training"):
                beside.follow(data, gradients)
    with cell.phase("verify", "training"):
        for check, compared in beside.results().items():
            cell.record(check, compared, where)
    if "gradient_bound" in beside.bounds:
        cell.measure("gradient_bound_used", beside.bound_used)
    cell.report.bounds |= beside.bounds
    cell.report.not_applied |= beside.not_applied
    return run.train_state.losses[before:], beside.twin_losses


def _layout_matters(cell: Cell, run: TrainingRun, why_before: str | None) -> bool:
    """Whether a run's losses need not be those of another layout, from `why_before` or by what it draws; the
    report then says why."""
    why = run.why_no_twin or run.why_layout_bound or why_before
    if why is None and run.draws and (run.sizes or cell.config.compile):
        otherwise = "ranks draw others than one process"
        if not run.sizes:
            otherwise = "compiled code draws others than eager code"
        why = f"the model draws random numbers in training, and {otherwise}"
    if why:
        cell.report.not_applied["loss_resume_close"] = why
    return why is not None


@dataclass(frozen=True)
class Unrestored:
    """A target of loads before a load, when everything in it is different.

    Args:
        controls: for each check its negative control.
        state: the state that it had, where a known defect of torch may leave some of that.
    """

    controls: Mapping[str, Compared]
    state: State


def make_different(cell: Cell, target: TrainingRun, checkpoint: Checkpoint, number: int = 0) -> Unrestored:
    """Change every element and every hyperparameter of the target of a load, the one of this number, so that
    a load which restores nothing of it cannot go unseen, and prove it."""
    with cell.phase("build"):
        seed = other_seed(cell, number)
        target.make_different(seed, checkpoint.state.get("optim_equal"))
        state = retained_state(target) if defects_at(cell, "restored") else {}
        if cell.config.load_into.gradients:
            target.leave_gradients(batches_of(cell.config, cell.world.device))
    return replace(run_controls(cell, target, checkpoint), state=state)


def load_and_verify(cell: Cell, target: TrainingRun, checkpoint: Checkpoint, number: int = 0) -> Unrestored:
    """Load a checkpoint, the one of this number, into a target in which everything was made different."""
    before = make_different(cell, target, checkpoint, number)
    steps.load(cell, target, checkpoint)
    verify_restored(cell, target, checkpoint, before)
    return before


def verify_saved_again(cell: Cell, target: TrainingRun, checkpoint: Checkpoint) -> None:
    """A restored run that was trained on is saved once more, and that brings back the same, into a target of
    loads before. Of a large state it would cost as much as all that is measured."""
    if not is_small(checkpoint.state):
        return
    name, step = f"{checkpoint.checkpoint_id}-again", target.train_state.step
    state = retained_state(target)
    again = replace(checkpoint, checkpoint_id=name, step=step, state=state, how=", saved again")
    with cell.phase("verify", "saved_again"):
        again.checkpointer.save(target.state(), again.checkpoint_id).wait()
    load_and_verify(cell, target, again)
    with cell.phase("verify", "saved_again"):
        cell.world.meet()  # a rank that found something reads what was there
        if cell.world.rank == 0:
            again.checkpointer.remove(again.checkpoint_id)


def run_controls(
    cell: Cell, target: TrainingRun, checkpoint: Checkpoint, view: View = live_state, changed: bool = False
) -> Unrestored:
    """Run the negative controls: each comparison with a target in which everything is different; where no
    such target is at hand, with its state `changed`."""
    controls: dict[str, Compared] = {}
    with cell.phase("verify", "power"):
        unrestored = view(target)
        for check, leaves in checkpoint.state.items():
            constants: Iterable[str] | None = ()
            if check == FLAGS or changed:
                constants = None
            elif check == "extra_equal":
                constants = filter(target.may_be_constant, unrestored[check])
            elif check == "model_equal":
                constants = filter(target.is_left_out, unrestored[check])
            other = unlike(leaves, unrestored[check], constants)
            controls[check] = checkpoint.control(check, other, cell.world.group)
    return Unrestored(controls, {})


def verify_restored(
    cell: Cell,
    target: TrainingRun,
    checkpoint: Checkpoint,
    before: Unrestored,
    view: View = live_state,
    where: str = "",
) -> None:
    """What came back must be, bit for bit, what was there at the moment of saving: part by part, or by
    content where the parts lie otherwise. Where `view` is of all of it, the checks of plug-ins follow."""
    with cell.phase("verify", "equality"):
        actual, group = view(target), cell.world.group
        compared: dict[str, Compared] = {}
        for check in checkpoint.state:
            found = checkpoint.compare(check, actual[check], group, checkpoint.recall_of(check))
            compared[check] = replace(before.controls[check], found=found)

        def about() -> Restored:
            names = {check: frozenset(one.name for one in wrong.found) for check, wrong in compared.items()}
            return Restored(checkpoint, actual, before.state, names)

        def equal(check: str, state: State) -> set[str]:
            return same_leaves(state.get(check, {}), actual[check])

        for check, one in explained(cell, "restored", compared, about, equal).items():
            cell.record(check, one, where or str(checkpoint))
        for spec in CHECKS.values():
            if spec.probe and view is live_state:
                spec.probe(cell, target, checkpoint)
    if cell.measured("load_s") == 1 and not checkpoint.checkpointer.unreadable:
        _verify_absent_key(cell, checkpoint)


def resume(
    cell: Cell,
    target: TrainingRun,
    checkpoint: Checkpoint,
    losses: Losses,
    exactly: bool = True,
    until: int | None = None,
) -> None:
    """Train on: the steps must have the uninterrupted run's losses, and those must mean something, and end in
    its state.

    Args:
        exactly: whether losses and state are the same bits; another layout sums in another order.
        until: the last step, if not after `resume_steps`; the uninterrupted run's state there is known.
    """
    last = until or checkpoint.step + cell.config.resume_steps
    taken = range(checkpoint.step + 1, last + 1)
    where = f"after the checkpoint of step {checkpoint.step}{checkpoint.how}"
    restored = _plain_copy(cell, target) if defects_at(cell, "resumed") else None
    before = [*target.train_state.losses]
    if exactly or target.why_no_twin:
        resumed = steps.train(cell, target, losses.data, last)
    else:
        with cell.phase("build"):
            twin = build_run.build_twin(cell.config, cell.world, other_seed(cell, 0))
            copy_state(target, twin, exchange_of(cell.world, target))
        resumed, _ = _train_beside(cell, target, twin, losses.data, last, where)
    with cell.phase("verify", "resumed"):
        drawn = bool(target.draws and target.sizes)
        dtypes = target.dtypes | losses.computes_in
        continued = losses.continued[taken.start - 1 : last]
        rule = ResumedRule.of(continued, taken.start, exactly, cell.config.tolerance.value, dtypes, drawn)
        compared: dict[str, Compared] = {}
        if exactly or not _layout_matters(cell, target, losses.why_layout_bound):
            others = (steps.unrestored(cell, losses, number, taken) for number in range(_UNRESTORED))
            compared[rule.check] = rule.compare(resumed, target.alive[-len(taken) :], others)
        for part, leaves in retained_state(target).items():
            if exactly or part == FLAGS:
                reference = replace(checkpoint, state=losses.states[last])
                compared[part] = reference.compared(part, leaves, cell.world.group)

        def equal(part: str, state: State) -> set[str]:
            if part == rule.check:
                return rule.same_losses(resumed, state)
            return rule.same_state(part, [*before, *resumed], live_state(target), state)

        if restored:
            about = partial(Resumed, restored, losses.data, last)
            compared = explained(cell, "resumed", compared, about, equal)
        for part, one in compared.items():
            check = part if part in (rule.check, FLAGS) else "state_resume_equal"
            cell.record(check, one, f"{where}, resumed" if part == FLAGS else where)
    cell.report.resumed[checkpoint.step] = resumed


def _plain_copy(cell: Cell, run: TrainingRun) -> TrainingRun:
    """Build an unwrapped run in the state of a run; collective."""
    with cell.phase("verify", "known_defects"):
        plain = build_run.build_plain(cell.config, cell.world, cell.config.seed)
        copy_state(run, plain, exchange_of(cell.world, run))
        return plain


def verify_files(cell: Cell) -> None:
    """At the end of a stage: every file of each checkpoint must be what it was when its save reported
    success; rank 0 looks at them."""
    for where, then, digests in cell.files.values():
        with cell.phase("verify", "files"):
            of_rank_0 = cell.world.rank == 0
            cell.record("files_unchanged", compare_files(then, digests()) if of_rank_0 else NOTHING, where)


def _verify_absent_key(cell: Cell, checkpoint: Checkpoint) -> None:
    """After a load that was not refused: one that is asked for a key that the checkpoint lacks is. Once is
    enough."""
    where = f"of a load of an absent key {checkpoint}"
    if where in cell.report.checks.get("contract_held", CheckReport()).compared:
        return
    absent: dict[str, Any] = {"absent": torch.zeros(1)}
    load = partial(checkpoint.checkpointer.load, absent, checkpoint.checkpoint_id)
    with cell.phase("verify", "absent_key"):
        contract.verify_refused(cell, BaseException, "absent", load, lambda: None, where)
