"""The run that never saves comes before the run that saves, which has to end in the same state.

Cells on the same ranks that differ only in how they save share this run, and the verdict on its training. No
failure is judged by another cell's run: if the run that saved ends in another state, the cell trains its
own."""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from dcpbench.cell import checks, steps, trainer_steps, training
from dcpbench.cell.cell import Cell
from dcpbench.cell.steps import ReferenceRun
from dcpbench.compare.controls import compare_controlled
from dcpbench.compare.leaves import same_leaves
from dcpbench.config.text import listed
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Place, Sides
from dcpbench.core.rank_report import RankReport
from dcpbench.core.state import Name, StatePart, text_of
from dcpbench.runs.run import Run
from dcpbench.state.snapshot import State, TensorLeaf, digested

_HARMLESS = "save_harmless"
"""The check that saves change nothing."""
_SAVES: Sides = ("{} without saves", "{} with them")
_KEPT_BYTES = 2**28
"""A larger state is kept as digests for later cells."""
_MEASURED = ("twin_bytes", "gradient_bound_used")
"""The metrics of training without saves."""


@dataclass(frozen=True)
class KeptRun:
    """The run that never saves of an earlier cell on these ranks.

    Args:
        digest: cells with this `Config.training_digest` share it.
        cell: the cell that trained it.
        unsaved: the run.
        report: the checks, losses, notes and metrics other than times of its training.
    """

    digest: str
    cell: str
    unsaved: ReferenceRun
    report: RankReport


def train_unsaved(
    cell: Cell, exactly: bool = False, prepare: Callable[[Run], None] | None = None
) -> tuple[Cell, ReferenceRun]:
    """Train the run that never saves, and one that is never restored. Return the cell with its steps, and the
    record of the first.

    Args:
        exactly: a trainer saves as often as the configuration asks for, and not for its epochs in addition.
        prepare: puts a new run into the state in which it begins.
    """
    if cell.config.own_trainer:
        unsaved = ReferenceRun()
        cell = trainer_steps.train_and_choose(cell, unsaved, exactly)
        training.unrestored_losses(cell, unsaved)
        return cell, unsaved
    digest = None if prepare else cell.config.training_digest
    if digest is None:
        return cell, _train(cell, prepare)
    kept = cell.world.kept_run
    if cell.world.any_rank(kept is None or kept.digest != digest):
        cell.world.kept_run = None
        unsaved = _train(cell)
        cell.world.kept_run = _kept(cell, digest, unsaved)
        return cell, unsaved
    shared = copy.deepcopy(kept.report)  # later steps add to it
    cell.report.checks |= shared.checks
    cell.report.losses |= shared.losses
    cell.report.notes += shared.notes
    cell.report.measurements += shared.measurements
    cell.report.training_from = kept.cell
    return cell, kept.unsaved


def _train(cell: Cell, prepare: Callable[[Run], None] | None = None) -> ReferenceRun:
    """Train the run that never saves, and one that is never restored; return the record of the first."""
    unsaved, last = ReferenceRun(), cell.window.last
    run = training.train_without_saves(cell, unsaved, last, prepare)
    unsaved.losses += run.train_state.losses
    with cell.phase("verify", "retained"):
        unsaved.states[last] = run.retained_state()
        unsaved.unsaved_values[last] = run.unsaved_values().texts
    training.unrestored_losses(cell, unsaved)
    return unsaved


def _kept(cell: Cell, digest: str, unsaved: ReferenceRun) -> KeptRun | None:
    """Return the run of a cell for later ones, None if this rank has found a mismatch in its training."""
    report, state = cell.report, unsaved.states[cell.window.last]
    verdict = {
        check: report.checks[check]
        for check, spec in CHECKS.items()
        if spec.training and check in report.checks
    }
    if any(of_check.count for of_check in verdict.values()):
        return None
    measured = [measurement for measurement in report.measurements if measurement.metric in _MEASURED]
    training_report = RankReport(report.rank, verdict, measured, report.losses, notes=report.notes)
    unsaved = replace(unsaved, states={cell.window.last: _digested_if_large(state)})
    return KeptRun(digest, cell.name, unsaved, copy.deepcopy(training_report))


def _digested_if_large(state: State) -> State:
    """Return a copied state, with digests instead of tensors if these are large together."""
    tensors = (leaf for leaves in state.values() for leaf in leaves.values() if isinstance(leaf, TensorLeaf))
    if sum(leaf.local.nbytes for leaf in tensors) <= _KEPT_BYTES:
        return state
    return {part: digested(leaves) for part, leaves in state.items()}


