"""Whatever a crash during a save leaves on the disk, the next start finds the old checkpoint, the new one, or
a refusal; and after the save has reported success, the new one.

The first stage saves twice and records what each rank does to files the second time. The second stage, in a
process of its own, makes of the record every state that the disk may be in after a crash, and loads it.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import contract, handover, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checks import verify_values
from dcpbench.cell.handover import Handover, leave, take
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.plugins.crash.disk_states import Crash, DiskState, after, disk_states
from dcpbench.plugins.crash.loading import Judge, Loaded, Loader, Values, folder_in_memory, plain, sentinel
from dcpbench.plugins.crash.operations import Kind, Record, Tree, tree_of
from dcpbench.plugins.crash.recording import read_record, recording
from dcpbench.plugins.crash.script import Shown, plain_script
from dcpbench.plugins.crash.small_saves import smallest
from dcpbench.plugins.crash.survey import BREAKS, StateKind, Survey, survey
from dcpbench.scenarios import fresh_process

_SAVED, _BEFORE, _LOGS, _LEFT = "saved", "before", "logs", "saves.pt"
_FILE = "dcpbench.checkpointers.storage.file"


def record_saves(cell: Cell, same_folder: bool, **_: Any) -> None:
    """The first stage: a save, which is old when the second one is recorded, into a folder of its own or into
    the same."""
    inside = cell.vary(folder=_SAVED)
    for name in (_SAVED, _LOGS):
        (cell.folder / name).mkdir(exist_ok=True)
    reference = steps.build(cell)
    steps.advance(cell, reference, until=cell.config.train_steps)
    first = steps.open_checkpointer(inside)
    old = steps.save(inside, reference.trained, first, "checkpoint" if same_folder else "old")
    steps.finish(inside, old)
    first.close()  # also the process that uploads: the next one records what it does
    before = str(Path(_BEFORE) / Path(old.checkpoint_id).name)
    left = [replace(handover.stored(cell, old), folder=before)]
    if cell.world.rank == 0:
        shutil.copytree(inside.folder, cell.folder / _BEFORE)
    if same_folder:
        cell.files.clear()  # they need not stay what they are
    steps.advance(cell, reference, until=2 * cell.config.train_steps)
    cell.world.meet()

    measured = len(cell.report.measurements)
    second = steps.open_checkpointer(inside)
    with recording(inside.folder, cell.folder / _LOGS, cell.world.rank) as recorder:
        try:
            new = steps.save(inside, reference.trained, second, "checkpoint" if same_folder else "new")
            new.pending.wait()
        except (CheckpointException, RuntimeError):
            if cell.config.storage.options.get("overwrite", True):
                raise  # else it has to be refused
        else:
            recorder.succeeded()
            left.append(handover.stored(cell, new))
    second.close()
    # What is recorded takes longer.
    del cell.report.measurements[measured:]
    if cell.world.rank == 0:
        leave(cell, Handover(left), _LEFT)


def load_states(cell: Cell, same_folder: bool, samples: int) -> None:
    """The second stage: every state is loaded; `samples` of each place where there are too many."""
    ranks = int(cell.config.world_size)
    record = read_record(cell.folder / _BEFORE, cell.folder / _LOGS, ranks)
    _verify_record(cell, record, tree_of(cell.folder / _SAVED))
    names = ("checkpoint",) if same_folder else ("new", "old")
    checkpointer = steps.open_checkpointer(cell)
    step, values = _load_complete(cell, checkpointer)
    judge = Judge(values[-1], values[0] if len(values) > 1 else None)

    def template() -> dict[str, Any]:
        return {key: sentinel(value) for key, value in values[-1].items()}

    with cell.phase("verify", "crash_states"), folder_in_memory() as folder:
        loader = Loader(folder, checkpointer.load, template)
        found = survey(disk_states(record, samples, cell.config.seed), loader, judge, names)
    with cell.phase("verify", "power"), folder_in_memory() as folder:
        controls = [*_controls(record, Loader(folder, checkpointer.load, template), judge, names)]
    _measure(cell, found)
    told = any(step.kind is Kind.success for of_rank in record.ranks for step in of_rank)
    _verify(cell, found, controls, told, step)
    _write_scripts(cell, found, record, values[-1], names)


def _load_complete(cell: Cell, checkpointer: Checkpointer) -> tuple[int, list[Values]]:
    """What the old checkpoint and the new one hold, which must be what was live when they were saved, and the
    step of the last; where the second save was refused, of the old one alone."""
    left, values = take(cell, _LEFT).checkpoints, list[Values]()
    for one in left:
        saved = one.checkpoint(cell, checkpointer, by_content=True)
        loaded = fresh_process.empty_values(checkpointer, saved.checkpoint_id)
        with cell.phase("verify", "complete"):
            checkpointer.load(loaded, saved.checkpoint_id)
            verify_values(cell, saved, loaded, None)
        values.append(plain(loaded))
    return left[-1].step, values


def _verify_record(cell: Cell, record: Record, saved: Tree) -> None:
    """What the record makes of the files before the save must be the files after it: a write that is missed
    is told."""

    def differing(made: Tree) -> list[Mismatch]:
        paths = sorted(path for path in {*made, *saved} if made.get(path, "") != saved.get(path, ""))
        return [contract.violation("record", f"it makes something else of {path}") for path in paths[:1]]

    # The control: a record without what changed anything, or, where nothing did, one of other files.
    less = replace(record, before={"other": b""}, ranks=tuple(() for _ in record.ranks))
    compared = Compared.of(differing(after(record)), differing(after(less)), ["record"])
    cell.record("contract_held", compared, "of the save that was recorded")


def _controls(record: Record, loader: Loader, judge: Judge, names: tuple[str, ...]) -> Iterable[Survey]:
    """What has to be told: complete files where other values were saved, no files, and the old ones."""
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


def _verify(cell: Cell, found: Survey, controls: Iterable[Survey], told_ever: bool, step: int) -> None:
    """The checks of the save of this step, which may have been told a success or refused."""
    seen = [kind for control in controls for kind in control.distinct]
    for check, breaks in BREAKS.items():
        if not told_ever and all(after_success for after_success, _ in breaks):
            cell.report.not_applied[check] = "the save was refused"
            continue
        told = [
            contract.violation(str(kind), _sentence(found, kind))
            for kind in found.distinct
            if (kind.told, kind.loaded) in breaks
        ]
        control = [
            contract.violation(str(kind), "planted") for kind in seen if (kind.told, kind.loaded) in breaks
        ]
        names = [
            str(StateKind(crash, *one))
            for crash in Crash
            for one in sorted(breaks)
            if told_ever or not one[0]
        ]
        cell.record(check, Compared.of(told, control, names), f"of the save of step {step}")


def _sentence(found: Survey, kind: StateKind) -> str:
    """How many states of a kind there are, and the simplest of them."""
    state = found.simplest[kind]
    moments = [step for _, step in state.done if step.changes]
    last = (
        f"after {len(moments)} operations, the last of which is: {moments[-1]}" if moments else "at the start"
    )
    lost = f"; lost: {', '.join(state.lost)}" if state.lost else ""
    count, total = found.distinct[kind], found.total(kind.crash, kind.told)
    return f"{count} of {total} distinct states, the simplest {last}{lost}"


def _measure(cell: Cell, found: Survey) -> None:
    measured = {
        "crash_states_enumerated": sum(found.enumerated.values()),
        "crash_states": sum(found.distinct.values()),
        "crash_states_s": found.seconds,
        **{f"crash_states_{loaded}": found.count(loaded) for loaded in Loaded},
    }
    for name, value in measured.items():
        cell.measure(name, value, phase="verify")


def _write_scripts(cell: Cell, found: Survey, record: Record, like: Values, names: tuple[str, ...]) -> None:
    """The simplest state of each kind that should not be, as a script, where the writer is a plain one: in a
    save by one rank of few values where that leaves one of the kind, else in the one that was recorded."""
    storage = cell.config.storage
    by_dcp = cell.config.checkpointer.name == "dcp"
    if not by_dcp or storage.target != _FILE or "serialization_format" in storage.options:
        return
    options = {"sync_files": storage.sync_files, "thread_count": storage.thread_count, **storage.options}
    simplest = {kind: Shown(state, record, like) for kind, state in found.simplest.items() if kind.broken}
    simplest |= smallest([*simplest], like, options, names)
    for kind, shown in simplest.items():
        name = f"{kind.crash}-{'after-success' if kind.told else 'while-saving'}-{kind.loaded}.py"
        Path(cell.folder / name).write_text(plain_script(str(kind), shown, names[0], options))
