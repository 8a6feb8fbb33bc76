"""What scenarios verify, each check with its negative control: the power to fail, shown in the cell."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import CheckReport
from dcpbench.scenarios import contract, known_defects, lockstep, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import FLAGS, Checkpoint, State, live_state, retained_state
from dcpbench.scenarios.lockstep import Lockstep
from dcpbench.scenarios.plain_runs import copy_state, exchange_of
from dcpbench.scenarios.steps import Losses, Oracle, other_seed
from dcpbench.verify.compare import compare, same_value
from dcpbench.verify.files import compare_files, file_controls
from dcpbench.verify.perturb import (
    all_different,
    compared_names,
    controllable,
    perturb_model,
    perturb_optimizer,
    with_changed_constants,
    with_other_names,
)
from dcpbench.verify.snapshot import DigestedLeaf, Idle, Leaves, TensorLeaf, snapshot_nested
from dcpbench.verify.tolerances import (
    TOLERANCES,
    compare_close,
    loss_name,
    loss_tolerance,
    losses_close,
    losses_equal,
)
from dcpbench.workloads import build_run
from dcpbench.workloads.batches import batches_of
from dcpbench.workloads.training_run import TrainingRun

_UNRESTORED = 5
"""How many models from other seeds a loss is held against before it is said that nothing tells them apart."""

_DRAWN = {"loss": 0.02, "model_equal": 0.1, "optim_equal": 2.0}
"""How far a run with a known defect may be from a plain one that draws other random numbers: its losses as a
part of these, its tensors of the largest magnitude in them."""

Findings = Iterable[Mismatch]

_RECORDED = {"train_state.losses", "train_state.current_loss"}
"""Losses as a run's state has them."""

Comparison = Callable[[list[float]], Findings]
"""What is wrong with the losses of a run."""

View = Callable[[TrainingRun], State]
"""What of a training run is compared: its live state, or a part of it."""


def verify_training(cell: Cell, oracle: Oracle, prepare: Callable[[TrainingRun], None] | None = None) -> None:
    """Train once more, this time without a save and beside the unwrapped twin: every step must be right, and
    the end the very state, by the same losses, of the run that saved.

    Args:
        prepare: brings a run that was just built to where the uninterrupted one began.
    """
    trained = oracle.trained
    with cell.phase("build"):
        unsaved = steps.parallel_run(cell, cell.config.seed)
        unsaved.keeps_random = trained.keeps_random
        if prepare:
            prepare(unsaved)
    cell.report.losses["continued"] = trained.train_state.losses
    until = trained.train_state.step
    if trained.why_no_twin:
        cell.report.not_applied |= dict.fromkeys(lockstep.CHECKS, trained.why_no_twin)
        steps.train(cell, unsaved, oracle.data, until)
    else:
        with cell.phase("build"):
            twin = build_run.build_twin(cell.config, cell.world, cell.config.seed)
            if prepare:
                copy_state(unsaved, twin, exchange_of(cell.world, unsaved))
        beside = Lockstep(cell, unsaved, twin, "in the uninterrupted run")
        beside.train(oracle.data, until)
        cell.report.losses["twin"] = beside.twin_losses
    with cell.phase("verify", "harmless"):
        never, saved = live_state(unsaved), live_state(trained)
        for check, leaves in never.items():
            where = "in the run that saved"
            cell.check("save_harmless", compare(leaves, saved[check]), where, compared_names(leaves))
            control_changed(cell, "save_harmless", leaves, where)


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


def make_different(cell: Cell, target: TrainingRun, checkpoint: Checkpoint, number: int = 0) -> None:
    """Change every element and every hyperparameter of the target of a load, the one of this number, so that
    a load which restores nothing of it cannot go unseen, and prove it."""
    with cell.phase("build"):
        seed = other_seed(cell, number)
        target.forget(seed)
        perturb_model(target.model, seed, target.is_left_out)
        perturb_optimizer(target.optimizer, seed, checkpoint.state.get("optim_equal"))
        known_defects.before_load(cell, target, checkpoint)
        if cell.config.load_into.gradients:
            target.leave_gradients(batches_of(cell.config, cell.world.device))
    prove_power(cell, target, checkpoint)


def load_and_verify(cell: Cell, target: TrainingRun, checkpoint: Checkpoint, number: int = 0) -> None:
    """Load a checkpoint, the one of this number, into a target in which everything was made different."""
    make_different(cell, target, checkpoint, number)
    steps.load(cell, target, checkpoint)
    verify_restored(cell, target, checkpoint)