def _leave_out_attributes(state: State, unsaved: State, changing: Collection[Name]) -> list[Name]:
    """Leave the attributes of a trainer out of the states of two of its runs. Return those that training
    changes and that differ, which are not compared after a load either."""
    attributes, others = (run.pop(StatePart.extra) for run in (state, unsaved))
    equal = same_leaves({name: leaf for name, leaf in attributes.items() if name in changing}, others)
    return sorted({*changing} & (attributes.keys() | others.keys()) - equal, key=text_of)


def _train_instead(cell: Cell, kept: KeptRun, reference: ReferenceRun) -> ReferenceRun:
    """Train the cell's own run, which the run that saved is compared with, and return its record. If it ends
    in another state than the kept one, the row says so, and the ranks are not used again."""
    report, last = cell.report, cell.window.last
    for check in kept.report.checks:
        report.checks.pop(check, None)
    for name in kept.report.losses:
        report.losses.pop(name, None)
    report.notes[:] = [note for note in report.notes if note not in kept.report.notes]
    report.measurements[:] = [
        measurement for measurement in report.measurements if measurement not in kept.report.measurements
    ]
    report.training_from = None
    unsaved = _train(cell)
    reference.unrestored = unsaved.unrestored
    reference.exclusions = replace(reference.exclusions, why_not_resumed=unsaved.exclusions.why_not_resumed)
    with cell.phase("verify", "harmless"):
        state, kept_state = unsaved.states[last], kept.unsaved.states[last]
        names = [
            name
            for part, leaves in kept_state.items()
            for name in leaves.keys() - same_leaves(leaves, state[part])
        ]
        if names:
            what = listed(sorted(map(text_of, names)))
            report.note("left_behind", f"the run that never saves of {kept.cell} has another {what}")
        if cell.world.any_rank(names):
            cell.world.kept_run = None
    return unsaved


def train_and_save_reference(cell: Cell, **saving: Any) -> ReferenceRun:
    """Train the run that never saves, then the reference run, and save this; return its record. `saving` is
    as in `steps.train_and_save`."""
    return save_reference(*train_unsaved(cell), **saving)[1]


def save_reference(cell: Cell, unsaved: ReferenceRun, **saving: Any) -> tuple[Cell, ReferenceRun]:
    """Train the reference run and save it; it has to end in the state of the run that never saves."""
    reference = steps.build_reference(cell, unsaved)
    steps.train_and_save(cell, reference, **saving)
    compare_final_states(cell, unsaved, reference)
    return cell, reference


def compare_final_states(cell: Cell, unsaved: ReferenceRun, reference: ReferenceRun) -> None:
    """Compare the final state of the run that saved with that of the run that never did. A trainer that does
    not repeat itself before its first save cannot show what a save changes."""
    last = cell.window.last
    never, saved = dict(unsaved.states[last]), dict(reference.states[last])
    reference.live_run.drop_unneeded_generators(never)
    checks.leave_out_unrepeated_values(unsaved.unsaved_values[last], reference, last)
    if (changing := reference.exclusions.changing) is not None:
        left_out = _leave_out_attributes(never, saved, changing)
        reference.exclusions = replace(reference.exclusions, changing=changing - {*left_out})
        for name in left_out:
            why = "a save changes it, or it differs between two uninterrupted runs"
            cell.report.note("left_out", why, "extra_equal", text_of(name))
        pairs = zip(unsaved.losses, reference.losses[: cell.window.saves[0]], strict=False)
        differing = [step for step, (loss, again) in enumerate(pairs, 1) if loss != again]
        if differing:
            step = differing[0]
            why = f"the trainer does not repeat itself: before any save, the loss of step {step} is another"
            cell.leave_out([_HARMLESS], why)
            return
    with cell.phase("verify", "harmless"):
        proven, kept = cell.proven("side_effect_free"), cell.world.kept_run
        compared = [compare_controlled(never[part], saved[part], proven=proven) for part in never]
        shared = kept is not None and unsaved is kept.unsaved
        differs = shared and cell.world.any_rank(any(comparison.found for comparison in compared))
    if differs:
        compare_final_states(cell, _train_instead(cell, kept, reference), reference)
        return
    for comparison in compared:
        cell.record(_HARMLESS, comparison, Place("in the run that saved"), _SAVES)
