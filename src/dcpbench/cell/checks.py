"""The checks of scenarios. Each brings its negative control, which shows in the cell that it could fail."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.cell import contract, side_effects, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import (
    names_by_defect,
    needs_copy,
    record_restored,
    repair,
)
from dcpbench.cell.steps import ReferenceRun, other_seed
from dcpbench.cell.training import train_with_twin, unrestored_losses
from dcpbench.compare.controls import compare_controlled, compared_names, perturbed_where
from dcpbench.compare.leaves import Comparison
from dcpbench.compare.losses import compare_resumed
from dcpbench.compare.stored import leaves_like
from dcpbench.config.text import listed
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import RESUMED, Place
from dcpbench.core.rank_report import CheckReport, Compared
from dcpbench.core.state import CHECK_OF, StatePart, key_of, text_of
from dcpbench.runs.put import Unchanged, change_again, perturb_run
from dcpbench.runs.run import Exclusions, Run, TrainingEndedError
from dcpbench.state.snapshot import Leaves, State, retained

Controls = dict[StatePart, Compared]
"""The negative control of each part, on a load target before the load."""


def leave_out_unrepeated_values(unsaved: Mapping[str, str], reference: ReferenceRun, until: int) -> None:
    """Leave out values in no state dict that no step changes and two runs do not share, such as a time: they
    are no cause of a wrong resume."""
    first, last = reference.unsaved_values.get(0, {}), reference.unsaved_values.get(until, {})
    for name in differing_texts(last, unsaved, ""):
        for values in reference.unsaved_values.values() if first.get(name) == last[name] else ():
            values.pop(name, None)


def differing_texts(expected: Mapping[str, str], actual: Mapping[str, str], how: str) -> dict[str, str]:
    """Return both texts of each value that differs, `how` before the actual one. Whole numbers come first: a
    fraction can differ because losses do."""
    names = sorted(expected, key=lambda name: not expected[name].isdigit())
    texts = {name: (expected[name], actual.get(name, "absent")) for name in names}
    return {name: f"{before}, {how} {now}" for name, (before, now) in texts.items() if before != now}


def perturb_target(cell: Cell, target: Run, checkpoint: Checkpoint, number: int = 0) -> Controls:
    """Change every element and every hyperparameter of a load target, so that a load which restores none of
    it is detected, and run the negative control of each part. What cannot be changed, and flags, which no
    load restores, are changed in a copy. `number` varies the new values."""
    with cell.phase("build"):
        unchanged = perturb_run(target, other_seed(cell, number))
        if cell.config.load_into.gradients:
            target.leave_gradients(cell.batches)
    with cell.phase("verify", "power"):
        controls = _controls(cell, target, checkpoint, unchanged)
        missed = {
            (part, name)
            for part, compared in controls.items()
            for name, did in compared.detected.items()
            if not did
        }
        if checkpoint.by_content:  # compared by all ranks together
            missed = set().union(*cell.world.gathered(missed))
        if missed:
            controls = _controls(
                cell, target, checkpoint, change_again(target, checkpoint.state, unchanged, missed)
            )
        cell.unrestored[checkpoint.checkpoint_id] = target.retained_state() if needs_copy(cell) else {}
    return controls


def _controls(cell: Cell, target: Run, checkpoint: Checkpoint, unchanged: Unchanged) -> Controls:
    """Compare a checkpoint with a target that was made different, and with changed copies of what is
    `unchanged` in it."""
    controls: Controls = {}
    unrestored = target.restorable(target.live_state())
    for part, leaves in target.restorable(checkpoint.state).items():
        names = leaves if part is StatePart.flags else unchanged.get(part, ())
        changed = perturbed_where(leaves, unrestored[part], names)
        mismatches = checkpoint.compare(leaves, changed, cell.world.group, closely=False)
        controls[part] = Compared.of((), mismatches, compared_names(leaves))
    return controls


def load_and_verify(cell: Cell, target: Run, checkpoint: Checkpoint, number: int = 0) -> Controls:
    """Make everything in a target different, load a checkpoint into it, and compare."""
    controls = perturb_target(cell, target, checkpoint, number)
    steps.load(cell, target, checkpoint)
    verify_restored(cell, target, checkpoint, controls)
    return controls


def load_beside(cell: Cell, reference: ReferenceRun, checkpoint: Checkpoint) -> None:
    """Check that a load changes no tensor of the run that was saved, which only its process shows. It is not
    one of the loads whose time is measured."""
    measured = len(cell.report.measurements)
    target = steps.build_target(cell, reference)

    def tensors(state: State) -> Leaves:
        return state[StatePart.model] | state[StatePart.optimizer]

    before = tensors(cell.ended[checkpoint.checkpoint_id])
    cell.saved.clear()  # of the run only tensors are compared here
    steps.load(cell, target, checkpoint)
    with cell.phase("verify", "side_effects"):
        compared = compare_controlled(
            before, tensors(reference.live_run.live_state()), proven=cell.proven("side_effect_free")
        )
        where = Place("loaded", checkpoint.step)
        cell.record("side_effect_free", compared, where, side_effects.LOAD)
    measurements = [
        measurement
        for measurement in cell.report.measurements[measured:]
        if (measurement.phase or "").startswith("verify")
    ]
    cell.report.measurements[measured:] = measurements


def verify_restored(cell: Cell, target: Run, checkpoint: Checkpoint, controls: Controls) -> None:
    """Check that a load has restored, bit for bit, the saved state; hooks of the model are compared after
    the resume. The checks of plug-ins follow."""
    expected = target.restorable(checkpoint.state)
    if cell.config.own_trainer:
        attributes = target.exclusions.comparable(checkpoint.state)[StatePart.extra]
        _note_values(cell, target.unrestored_values(attributes))
    if cell.config.own_trainer and not cell.world.any_rank(expected[StatePart.extra]):
        del expected[StatePart.extra]
        cell.leave_out(["extra_equal"], "training changes no plain attribute of the trainer")
    with cell.phase("verify", "equality"):
        actual, group = target.restorable(target.live_state()), cell.world.group
        comparisons: dict[StatePart, Comparison] = {}
        for part, leaves in expected.items():
            read_saved = checkpoint.reader_of(part, cell.checkpointer)
            mismatches = checkpoint.compare(leaves, actual[part], group, read_saved)
            # By content, ranks also report what others have; not what is left out on this one.
            left_out = {text_of(name) for name in checkpoint.state[part].keys() - leaves.keys()}
            mismatches = [mismatch for mismatch in mismatches if mismatch.name not in left_out]
            if part is StatePart.extra:
                mismatches = target.not_held_elsewhere(mismatches, leaves, before_a_step=True)
            compared = replace(controls[part], found=mismatches)
            comparisons[part] = Comparison(leaves, actual[part], compared)
        record_restored(cell, checkpoint, comparisons, checkpoint.place)
        for spec in CHECKS.values():
            if spec.probe:
                spec.probe(cell, target, checkpoint)
    if cell.times_measured("load_s") == 1 and not cell.checkpointer.unreadable:
        verify_absent_key(cell, checkpoint)


def _note_values(cell: Cell, values: Mapping[str, str]) -> None:
    """Note values in no state dict that differ after a load, each once: later loads are into the same run."""
    noted = {note.name for note in cell.report.notes if note.kind == "in_no_state_dict"}
    for name, text in values.items():
        if name not in noted:
            cell.report.note("in_no_state_dict", text, name=name)


def verify_absent_key(cell: Cell, checkpoint: Checkpoint) -> None:
    """Check, once for a checkpoint, that a load of a key which it lacks is refused. The control is a load of
    a key which it has."""
    where = checkpoint.at("absent_key")
    if where in cell.report.checks.get("contract_held", CheckReport()).compared:
        return

    def load(state: dict[str, Any]) -> None:
        cell.checkpointer.load(state, checkpoint.checkpoint_id)

    absent, present = (
        partial(load, {"absent": torch.zeros(1)}),
        partial(load, checkpoint.state_of_one_tensor()),
    )
    with cell.phase("verify", "absent_key"):
        contract.verify_refused(cell, BaseException, "absent", absent, present, where)


def verify_saved_again(cell: Cell, target: Run, checkpoint: Checkpoint, reference: ReferenceRun) -> None:
    """Save a resumed run and load that checkpoint into the same run, made different; a trainer trains on.
    Large models are left out: it would cost as much as everything else in the cell."""
    if not checkpoint.is_small:
        return
    checkpointer, step = cell.checkpointer, target.train_state.step
    beside = Path(checkpointer.name_of(step))
    # A trainer may read the step from the name, and remove what else it finds in the folder.
    relative = Path("again") / beside if cell.config.own_trainer else beside.with_name(f"again-{beside.name}")
    name = str(cell.folder / relative)
    state = target.retained_state()
    again = replace(checkpoint, step=step, checkpoint_id=name, how=", saved again")
    again = replace(again, state=state, as_saved=target.as_saved(state))
    with cell.phase("verify", "saved_again"):
        checkpointer.save(target.state(), name).wait()  # the load waits for all ranks
    load_and_verify(cell, target, again)
    end = cell.window.end_of(step)
    if cell.config.own_trainer and step < end and end in reference.states:
        resume(cell, target, again, reference)
    with cell.phase("verify", "saved_again"):
        cell.world.meet()  # a rank with a mismatch reads the saved tensor
        if cell.world.rank == 0:
            checkpointer.remove(name)


def verify_saved_early(cell: Cell, target: Run, checkpoint: Checkpoint, reference: ReferenceRun) -> None:
    """Save a trainer again one step after a load, since jobs are often stopped soon after a resume."""
    if checkpoint.step + 1 < cell.window.end_of(checkpoint.step):
        perturb_target(cell, target, checkpoint)
        steps.load(cell, target, checkpoint)
        with suppress(TrainingEndedError):
            steps.train(cell, target, checkpoint.step + 1)
            verify_saved_again(cell, target, checkpoint, reference)


def verify_values(
    cell: Cell, saved: Checkpoint, values: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Check that values which were read by their flattened keys are those that were saved, tensors in full;
    collective over `group`."""
    for part, leaves in saved.state.items():
        keys = {name: key_of(part, name) for name in leaves}
        actual = leaves_like(leaves, keys, values)
        how = partial(saved.compare, group=group, read_saved=saved.reader_of(part, cell.checkpointer))
        compared = compare_controlled(leaves, actual, perturbed_where(leaves, actual, actual), how=how)
        record_restored(cell, saved, {part: Comparison(leaves, actual, compared)}, saved.place)


