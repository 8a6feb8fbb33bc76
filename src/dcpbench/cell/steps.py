"""The steps of a scenario: build, train, save, load. `dcpbench.cell.checks` verifies what they produce."""

import itertools
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import checkpoint_files, contract, side_effects
from dcpbench.cell.cell import Cell, Window
from dcpbench.cell.checkpoint import Checkpoint, SaveInFlight
from dcpbench.cell.checkpoint_files import wait_until_seen
from dcpbench.cell.known_defects import attribute_in_checkpoint, attribute_raised, has_mismatch
from dcpbench.compare.leaves import Comparison
from dcpbench.compare.stored import compare_stored
from dcpbench.core.mismatch import Place
from dcpbench.core.plugins import hooks
from dcpbench.core.rank_report import NOTHING
from dcpbench.core.state import StatePart
from dcpbench.formats.audit import compare_manifest
from dcpbench.runs import build_run
from dcpbench.runs.run import Exclusions, Run
from dcpbench.state.snapshot import Leaves, State, retained
from dcpbench.workloads.generators import States


@dataclass
class ReferenceRun:
    """A run that trains uninterrupted, such as the reference run: its checkpoints, and the losses and states
    that resumes are compared with. A later stage gets it without the live run.

    Args:
        checkpoints: those that runs are restored from, oldest first.
        losses: from step 1 on.
        states: its state after each step at which a resumed run ends.
        unrestored: losses of a run that is built from another seed and never restored, from step 1 on.
        exclusions: what of it cannot be compared, as the run that never saves and its own end have shown.
        unsaved_values: values that are in no state dict, after these steps; 0 is before the first.
        after_first_step: the attributes that the steps of a trainer make, one step after each save.
        generators: the default ones of a trainer, after each save and where resumed runs end.
        torch_version: the torch that trained it.
        exactly: whether resumes repeat it bit for bit. Another layout sums in another order.
        window: the steps of a trainer.
        files: by checkpoint id, its place and the digests of its files, as in `Cell.files`.
        extra_ends: steps at which resumed runs end in addition to those of the plan.
        run: the live run.
    """

    checkpoints: list[Checkpoint] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    unrestored: list[float] = field(default_factory=list)
    exclusions: Exclusions = field(default_factory=Exclusions)
    unsaved_values: dict[int, dict[str, str]] = field(default_factory=dict)
    after_first_step: dict[int, Leaves] = field(default_factory=dict)
    generators: dict[int, States] = field(default_factory=dict)
    torch_version: str = str(torch.__version__)
    exactly: bool = True
    window: Window | None = None
    files: Mapping[str, tuple[Place, Mapping[str, str] | None]] = field(default_factory=dict)
    extra_ends: tuple[int, ...] = ()
    run: Run | None = None

    @property
    def live_run(self) -> Run:
        """The live run, in the stage that trains it."""
        assert self.run, "of an earlier stage"
        return self.run


def other_seed(cell: Cell, number: int) -> int:
    """Return a seed that is not the cell's, another one for each `number`."""
    return cell.config.seed + 1000 * (number + 1)


def build_cell_run(cell: Cell, seed: int, exclusions: Exclusions) -> Run:
    """Build a run under the parallelism of the cell, or the user's trainer. Without `scheduler` a load
    creates that; `exclusions` are those that an earlier run has shown."""
    run = build_run.build_configured(cell.config, cell.world, seed, exclusions)
    for hook in hooks("run"):
        hook(cell, run)
    return run


def build_reference(cell: Cell, unsaved: ReferenceRun | None = None) -> ReferenceRun:
    """Build the reference run; `unsaved` is the record of the run that never saves, if there is one."""
    with cell.phase("build"):
        before = unsaved or ReferenceRun()
        run = build_cell_run(cell, cell.config.seed, before.exclusions)
        reference = ReferenceRun(
            losses=run.train_state.losses, unrestored=before.unrestored, exclusions=run.exclusions, run=run
        )
        cell.report.losses["continued"] = reference.losses
        reference.unsaved_values[0] = run.unsaved_values().texts
        return reference


def build_target(cell: Cell, reference: ReferenceRun, number: int = 0, step: int = 0) -> Run:
    """Build a load target from another seed. Unless the cell wants an empty optimizer, that gets the state
    which DCP gives a fresh one.

    Args:
        reference: the reference run, which has shown what is its state.
        number: of the target; each has its own seed.
        step: after which the checkpoint was saved that it is for.
    """
    cell.report.during = Place("before the load")
    with cell.phase("build"):
        target = build_cell_run(cell, other_seed(cell, number), reference.exclusions)
        target.prepare_load(step, cell.config.load_into.filled)
    return target


