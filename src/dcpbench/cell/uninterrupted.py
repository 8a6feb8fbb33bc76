"""The run that never saves comes before the run that saves, which has to end in the same state. A user's
trainer shows in it where its epochs end, where it ends itself, and how long the cell takes.

Cells on the same ranks that differ only in how they save share this run, and the verdict on its training. No
failure is judged by another cell's run: if the run that saved ends in another state, the cell trains its
own."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell, Window
from dcpbench.cell.steps import Story
from dcpbench.compare.controls import compare_controlled
from dcpbench.config.schema import FEWEST_STEPS, Config
from dcpbench.config.text import duration_text, listed
from dcpbench.core.mismatch import Place, Sides
from dcpbench.core.rank_report import RankReport, Skip
from dcpbench.core.state import StatePart, text_of
from dcpbench.runs.attributes import changed_by_training, own_attributes
from dcpbench.runs.own_trainer import TrainerRun, TrainingEndedError
from dcpbench.runs.run import Run
from dcpbench.runs.run_state import (
    State,
    differing_names,
    digested_above,
    leave_out_attributes,
    only_generators,
    retained_state,
)
from dcpbench.state.snapshot import retained
from dcpbench.twin import lockstep

_HARMLESS = "save_harmless"
"""The check that saves change nothing."""
_SAVES: Sides = ("{} without saves", "{} with them")
_KEPT_BYTES = 2**28
"""A larger state is kept as digests for later cells."""
_MEASURED = ("twin_bytes", "gradient_bound_used")
"""The metrics of training without saves."""
_NEWEST = 10
"""The default step of a trainer's last regular save. The one before has fewer digits, so that a retention in
the order of names as texts removes the newest checkpoint."""
_RESUMED = 23
"""The most steps of a trainer after a load, unless its next epoch ends later."""
LONGEST = 92
"""The most steps of a trainer's uninterrupted run."""
_LONG_S = 10.0
"""Steps of a cell that take longer are announced to the user, with the keys that make them fewer."""
_EPOCHS_WITHIN = LONGEST // 2
"""The most steps in which the end of a trainer's first epoch is looked for."""


@dataclass(frozen=True)
class Kept:
    """The run that never saves of an earlier cell on these ranks.

    Args:
        digest: cells with this `Config.training_digest` share it.
        cell: the cell that trained it.
        record: of the run.
        report: the checks, losses, notes and metrics other than times of its training.
    """

    digest: str
    cell: str
    record: Story
    report: RankReport


def begin(
    cell: Cell, exactly: bool = False, prepare: Callable[[Run], None] | None = None
) -> tuple[Cell, Story]:
    """Train the run that never saves, and one that is never restored. Return the cell with its steps, and the
    record of the first.

    Args:
        exactly: a trainer saves as often as the configuration asks for, and not for its epochs in addition.
        prepare: puts a new run into the state in which it begins.
    """
    if cell.config.own_trainer:
        record = Story()
        cell = _train_trainer(cell, record, exactly)
        checks.unrestored_losses(cell, record)
        return cell, record
    digest = None if prepare else cell.config.training_digest
    if digest is None:
        return cell, _train(cell, prepare)
    kept = cell.world.kept
    if cell.world.any_rank(kept is None or kept.digest != digest):
        cell.world.kept = None
        record = _train(cell)
        cell.world.kept = _kept(cell, digest, record)
        return cell, record
    shared = copy.deepcopy(kept.report)  # later steps add to it
    cell.report.checks |= shared.checks
    cell.report.losses |= shared.losses
    cell.report.notes += shared.notes
    cell.report.measurements += shared.measurements
    cell.report.training_from = kept.cell
    return cell, kept.record


def _train(cell: Cell, prepare: Callable[[Run], None] | None = None) -> Story:
    """Train the run that never saves, and one that is never restored; return the record of the first."""
    record, last = Story(), cell.window.last
    run = checks.train_without_saves(cell, record, last, prepare)
    record.losses += run.train_state.losses
    with cell.phase("verify", "retained"):
        record.states[last] = retained_state(run)
        record.unsaved_values[last] = run.unsaved_values().texts
    checks.unrestored_losses(cell, record)
    return record


def _kept(cell: Cell, digest: str, record: Story) -> Kept | None:
    """Return the run of a cell for later ones, None if this rank has found a mismatch in its training."""
    report, state = cell.report, record.states[cell.window.last]
    verdict = {check: report.checks[check] for check in lockstep.CHECKS if check in report.checks}
    if any(of_check.count for of_check in verdict.values()):
        return None
    measured = [one for one in report.measurements if one.metric in _MEASURED]
    found = RankReport(report.rank, verdict, measured, report.losses, notes=report.notes)
    record = replace(record, states={cell.window.last: digested_above(_KEPT_BYTES, state)})
    return Kept(digest, cell.name, record, copy.deepcopy(found))