def verify_saved_again(cell: Cell, target: TrainingRun, checkpoint: Checkpoint) -> None:
    """A restored run that was trained on is saved once more, and that brings back the same, into a target of
    loads before. Of a large state it would cost as much as all that is measured."""
    if not checkpoint.is_small:
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


def prove_power(
    cell: Cell, target: TrainingRun, checkpoint: Checkpoint, view: View = live_state, where: str = ""
) -> None:
    """The negative controls: each comparison with a target in which everything is different."""
    with cell.phase("verify", "power"):
        unrestored = view(target)
        for check, leaves in checkpoint.state.items():
            if check == FLAGS:
                other = all_different(unrestored[check])
            elif check == "extra_equal":
                constants = filter(target.may_be_constant, unrestored[check])
                other = with_changed_constants(leaves, unrestored[check], constants)
            else:
                left_out = filter(target.is_left_out, unrestored[check]) if check == "model_equal" else ()
                other = with_changed_constants(leaves, with_other_names(unrestored[check]), left_out)
            found = checkpoint.compare(check, other, cell.world.group, closely=False)
            cell.controlled(check, controllable(leaves), found, where or str(checkpoint))


def verify_restored(
    cell: Cell, target: TrainingRun, checkpoint: Checkpoint, view: View = live_state, where: str = ""
) -> None:
    """What came back must be, bit for bit, what was there at the moment of saving: part by part, or by
    content where the parts lie otherwise. Where `view` is of all of it, the checks of plug-ins follow."""
    with cell.phase("verify", "equality"):
        actual = view(target)
        for check in checkpoint.state:
            recall, group = checkpoint.recall_of(check), cell.world.group
            found = checkpoint.compare(check, actual[check], group, recall)
            marked = known_defects.mark_restored(cell, check, found, checkpoint, actual[check])
            names = compared_names(checkpoint.state[check])
            cell.check(check, marked, where or str(checkpoint), names)
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
    first, last = checkpoint.step + 1, until or checkpoint.step + cell.config.resume_steps
    where = f"after the checkpoint of step {checkpoint.step}{checkpoint.how}"
    with cell.phase("verify", "known_defects"):
        mark = known_defects.resumed_by(cell, target, losses.data, last)
    recorded = [*target.train_state.losses]
    if exactly or target.why_no_twin:
        resumed = steps.train(cell, target, losses.data, last)
    else:
        with cell.phase("build"):
            twin = build_run.build_twin(cell.config, cell.world, other_seed(cell, 0))
            copy_state(target, twin, exchange_of(cell.world, target))
        resumed = Lockstep(cell, target, twin, where).train(losses.data, last)
    recorded += resumed
    continued = losses.continued[first - 1 : last]
    tolerance = TOLERANCES[cell.config.tolerance.value]
    dtypes = target.dtypes | losses.computes_in
    near = partial(losses_close, first=first, tolerance=loss_tolerance(tolerance, dtypes))
    drawn = bool(target.draws and target.sizes)
    beside = partial(losses_close, first=first, tolerance=_DRAWN["loss"]) if drawn else near

    def marked(compared: Comparison) -> Comparison:
        return lambda seen: mark(
            compared(seen), lambda other: beside(other.train_state.losses[-len(seen) or last :], seen)
        )

    comparisons: dict[str, Comparison] = {}
    if exactly:
        comparisons["loss_resume_equal"] = marked(partial(losses_equal, continued, first=first))
    elif not _layout_matters(cell, target, losses.why_layout_bound):
        comparisons["loss_resume_close"] = marked(partial(near, continued, reference="uninterrupted"))
    with cell.phase("verify", "resumed"):
        taken = range(first, last + 1)
        _verify_losses(cell, comparisons, resumed, target.alive[-len(taken) :], losses, taken, where)
        expected = replace(checkpoint, state=losses.states[last])
        for check, leaves in retained_state(target).items():
            close = _DRAWN.get(check, tolerance) if drawn else tolerance
            explain = partial(_explain, mark, target, recorded, close)
            if check == FLAGS:
                _verify_resumed(cell, FLAGS, check, expected, leaves, f"{where}, resumed", explain)
            elif exactly:
                _verify_resumed(cell, "state_resume_equal", check, expected, leaves, where, explain)
    cell.report.resumed[checkpoint.step] = resumed