def resume(
    cell: Cell,
    target: Run,
    checkpoint: Checkpoint,
    reference: ReferenceRun,
    until: int | None = None,
) -> None:
    """Train a restored run on, and compare its losses and its state with the reference run's; where it cannot
    repeat this exactly, each step is compared with a twin's, and losses have to be close.

    Args:
        until: the last step; by default `resume_steps` after the checkpoint.
    """
    exactly, last = reference.exactly, until or cell.window.end_of(checkpoint.step)
    taken = range(checkpoint.step + 1, last + 1)
    where = checkpoint.at("resumed")
    of_losses = "loss_resume_equal" if exactly else "loss_resume_close"
    with cell.phase("verify", "known_defects"):
        why = repair(cell, target, checkpoint)
    if why:
        cell.leave_out((of_losses, "state_resume_equal"), why, where)
        return
    ended = False
    generators = dict(target.random.states)
    if cell.config.own_trainer:
        resumed, ended = _resume_trainer(cell, target, checkpoint, reference, last)
    elif exactly or target.exclusions.why_no_twin:
        resumed = steps.train(cell, target, last)
    else:
        resumed, _ = train_with_twin(cell, target, reference, last, where, other_seed(cell, 0))
    if why := reference.exclusions.why_not_resumed:
        cell.leave_out((of_losses, "state_resume_equal"), why, where)
        return
    with cell.phase("verify", "resumed"):
        dtypes = target.compute_dtypes.union(reference.exclusions.compute_dtypes)
        close = None if exactly else (cell.config.tolerance.value, dtypes)
        compared: dict[str, Compared] = {}
        if exactly or not _layout_matters(cell, target, reference.exclusions, where):
            losses = reference.losses[taken.start - 1 : last]
            had_gradient, others = target.had_gradient[-len(taken) :], unrestored_losses(cell, reference)
            others = others * (1 + last // max(1, len(others)))  # those of a trainer may be fewer
            compared[of_losses] = compare_resumed(losses, resumed, taken.start, close, had_gradient, others)
        flags = StatePart.flags
        left = names_by_defect(cell, flags)  # no step changes the flags that a load has left
        actual, expected = (
            {**state, flags: {name: leaf for name, leaf in state[flags].items() if text_of(name) not in left}}
            for state in (target.live_state(), target.exclusions.comparable(reference.states[last]))
        )
        if cell.config.own_trainer and until:  # it trains on
            del actual[StatePart.extra]
        for part, live in actual.items():
            if not ended and (exactly or part is flags):
                leaves, how, proven = retained(live), None, cell.proven("side_effect_free")
                if checkpoint.by_content:
                    how, proven = partial(checkpoint.compare, group=cell.world.group), set()
                compared[part] = compare_controlled(expected[part], leaves, proven=proven, how=how)
                if part is StatePart.extra:
                    mismatches = target.not_held_elsewhere(compared[part].found, expected[part])
                    compared[part] = replace(compared[part], found=mismatches)
        for of, comparison in compared.items():
            check = {of_losses: of_losses, flags: CHECK_OF[flags]}.get(of, "state_resume_equal")
            cell.record(
                check, comparison, checkpoint.at("resumed", ", resumed") if of == flags else where, RESUMED
            )
    cell.report.resumed[checkpoint.step] = resumed
    values = reference.unsaved_values.get(last, {})
    _note_values(cell, differing_texts(values, target.unsaved_values().texts, "resumed"))
    if cell.config.own_trainer:
        _report_generators(cell, generators, reference, checkpoint.step, last, compared[of_losses])


def _resume_trainer(
    cell: Cell, target: Run, checkpoint: Checkpoint, reference: ReferenceRun, last: int
) -> tuple[list[float], bool]:
    """Train a restored trainer on, and compare the attributes that its first step has made with the reference
    run's. Return its losses, and whether it ended before step `last`."""
    try:
        first = steps.train(cell, target, checkpoint.step + 1)
        with cell.phase("verify", "resumed"):
            made = target.added_attributes()
            attributes = reference.after_first_step.get(checkpoint.step + 1, {})
            expected = {
                name: leaf for name, leaf in attributes.items() if name not in made or made[name] is not None
            }
            compared = compare_controlled(expected, {name: made[name] for name in expected if name in made})
            if cell.world.any_rank(expected):
                compared = replace(compared, found=target.not_held_elsewhere(compared.found, expected))
                cell.record("state_resume_equal", compared, checkpoint.at("first_step"), RESUMED)
        return [*first, *steps.train(cell, target, last)], False
    except TrainingEndedError as early:
        cell.leave_out(["state_resume_equal"], str(early), checkpoint.at("resumed"))
        return target.train_state.losses[-(early.step - checkpoint.step) :], True


def _report_generators(
    cell: Cell,
    restored: Mapping[str, torch.Tensor],
    reference: ReferenceRun,
    step: int,
    last: int,
    losses: Compared,
) -> None:
    """Report the default generators that a trainer draws from and does not restore. Losses and state show
    whether a step depends on them."""
    saved, later = reference.generators[step], reference.generators[last]
    names = [
        name
        for name, state in saved.items()
        if not torch.equal(state, later[name]) and not torch.equal(state, restored[name])
    ]
    if names:
        needed = "" if losses.found else "; no step of the window depended on it"
        text = f"{listed(names)}: drawn from and not restored{needed}"
        cell.report.note("unrestored_generators", text, "random_equal")


def _layout_matters(cell: Cell, run: Run, before: Exclusions, where: Place) -> bool:
    """Return whether the losses of a run need not be those of another layout, and report why; collective.

    Args:
        before: of the run that has saved.
        where: the place at which the gradients of the steps were compared with a twin's.
    """
    why = run.exclusions.why_layout_bound or before.why_layout_bound
    gradients = cell.report.checks.get("gradient_close", CheckReport()).distinct.values()
    defects = cell.world.gathered(
        {mismatch.by for mismatch in gradients if mismatch.by and mismatch.where == where}
    )
    if why is None and (known := sorted(set().union(*defects))):
        why = f"the gradients of these steps are wrong ({known[0]})"
    if why is None and run.random.drawn and (run.sizes or cell.config.compile):
        differs = "ranks draw others than one process"
        if not run.sizes:
            differs = "compiled code draws others than eager code"
        why = f"the model draws random numbers in training, and {differs}"
    if why:
        cell.leave_out(["loss_resume_close"], why, where)
    return why is not None
