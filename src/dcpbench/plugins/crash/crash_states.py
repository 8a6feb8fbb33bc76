"""Check every disk state that a crash during a save can leave: the next start has to load the old checkpoint
or the new one, or to refuse; after the save has reported success, it has to load the new one.

The first stage saves twice and records the file operations of each rank in the second save. The second stage,
in a separate process, derives every possible disk state from the record, and loads it.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import contract, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint, SaveInFlight
from dcpbench.cell.checks import verify_values
from dcpbench.cell.handover import read_reference, write_reference
from dcpbench.cell.steps import ReferenceRun
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.compare.across_layouts import compare_ranks
from dcpbench.core.mismatch import Mismatch, Place
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import key_of, text_of
from dcpbench.plugins.crash.disk_states import Crash, DiskState, after, disk_states
from dcpbench.plugins.crash.loading import Judge, Loaded, Loader, Values, folder_in_memory, plain, sentinel
from dcpbench.plugins.crash.operations import Kind, Record, Tree, tree_of
from dcpbench.plugins.crash.recording import read_record, recording
from dcpbench.plugins.crash.survey import BREAKS, StateKind, Survey, survey
from dcpbench.state.snapshot import State

_SAVED, _BEFORE, _LOGS = "saved", "before", "logs"


def record_saves(cell: Cell, same_folder: bool, **_: Any) -> None:
    """Run the first stage: save twice, into different folders or the same, and record the second save."""
    inside = cell.vary(folder=_SAVED)
    for name in (_SAVED, _LOGS):
        (cell.folder / name).mkdir(exist_ok=True)
    reference = steps.build_reference(cell)
    steps.train_reference(cell, reference, until=cell.config.steps_before_save)
    old = steps.save(inside, reference.live_run, "checkpoint" if same_folder else "old")
    steps.finish(inside, old)
    inside.checkpointer.close()  # ends the uploading process too, so that the next one is recorded
    before = str(cell.folder / _BEFORE / Path(old.checkpoint.checkpoint_id).name)
    left = [replace(_left(cell, old), checkpoint_id=before)]
    if cell.world.rank == 0:
        shutil.copytree(inside.folder, cell.folder / _BEFORE)
    if same_folder:
        cell.files.clear()  # the second save changes them
    steps.train_reference(cell, reference, until=2 * cell.config.steps_before_save)
    cell.world.meet()

    measured = len(cell.report.measurements)
    inside = cell.vary(folder=_SAVED)
    second = inside.checkpointer
    with recording(inside.folder, cell.folder / _LOGS, cell.world.rank) as recorder:
        try:
            new = steps.save(inside, reference.live_run, "checkpoint" if same_folder else "new")
            new.pending.wait()
        except (CheckpointException, RuntimeError):
            if cell.config.storage.options.get("overwrite", True):
                raise  # otherwise it has to be refused
        else:
            recorder.note(Kind.success)
            left.append(_left(cell, new))
    second.close()
    # A recorded save takes longer.
    del cell.report.measurements[measured:]
    write_reference(cell, ReferenceRun(left), any_layout=True)


def _left(cell: Cell, save: SaveInFlight) -> Checkpoint:
    """Describe a checkpoint to one process that loads it alone; collective. Values on which the ranks
    disagree are left out: no load can restore them on all ranks, which other checks report."""
    state, saved = State(), save.checkpoint
    with cell.phase("verify", "left"):
        for part, leaves in saved.as_saved.items():
            names = (name for name in leaves if key_of(part, name) in save.keys)
            full, compared = compare_ranks({name: leaves[name] for name in names}, cell.world.group)
            differing = {finding.name for finding in compared.found}
            if agreed := {name: leaf for name, leaf in full.items() if text_of(name) not in differing}:
                state[part] = agreed
    return replace(saved, state=state, as_saved={}, by_content=True)


def load_states(cell: Cell, same_folder: bool, samples: int) -> None:
    """Run the second stage: load every disk state, or `samples` random ones wherever there are too many."""
    ranks = int(cell.config.world_size)
    record = read_record(cell.folder / _BEFORE, cell.folder / _LOGS, ranks)
    _verify_record(cell, record, tree_of(cell.folder / _SAVED))
    names = ("checkpoint",) if same_folder else ("new", "old")
    cell, reference = read_reference(cell, any_layout=True)
    step, values = reference.checkpoints[-1].step, _load_complete(cell, reference)
    judge = Judge(values[-1], values[0] if len(values) > 1 else None)

    def template() -> dict[str, Any]:
        return {key: sentinel(value) for key, value in values[-1].items()}

    with cell.phase("verify", "crash_states"), folder_in_memory() as folder:
        loader = Loader(folder, cell.checkpointer.load, template)
        surveyed = survey(disk_states(record, samples, cell.config.seed), loader, judge, names)
    with cell.phase("verify", "power"), folder_in_memory() as folder:
        controls = [*_controls(record, Loader(folder, cell.checkpointer.load, template), judge, names)]
    _measure(cell, surveyed)
    succeeded = any(step.kind is Kind.success for of_rank in record.ranks for step in of_rank)
    _verify(cell, surveyed, controls, succeeded, step)


def _load_complete(cell: Cell, reference: ReferenceRun) -> list[Values]:
    """Load the old and the new checkpoint and compare them with the live state when they were saved. Return
    the values of both; if the second save was refused, only those of the old one."""
    values = list[Values]()
    for saved in reference.checkpoints:
        loaded = _empty_values(cell.checkpointer, saved.checkpoint_id)
        with cell.phase("verify", "complete"):
            cell.checkpointer.load(loaded, saved.checkpoint_id)
            verify_values(cell, saved, loaded, None)
        values.append(plain(loaded))
    return values


def _empty_values(checkpointer: Checkpointer, checkpoint_id: str) -> dict[str, Any]:
    """Return a state dict, by flattened keys, that a load of everything in a checkpoint fills."""
    return {
        key: None
        if entry.shape is None
        else torch.empty(entry.shape, dtype=getattr(torch, str(entry.dtype).removeprefix("torch.")))
        for key, entry in checkpointer.manifest(checkpoint_id).entries.items()
    }


def _verify_record(cell: Cell, record: Record, saved: Tree) -> None:
    """Check that the record, applied to the files before the save, results in the files after it, so that no
    write was missed."""

    def differing(made: Tree) -> list[Mismatch]:
        paths = sorted(path for path in {*made, *saved} if made.get(path, "") != saved.get(path, ""))
        return [contract.violation("record", f"it results in other content of {path}") for path in paths[:1]]

    # The control: a record without changes, of other files in case the save changed nothing.
    less = replace(record, before={"other": b""}, ranks=tuple(() for _ in record.ranks))
    compared = Compared.of(differing(after(record)), differing(after(less)), ["record"])
    cell.record("contract_held", compared, "of the save that was recorded")


def _controls(record: Record, loader: Loader, judge: Judge, names: tuple[str, ...]) -> Iterable[Survey]:
    """Yield surveys that have to find violations: of complete files with other values, of no files, of old
    files."""
    keys = [*judge.new]
    halves = ({*keys[::2]}, {*keys[1::2]})

    def other_than(kept: set[str]) -> Values:
        return {key: value if key in kept else sentinel(value) for key, value in judge.new.items()}

    mixed, foreign = (Judge(*map(other_than, kept)) for kept in (halves, (set[str](), set[str]())))
    success = [(rank, step) for rank, steps_of in enumerate(record.ranks) for step in steps_of]
    trees: list[tuple[Tree, Judge]] = [(after(record), mixed), (after(record), foreign), ({}, judge)]
    if judge.old is not None:
        trees.append((record.before, judge))
    for tree, by in trees:
        fresh = Loader(loader.folder, loader.load, loader.template)
        moments = (tuple(success), ())
        states = [DiskState(tree, crash, done) for crash in Crash for done in moments]
        yield survey(states, fresh, by, names)


def _verify(cell: Cell, surveyed: Survey, controls: Iterable[Survey], succeeded: bool, step: int) -> None:
    """Record the checks of the save of a step, which succeeded or was refused."""
    in_controls = [kind for control in controls for kind in control.distinct]
    for check, breaks in BREAKS.items():
        if not succeeded and all(after_success for after_success, _ in breaks):
            cell.leave_out([check], "the save was refused")
            continue
        violations = [
            contract.violation(str(kind), _sentence(surveyed, kind))
            for kind in surveyed.distinct
            if kind.broken == check
        ]
        control = [contract.violation(str(kind), "injected") for kind in in_controls if kind.broken == check]
        names = [
            str(StateKind(crash, after_success, loaded))
            for crash in Crash
            for after_success, loaded in sorted(breaks)
            if succeeded or not after_success
        ]
        cell.record(check, Compared.of(violations, control, names), Place("of the save of step {step}", step))


def _sentence(surveyed: Survey, kind: StateKind) -> str:
    """Return the number of states of a kind, and a description of the simplest."""
    state = surveyed.simplest[kind]
    moments = [step for _, step in state.done if step.changes]
    last = f"after {len(moments)} operations, the last one: {moments[-1]}" if moments else "at the start"
    lost = f"; lost: {', '.join(state.lost)}" if state.lost else ""
    count, total = surveyed.distinct[kind], surveyed.total(kind.crash, kind.after_success)
    return f"{count} of {total} distinct states, the simplest {last}{lost}"


def _measure(cell: Cell, surveyed: Survey) -> None:
    measured = {
        "crash_states_enumerated": surveyed.enumerated,
        "crash_states": sum(surveyed.distinct.values()),
        "crash_states_s": surveyed.seconds,
        **{f"crash_states_{loaded}": surveyed.count(loaded) for loaded in Loaded},
    }
    for name, measurement in measured.items():
        cell.measure(name, measurement, phase="verify")