def _train_instead(cell: Cell, kept: Kept, reference: Story) -> Story:
    """Train the cell's own run, which the run that saved is compared with, and return its record. If it ends
    in another state than the kept one, the row says so, and the ranks are not used again."""
    report, last = cell.report, cell.window.last
    for check in kept.report.checks:
        report.checks.pop(check, None)
    for name in kept.report.losses:
        report.losses.pop(name, None)
    report.notes[:] = [one for one in report.notes if one not in kept.report.notes]
    report.measurements[:] = [one for one in report.measurements if one not in kept.report.measurements]
    report.training_from = None
    record = _train(cell)
    reference.unrestored = record.unrestored
    reference.limits = replace(reference.limits, why_not_resumed=record.limits.why_not_resumed)
    with cell.phase("verify", "harmless"):
        own, other = record.states[last], kept.record.states[last]
        if names := differing_names(other, own):
            what = listed(sorted(map(text_of, names)))
            report.note("left_behind", f"the run that never saves of {kept.cell} has another {what}")
        if cell.world.any_rank(names):
            cell.world.kept = None
    return record


def train_and_save(cell: Cell, **saving: Any) -> Story:
    """Train the run that never saves, then the reference run, and save this; return its record. `saving` is
    as in `steps.train_and_save`."""
    return save(*begin(cell), **saving)[1]


def save(cell: Cell, unsaved: Story, **saving: Any) -> tuple[Cell, Story]:
    """Train the reference run and save it; it has to end in the state of the run that never saves."""
    reference = steps.build(cell, unsaved)
    steps.train_and_save(cell, reference, **saving)
    compare(cell, unsaved, reference)
    return cell, reference


def compare(cell: Cell, unsaved: Story, reference: Story) -> None:
    """Compare the final state of the run that saved with that of the run that never did. A trainer that does
    not repeat itself before its first save cannot show what a save changes."""
    last = cell.window.last
    never, saved = dict(unsaved.states[last]), dict(reference.states[last])
    only_generators(never, reference.trained)
    checks.leave_out_unlike_values(unsaved.unsaved_values[last], reference, last)
    if (changing := reference.limits.changing) is not None:
        left_out = leave_out_attributes(never, saved, changing)
        reference.limits = replace(reference.limits, changing=changing - {*left_out})
        for name in left_out:
            why = "a save changes it, or it differs between two uninterrupted runs"
            cell.report.note("left_out", why, "extra_equal", text_of(name))
        pairs = zip(unsaved.losses, reference.losses[: cell.window.saves[0]], strict=False)
        other = [step for step, (loss, again) in enumerate(pairs, 1) if loss != again]
        if other:
            why = (
                f"the trainer does not repeat itself: before any save, the loss of step {other[0]} is another"
            )
            cell.leave_out([_HARMLESS], why)
            return
    with cell.phase("verify", "harmless"):
        proven, kept = cell.proven("side_effect_free"), cell.world.kept
        compared = [compare_controlled(never[part], saved[part], proven=proven) for part in never]
        shared = kept is not None and unsaved is kept.record
        differs = shared and cell.world.any_rank(any(one.found for one in compared))
    if differs:
        compare(cell, _train_instead(cell, kept, reference), reference)
        return
    for one in compared:
        cell.record(_HARMLESS, one, Place("in the run that saved"), _SAVES)


def _train_trainer(cell: Cell, record: Story, exactly: bool) -> Cell:
    """Train a trainer without saves, choose its steps, and note what training changes; return the cell with
    these steps."""
    config, gathered = cell.config, cell.world.gathered
    run = checks.build_without_saves(cell, record)
    assert isinstance(run, TrainerRun)
    first, newest = retained(run.attributes()), State()
    most, step_s = max(LONGEST, config.last_step), math.inf
    looks_until = 0 if config.train_steps else _EPOCHS_WITHIN

    def chosen() -> Window:
        return window_of_trainer(config, gathered(run.epochs.steps)[0], most, exactly)

    while run.train_state.step < max(chosen().last, min(most, looks_until)):
        began = time.perf_counter()
        try:
            steps.train(cell, run, run.train_state.step + 1)
        except TrainingEndedError as ended:
            most = ended.step
            try:
                chosen()
            except ValueError as too_few:  # one of the first steps raised by a mistake
                raise (ended.__cause__ or ended if most <= FEWEST_STEPS else too_few) from None
            break
        step_s = min(step_s, max(gathered(time.perf_counter() - began)))
        with cell.phase("verify", "retained"):
            newest = retained_state(run)
        if run.train_state.step == 1:
            own = own_attributes(run.trainer)
            first |= {name: leaf for name, leaf in newest[StatePart.extra].items() if name not in own}
        elif run.train_state.step == FEWEST_STEPS:
            announce_length(cell, chosen(), looks_until, step_s)
        if run.train_state.step == chosen().last:
            record.states[run.train_state.step] = newest
    window = chosen()
    record.states = {window.last: record.states.get(window.last, newest)}
    record.unsaved_values[window.last] = run.unsaved_values().texts
    record.losses += run.train_state.losses[: window.last]
    record.limits = replace(run.limits, changing=changed_by_training(first, newest[StatePart.extra]))
    cell.report.note("column", " ".join(map(str, window.saves)), name="save_steps")
    cell.report.note("column", str(window.resume_steps), name="resume_steps")
    checks.verify_replicas(cell, run)
    return replace(cell, chosen=window)