def train(cell: Cell, run: Run, until: int) -> list[float]:
    """Train up to and including step `until`; return the losses of the steps taken."""
    with cell.training(run):
        return run.train(cell.batches, until)


def train_reference(cell: Cell, reference: ReferenceRun, until: int) -> None:
    """Train the reference run up to and including step `until`, and keep its state where resumed runs end."""
    run, saves = reference.live_run, cell.window.saves
    ends = {*cell.window.ends, *reference.extra_ends}
    first_steps = {step + 1 for step in (*saves, *ends)} if cell.config.own_trainer else set[int]()
    for step in sorted({*ends, *first_steps, until}):
        if not run.train_state.step <= step <= until:
            continue
        train(cell, run, step)
        with cell.phase("verify", "retained"):
            if step in ends:
                reference.states[step] = run.retained_state()
                reference.unsaved_values[step] = run.unsaved_values().texts
            if cell.config.own_trainer:
                reference.after_first_step[step] = retained(run.added_attributes())
                reference.generators[step] = dict(run.random.states)


def train_and_save(
    cell: Cell,
    reference: ReferenceRun,
    state: Callable[[Run], dict[str, Any]] | None = None,
    extra: Leaves | None = None,
    parts: Collection[StatePart] | None = None,
    at: Iterable[int] | None = None,
) -> list[Checkpoint]:
    """Train the reference run and save it at each step of the plan, then train it to the end. `reference`
    gets the checkpoints.

    Training continues while a save is in flight. A save is finished before the next one begins or, with
    `overlap_saves`, just after; saves that overlap are in two slots of the checkpointer. Those of a user's
    trainer are called as in its job: one after the other, and finished at the end.

    Args:
        state, extra, parts: as in `save`.
        at: save at these steps only.
    """
    overlap, at_the_end = cell.config.overlap_saves, cell.config.own_trainer
    save_one = partial(save, cell, reference.live_run, state=state, extra=extra, parts=parts)
    saves: list[SaveInFlight] = []
    slots = itertools.cycle((1, 2) if overlap else (0,))
    for slot, step in zip(slots, at or cell.window.saves, strict=False):
        train_reference(cell, reference, until=step)
        if saves and not overlap and not at_the_end:
            finish(cell, saves[-1])
        saves.append(save_one(slot=slot, retained=reference.states.get(step)))
        if overlap and len(saves) == 1:
            contract.verify_refused_beside(cell)
        elif overlap:
            finish(cell, saves[-2])
    train_reference(cell, reference, until=cell.window.last)
    if at_the_end:
        for in_flight in saves:
            in_flight.pending.wait()
        cell.world.meet()
        cell.checkpointer.note_removed(saves[-1].checkpoint.checkpoint_id)
    for in_flight in saves if at_the_end else saves[-1:]:
        finish(cell, in_flight)
    checkpoints = reference.checkpoints = [in_flight.checkpoint for in_flight in saves]
    decide_compared_state(cell, reference, checkpoints)
    cell.ended.update(
        {checkpoint.checkpoint_id: reference.states[cell.window.last] for checkpoint in checkpoints}
    )
    return checkpoints


def decide_compared_state(cell: Cell, reference: ReferenceRun, checkpoints: Iterable[Checkpoint]) -> None:
    """Decide what a load has to restore, after the last step of the reference run, and drop the state of
    generators that training does not draw from; collective."""
    run = reference.live_run
    for name, kind in run.unsaved_values().unreadable.items():
        cell.report.note("unreadable", kind, "extra_equal", name)
    for check, why in run.exclusions.not_compared.items():
        cell.leave_out([check], why)
    if (drawn := run.random.needed) is None:
        return
    needed = frozenset[str]().union(*cell.world.gathered(drawn))
    run.exclusions = reference.exclusions = replace(run.exclusions, generators=needed)
    if not needed:
        cell.leave_out(["random_equal"], "no step draws random numbers that must be restored")
    saved = (state for checkpoint in checkpoints for state in (checkpoint.state, checkpoint.as_saved))
    for state in (*reference.states.values(), *saved):
        run.drop_unneeded_generators(state)


