"""A job that is killed inside a save, and is started anew: it finds the newest checkpoint that loads, and
goes on as if nothing had happened.

The first stage saves, and dies in one save more, by SIGKILL of ranks, or of a process that uploads for one.
The second stage has processes that know nothing of it but what is on the disk.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from threading import Event

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import checks, contract, handover, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.checkpointers.on_disk import FolderState, newest_first
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.plugins.crash.disk_states import Crash
from dcpbench.plugins.crash.killing import PUBLISHER, At, Killing, misplaced
from dcpbench.plugins.crash.loading import Loaded
from dcpbench.plugins.crash.survey import StateKind
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.files import FileDigests, digest_files
from dcpbench.workloads.run_state import live_state, retained_state
from dcpbench.workloads.training_run import TrainingRun

Kill = str | list[int]
"""`one` rank, `all`, these ranks, or the `uploader`, the process that uploads for one rank."""

_MARKS = "marks"
_TOLD_S = 30.0
"""So long a rank may take to say that a process which uploads is dead."""


def save_and_die(cell: Cell, kill: Kill, at: str, folder: str) -> None:
    """The first stage: the save after the last of the plan is killed `at` a point of `killing.At`. The
    `folder` is `new` for each save, or the `same` for all."""
    killing = _killing(cell, kill, at)
    killing.marks.mkdir(exist_ok=True)
    with killing.watching(cell.world.rank):
        run, checkpointer = _train_and_save(cell, folder)
        cell.world.meet()
        killing.arm()
        with cell.phase("save"):
            try:
                pending = checkpointer.save(run.state(), _place(cell, folder, run.train_state.step))
                ended = Event()
                pending.when_ended(ended.set)
                if ended.wait(_TOLD_S if killing.uploader else None):
                    pending.wait()
            except (Exception, CheckpointException) as error:
                (killing.marks / f"{cell.world.rank}.told").write_text(f"{type(error).__name__}: {error}")
                if not killing.uploader or not killing.arrived:  # the save failed before anybody was killed
                    raise
    if killing.uploader and killing.arrived:  # the job ends, by what its ranks were told
        cell.world.meet()
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(cell: Cell, kill: Kill, at: str, folder: str) -> None:
    """The second stage: load the newest checkpoint that loads, train on, and save where the save was killed,
    if training comes by there."""
    killing, checkpointer = _killing(cell, kill, at), steps.open_checkpointer(cell)
    candidates, record = handover.take_over(cell, checkpointer, same_layout=True)
    _verify_killed(cell, killing, candidates, folder)
    if folder == "same":
        cell.files.clear()  # they need not have stayed what they are
    target = steps.build_target(cell)
    found = _load_newest(cell, target, candidates)
    if found is None:
        return
    checks.load_and_verify(cell, target, found, 1)
    last = candidates[-1].step if found is candidates[0] else None
    checks.resume(cell, target, found, record, until=last)
    saved = steps.save(cell, target, checkpointer, Path(_place(cell, folder, target.train_state.step)).name)
    steps.finish(cell, saved)
    checks.load_and_verify(cell, target, saved, 2)


def _killing(cell: Cell, kill: Kill, at: str) -> Killing:
    """Who dies: a lone one at the point that it publishes is who does that, elsewhere the last one."""
    lone = PUBLISHER if at == At.in_publication else cell.world.size - 1
    ranks = [*range(cell.world.size)] if kill == "all" else [lone] if isinstance(kill, str) else kill
    return Killing(cell.folder, cell.folder / _MARKS, At(at), tuple(ranks), kill == "uploader")


def _place(cell: Cell, folder: str, step: int) -> str:
    """Where the checkpoint of a step goes."""
    return str(cell.folder / ("checkpoint" if folder == "same" else f"step-{step:04d}"))


def _train_and_save(cell: Cell, folder: str) -> tuple[TrainingRun, Checkpointer]:
    """Train and save as the plan says, and train on until the save that is to be killed; leave to the next
    stage what a run that nobody kills comes to."""
    plan = cell.vary(saves=cell.config.saves + 1)
    reference = replace(steps.build(plan), ends=frozenset(plan.config.save_steps))
    steps.advance(plan, reference, until=plan.config.last_step)
    with cell.phase("build"):
        run = steps.parallel_run(cell, cell.config.seed)
    checkpointer = steps.open_checkpointer(cell)
    *whole, last = plan.config.save_steps
    for step in whole:
        cell.files.clear()  # they need not stay what they are
        steps.train(cell, run, step)
        saved = steps.save(cell, run, checkpointer, Path(_place(cell, folder, step)).name)
        steps.finish(cell, saved)
    steps.train(cell, run, last)
    state = retained_state(run)
    killed = Checkpoint(last, _place(cell, folder, last), checkpointer, state, numbers=run.numbers)
    handover.hand_over(cell, [saved, killed], reference.record)
    return run, checkpointer


def _verify_killed(cell: Cell, killing: Killing, candidates: list[Checkpoint], folder: str) -> None:
    """That ranks were killed at the point, which the files tell; whether the others were told."""
    here = cell.world.rank == 0
    saved, killed = candidates
    _, usual, _ = cell.files[saved.checkpoint_id]
    before: FileDigests = usual if folder == "same" else {}
    after = digest_files(Path(killed.checkpoint_id)) if here else {}

    def wrong(at: At) -> list[Mismatch]:
        told = misplaced(at, killing, usual, before, after)
        late = [rank for rank in killing.expected if rank not in killing.arrived]
        told += [f"rank {rank} did not arrive there" for rank in late]
        return [contract.violation("where it was killed", one) for one in told]

    # The control: the same files do not tell of any other point.
    others = [wrong(at)[:1] for at in At if at is not killing.at] if here else []
    broken = [one for found in others for one in found] if all(others) else []
    where, names = f"of the save of step {killed.step}", ["where it was killed"] if here else []
    cell.record("contract_held", Compared.of(wrong(killing.at) if here else [], broken, names), where)

    told = {int(mark.stem) for mark in killing.marks.glob("*.told")}
    left = {*range(cell.world.size)} - ({*killing.ranks} if not killing.uploader else set())
    if here and left:
        cell.measure("ranks_hung", len(left - told), phase="save")

    def silent(heard: set[int]) -> list[Mismatch]:
        return [contract.violation("the save", f"rank {rank} was not told") for rank in sorted(left - heard)]

    if killing.uploader:
        cell.record("contract_held", Compared.of(silent(told), silent(set()), ["the save"]), f"{where}, told")


def _load_newest(cell: Cell, target: TrainingRun, candidates: list[Checkpoint]) -> Checkpoint | None:
    """Load the newest checkpoint that can be, as a start that knows nothing does; which of these it is, None
    if it is none of them or there is none."""
    whole = [str(one.folder) for one in newest_first([cell.folder]) if one.state is FolderState.whole]

    def is_now(one: Checkpoint) -> bool:
        state, group = live_state(target), cell.world.group
        found = [one.compare(check, state[check], group, closely=False) for check in one.state]
        return not any(gathered(any(found), group))

    seen, found = Loaded.refused, None
    sentinel = not any(map(is_now, candidates))
    for place in gathered(whole, cell.world.group)[0]:
        there = [one for one in candidates if one.checkpoint_id == place]
        try:
            steps.load(cell, target, there[0])
        except (Exception, CheckpointException):  # noqa: BLE001, S112 - whatever it is, it is a refusal
            continue
        found = next(filter(is_now, there), None)
        seen = Loaded.mixture if found is None else Loaded.new
        break

    for check, kind in (("crash_recoverable", Loaded.refused), ("crash_consistent", Loaded.mixture)):
        told = [
            contract.violation(str(StateKind(Crash.killed, False, kind)), "it is what the next start finds")
        ]
        names = [one.name for one in told]
        held, control = told if seen is kind else [], told if sentinel else []
        cell.record(check, Compared.of(held, control, names), "after the ranks were killed")
    return found