def announce_length(cell: Cell, window: Window, looks_until: int, step_s: float) -> None:
    """Announce how long the other steps take, by the faster of the first two, if that is long; raise Skip if
    it is longer than a cell may take."""
    end = window.end_of(window.saves[0])
    resumed = sum(window.end_of(step) - step for step in (*window.saves, end, window.saves[-1]))
    left = max(window.last, looks_until) - FEWEST_STEPS + end + window.last + resumed
    left_s, limit_s = left * step_s, cell.config.timeouts.cell_s
    about = f"{left} more steps take about {duration_text(left_s)}"
    text = f"{about}; for fewer pass train_steps, resume_steps, saves"
    if left_s > limit_s:
        raise Skip(f"{text}, such as 2, 2 and 1, or allow more than timeouts.cell_s={limit_s:g}")
    if left_s > _LONG_S:
        cell.announce("train", text)


def window_of_trainer(config: Config, epoch_ends: Sequence[int], most: int, exactly: bool = False) -> Window:
    """Choose the steps of a trainer: as many saves as the configuration asks for, the last after step 10; one
    exactly at an epoch's end and one in the epoch that follows; and resumed runs that pass the next end.

    Args:
        epoch_ends: the steps that took the last batch of an epoch, as far as they were seen.
        most: the most steps of the uninterrupted run.
        exactly: as many saves as the configuration asks for, and no others.

    Raises:
        ValueError: the trainer takes too few steps.
    """
    asked = f"train_steps={config.train_steps} resume_steps={config.resume_steps} saves={config.saves}"
    too_few = f"the trainer takes {most} steps, too few for {asked}"
    if not (saves := _regular(config, most)):
        raise ValueError(too_few)
    if epoch_ends and not config.train_steps:
        saves = _with_epoch(saves, epoch_ends, most, len(saves) if exactly else len(saves) + 2)
    wanted = _RESUMED
    if epoch_ends:  # from the first save on past the end that follows the last one
        length = epoch_ends[0]
        wanted = max(wanted, *((step // length + 1) * length + 1 - step for step in saves))
    last = saves[-1] + config.resume_steps if config.resume_steps else min(saves[-1] + wanted, most)
    if not saves[-1] < last <= most:
        raise ValueError(too_few)
    return Window(tuple(saves), config.resume_steps or wanted, last)


def _regular(config: Config, most: int) -> list[int]:
    """Return the steps of saves that do not depend on epochs."""
    if config.train_steps:
        return config.save_steps
    room = max(most - (config.resume_steps or FEWEST_STEPS), 0)
    count = min(config.saves, room)
    if room >= max(_NEWEST, count):
        first = max(1, _NEWEST + 1 - count)
        regular = {*range(first, first + count)}
    else:
        regular = {room // count * number or number for number in range(1, count + 1)}
    return sorted(regular | ({config.save_at} if config.save_at is not None else set()))


def _with_epoch(saves: list[int], epoch_ends: Sequence[int], most: int, count: int) -> list[int]:
    """Return the steps of at most `count` saves: one at an epoch's end, one in the epoch that follows, and
    the newest of the others. Two of the others may be these."""
    length = epoch_ends[0]
    within = [end for end in epoch_ends if end in saves and end + 1 in saves]
    end = within[0] if within else length
    following = [step for step in saves if end < step < end + length]
    chosen = [end, following[0] if following else end + min(3, max(1, length // 2))]
    chosen = [step for step in chosen if step + FEWEST_STEPS <= most]
    others = [step for step in reversed(saves) if step not in chosen]
    return sorted([*chosen, *others][:count])