def save(
    cell: Cell,
    run: Run,
    name: str | None = None,
    state: Callable[[Run], dict[str, Any]] | None = None,
    extra: Leaves | None = None,
    parts: Collection[StatePart] | None = None,
    slot: int = 0,
    retained: State | None = None,
) -> SaveInFlight:
    """Start a save in the save mode of the cell; `finish` waits for it.

    Args:
        name: of the checkpoint's folder; by default the step.
        state: returns the state of the run to save; by default all of it.
        extra: its objects in addition to the state of the run, by name.
        parts: those of the run's state that are in that state; by default all of them.
        slot: of the checkpointer, for saves that overlap.
        retained: a copy of the run's state, if there is one already.
    """
    step = run.train_state.step
    where = Place("saved", step)
    with cell.phase("verify", "retained"):
        saved = retained or run.retained_state()
    number = cell.times_measured("save_stall_s")
    # The buffers in shared memory that a save keeps for its run are open descriptors.
    keeps = cell.config.save.shares_memory and all(
        run_before is not run for run_before in cell.saved.values()
    )
    still_open = side_effects.open_before(cell, again=number > 0 and not keeps)
    with side_effects.unchanged(cell, run, where, side_effects.SAVE, saved):
        with cell.phase("save"):
            checkpoint_id = str(cell.folder / (name or cell.checkpointer.name_of(step)))
            pending = cell.checkpointer.save(state(run) if state else run.state(), checkpoint_id, slot)
            cell.uploads.follow(pending)
        with cell.phase("verify", "files"):
            files = pending.then(
                partial(cell.checkpointer.at_success, checkpoint_id, cell.world.rank, cell.world.size == 1)
            )
    run.comes_after = where
    cell.measure("save_stall_s", pending.released - pending.started, number, "save")
    if parts is not None:
        saved = {part: saved[part] for part in parts}
    cell.saved[checkpoint_id] = run
    checkpoint = Checkpoint(step, checkpoint_id, saved, run.as_saved(saved))
    keys = checkpoint.expected_entries(extra)
    in_files = checkpoint.keyed(run.restorable(checkpoint.as_saved))
    return SaveInFlight(checkpoint, pending, files, still_open, keys, in_files, number)


def finish(cell: Cell, in_flight: SaveInFlight) -> Checkpoint:
    """Wait until a checkpoint is complete, audit it, and compare its files with the saved state."""
    checkpoint, number, checkpointer = in_flight.checkpoint, in_flight.number, cell.checkpointer
    checkpoint_id = checkpoint.checkpoint_id
    phase = "upload" if cell.config.save.asynchronous else "save"
    with cell.phase(phase):
        took_s = in_flight.pending.wait()
        if not cell.config.overlap_saves:  # which delays it
            cell.measure("save_s", took_s, number, phase)
    with cell.phase("verify", "seen"):
        on_several_hosts = wait_until_seen(cell, checkpointer.folder(checkpoint_id), checkpoint.place)
    cell.measure("checkpoint_bytes", checkpointer.size(checkpoint_id), number, phase)
    with cell.phase("verify", "plain_read"):
        comparisons = _compare_files(cell, in_flight)
    with cell.phase("verify", "audit"):
        anywhere = _audit(cell, in_flight, on_several_hosts, has_mismatch(comparisons))
        compared = attribute_in_checkpoint(cell, "stored", checkpoint, comparisons, anywhere).values()
        if comparisons:
            sides = "saved {}", "{} in the files"
            cell.record("files_equal", sum(compared, NOTHING), checkpoint.place, sides)
    if cell.config.raw and not cell.config.overlap_saves:
        _measure_raw(cell, checkpoint, number)
    return checkpoint