def _verify_resumed(
    cell: Cell,
    check: str,
    part: str,
    expected: Checkpoint,
    actual: Leaves,
    where: str,
    explain: Callable[[Findings], Findings],
) -> None:
    """A part of a resumed run's state must be what it is in the uninterrupted one. The control is a copy in
    which everything is different, and a value that is not restored is not by that as it should be."""
    found = expected.compare(part, actual, cell.world.group)
    values = [name for name, leaf in actual.items() if not isinstance(leaf, TensorLeaf | DigestedLeaf)]
    other = with_changed_constants(expected.state[part], all_different(actual), values)
    control = expected.compare(part, other, cell.world.group, closely=False)
    cell.check(check, explain(found), where, compared_names(expected.state[part]))
    cell.controlled(check, controllable(expected.state[part]), control, where)


def _explain(
    mark: known_defects.Mark, run: TrainingRun, recorded: list[float], tolerance: float, found: Findings
) -> Findings:
    """What was found of a resumed run's state, with marks: on tensors that are close to those of a run with
    the known defect, and on the losses in it where they are those that were recorded."""
    found, state = list(found), run.train_state

    def beside(other: TrainingRun) -> Findings:
        (tensors, objects), (of_run, objects_of_run) = map(_tensors_and_objects, (other, run))
        far = [*compare_close(tensors, of_run, tolerance), *compare(objects, objects_of_run)]
        alike = {*tensors, *objects} - {one.name for one in far} - _RECORDED
        if same_value([state.losses, state.current_loss], [recorded, recorded[-1]]):
            alike |= _RECORDED
        return [one for one in found if one.name not in alike]

    return mark(found, beside)


def _verify_losses(
    cell: Cell,
    comparisons: Mapping[str, Comparison],
    seen: list[float],
    alive: list[bool],
    losses: Losses,
    taken: range,
    where: str,
) -> None:
    """Losses by comparisons each of which must report those of models from which nothing was restored.

    Those of the steps `taken` mean something if they are finite and not zero, and a gradient was there
    (`alive`). Two models' losses may come close by chance, at a step or two: several are tried.
    """
    telling = {
        loss_name(step): math.isfinite(loss) and loss != 0.0 and lives
        for step, (loss, lives) in enumerate(zip(seen, alive, strict=False), taken.start)
    }
    for check, compared in comparisons.items():
        cell.check(check, compared(seen), where, map(loss_name, taken))
        reported: set[str] = set()
        for other in range(_UNRESTORED):
            if telling.keys() <= reported:
                break
            unrestored = steps.unrestored(cell, losses, other, taken)
            reported |= {finding.name for finding in compared(unrestored)}
        cell.control(check, {name: means and name in reported for name, means in telling.items()}, where)


def verify_files(cell: Cell) -> None:
    """At the end of a stage: every file of each checkpoint must be what it was when its save reported
    success; rank 0 looks at them."""
    for where, then, digests in cell.files.values():
        with cell.phase("verify", "files"):
            of_rank_0 = cell.world.rank == 0
            found = compare_files(then, digests()) if of_rank_0 else []
            control = file_controls(then) if of_rank_0 else {}
            cell.check("files_unchanged", found, where, control)
            cell.control("files_unchanged", control, where)


def control_changed(cell: Cell, check: str, expected: Leaves, where: str) -> None:
    """The control of an equality check with a changed copy of each piece of state."""
    control = compare(expected, all_different(expected), closely=False)
    cell.controlled(check, controllable(expected), control, where)


def changed(view: View) -> View:
    """A view in which all is different, for a control where no unrestored state is at hand."""
    return lambda run: {check: all_different(leaves) for check, leaves in view(run).items()}


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


def _tensors(run: TrainingRun) -> Leaves:
    """The live tensors of model, optimizer and component."""
    state = live_state(run)
    both = {**state["model_equal"], **state["optim_equal"], **run.component.leaves()}
    return {name: leaf for name, leaf in both.items() if isinstance(leaf, TensorLeaf | Idle)}


def _tensors_and_objects(run: TrainingRun) -> tuple[Leaves, Leaves]:
    """These, and whatever else is in its objects."""
    tensors = _tensors(run)
    objects = {**snapshot_nested(run.objects()), **run.component.leaves()}
    return tensors, {name: leaf for name, leaf in objects.items() if name not in tensors}