def _audit(cell: Cell, in_flight: SaveInFlight, on_several_hosts: bool, files_differ: bool) -> bool:
    """Compare the manifest of a checkpoint, which rank 0 reads, with what every rank had to save and has
    synced; note the digests of its files. Return whether its files differ from the saved state on a rank;
    collective."""
    checkpoint, checkpointer = in_flight.checkpoint, cell.checkpointer
    files = checkpoint_files.digests_of(cell, in_flight, on_several_hosts)
    own_part = in_flight.keys, files, _synced(cell, checkpoint), files_differ
    where = Place("save_ended", checkpoint.step)
    cell.record("side_effect_free", in_flight.still_open(), where, side_effects.LEFT_OPEN)
    keys, (files, *_), synced, differing = zip(*cell.world.gathered(own_part), strict=True)
    checkpoint_files.watch_files(cell, checkpoint, files)
    for name in checkpointer.late.get(checkpoint.checkpoint_id, ()):
        text = f"{name} {checkpoint}: not there when save returned on this rank"
        cell.report.note("late_files", text)
    if why := checkpointer.unreadable:
        cell.leave_out(("checkpoint_whole", "files_equal", "contract_held"), why)
        return any(differing)
    compared = NOTHING
    if cell.world.rank == 0:
        expected = {key: entry for of_rank in keys for key, entry in of_rank.items()}
        known = None if None in synced else set().union(*synced)
        compared = compare_manifest(checkpointer.manifest(checkpoint.checkpoint_id), expected, files, known)
    cell.record("checkpoint_whole", compared, checkpoint.place)
    return any(differing)


def _synced(cell: Cell, checkpoint: Checkpoint) -> set[str] | None:
    """Return the files that this rank has synced; None if it need not, or if a process that the save started
    may have done it."""
    raw = cell.checkpointer.raw
    started = set(multiprocessing.active_children()) - cell.children_before
    if not raw or not raw.sync or started:
        return None
    return cell.synced(Path(checkpoint.checkpoint_id))


def _compare_files(cell: Cell, in_flight: SaveInFlight) -> dict[StatePart, Comparison]:
    """Compare a checkpoint's files, read without their writer, with the saved state."""
    stored = cell.checkpointer.stored(in_flight.checkpoint.checkpoint_id)
    if not stored:
        cell.leave_out(["files_equal"], "nothing else reads files of this format")
        return {}
    return {
        part: compare_stored(leaves, stored, cell.world.device) for part, leaves in in_flight.in_files.items()
    }


def _measure_raw(cell: Cell, checkpoint: Checkpoint, number: int) -> None:
    """Write and read plain files of the checkpoint's sizes, a share on each rank, all ranks at once. It is
    done right after the save, so that other load on the machine affects both."""
    raw = cell.checkpointer.raw
    if raw is None:
        return
    files = cell.checkpointer.manifest(checkpoint.checkpoint_id).found
    share = [length for _, length in sorted(files.items())][cell.world.rank :: cell.world.size]
    folder = cell.folder / f"raw-of-rank{cell.world.rank}"
    for metric, do in (("raw_write_s", raw.write), ("raw_read_s", raw.read)):
        with cell.phase("raw"):
            cell.world.meet()
            began = time.perf_counter()
            do(folder, share)
            cell.measure(metric, time.perf_counter() - began, number, "raw")


def load(
    cell: Cell,
    target: Run,
    checkpoint: Checkpoint,
    state: dict[str, Any] | None = None,
    install: Callable[[], None] | None = None,
) -> None:
    """Load a checkpoint into a target. Neither the run that was saved nor gradients of the target may change.

    Args:
        state: what is loaded into; by default the state of the target.
        install: copies `state` into the target, if the load does not.
    """
    where = Place("loaded", checkpoint.step)
    saved, before = cell.saved.get(checkpoint.checkpoint_id), cell.ended.get(checkpoint.checkpoint_id)
    with cell.phase("verify", "seen"):
        folder = cell.checkpointer.folder(checkpoint.checkpoint_id)
        wait_until_seen(cell, folder, checkpoint.place)
    with (
        side_effects.nothing_left_open(cell, where),
        side_effects.unchanged(cell, None if saved is target else saved, where, side_effects.LOAD, before),
        side_effects.gradients_unchanged(cell, target, where),
        cell.phase("load"),
    ):
        began = time.perf_counter()
        try:
            cell.checkpointer.load(target.state() if state is None else state, checkpoint.checkpoint_id)
            if install:
                install()
        except (Exception, CheckpointException) as error:
            attribute_raised(cell, checkpoint, target, error)
            if cell.config.own_trainer and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(
                    f"{error}; {checkpoint_files.report_missing(cell, checkpoint, error.filename)}"
                ) from error
            raise
        if cell.config.own_trainer:
            target.train_state.step = checkpoint.step  # no checkpoint of it has that
        target.comes_after = where
        cell.world.synchronize()
        took_s = time.perf_counter() - began
    cell.measure("load_s", took_s, cell.times_measured("load_s"), "load")
