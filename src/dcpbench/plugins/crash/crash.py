"""Kill a job inside a save and start it again: it has to find the newest checkpoint that loads, and continue
as if it had not been killed.

The first stage saves, and in one more save SIGKILL ends ranks, or a process that uploads for one. The second
stage has new processes, which know only the files.
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
from dcpbench.core.mismatch import Mismatch, Place
from dcpbench.core.rank_report import Compared
from dcpbench.formats.files import FileDigests, digest_files
from dcpbench.formats.on_disk import FolderState, newest_first
from dcpbench.plugins.crash.disk_states import Crash
from dcpbench.plugins.crash.killing import PUBLISHER, At, Killing, misplaced
from dcpbench.plugins.crash.loading import Loaded
from dcpbench.plugins.crash.survey import StateKind
from dcpbench.runs.run import Run

Kill = str | list[int]
"""`one` rank, `all` ranks, a list of ranks, or the `uploader`, the process that uploads for one rank."""

_MARKS = "marks"
_REPORT_S = 30.0
"""Seconds in which a rank has to report that its uploading process is dead."""


def save_and_die(cell: Cell, kill: Kill, at: str, folder: str) -> None:
    """Run the first stage: kill the save after the last of the plan `at` a point of `killing.At`. The
    `folder` is `new` for each save, or the `same` for all."""
    killing = _killing(cell, kill, at)
    killing.marks.mkdir(exist_ok=True)
    with killing.watching(cell.world.rank):
        run = _train_and_save(cell, folder)
        cell.world.meet()
        killing.arm()
        with cell.phase("save"):
            try:
                pending = cell.checkpointer.save(run.state(), _place(cell, folder, run.train_state.step))
                ended = Event()
                pending.when_ended(ended.set)
                if ended.wait(_REPORT_S if killing.uploader else None):
                    pending.wait()
            except (Exception, CheckpointException) as error:
                (killing.marks / f"{cell.world.rank}.raised").write_text(f"{type(error).__name__}: {error}")
                if not killing.uploader or not killing.arrived:  # the save failed before a rank was killed
                    raise
    if killing.uploader and killing.arrived:  # the job ends, because its ranks know of the failure
        cell.world.meet()
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(cell: Cell, kill: Kill, at: str, folder: str) -> None:
    """Run the second stage: load the newest checkpoint that loads, train on, and save at the step of the
    killed save, if training reaches it."""
    killing = _killing(cell, kill, at)
    cell, reference = handover.read_reference(_with_killed_save(cell), any_layout=True)
    candidates = reference.checkpoints
    _verify_killed(cell, killing, candidates, folder)
    if folder == "same":
        cell.files.clear()  # the killed save may have changed them
    target = steps.build_target(cell, reference)
    newest = _load_newest(cell, target, candidates)
    if newest is None:
        return
    checks.load_and_verify(cell, target, newest, 1)
    last = candidates[-1].step if newest is candidates[0] else None
    checks.resume(cell, target, newest, reference, until=last)
    saved = steps.save(cell, target, Path(_place(cell, folder, target.train_state.step)).name)
    checks.load_and_verify(cell, target, steps.finish(cell, saved), 2)


def _killing(cell: Cell, kill: Kill, at: str) -> Killing:
    """Return what to kill. A single rank is the publisher if it is killed in publication, else the last
    rank."""
    single = PUBLISHER if at == At.in_publication else cell.world.size - 1
    ranks = [*range(cell.world.size)] if kill == "all" else [single] if isinstance(kill, str) else kill
    return Killing(cell.folder, cell.folder / _MARKS, At(at), tuple(ranks), kill == "uploader")


def _with_killed_save(cell: Cell) -> Cell:
    """Return the cell with the save that is killed, after those of the plan."""
    return cell.vary(saves=cell.config.saves + 1)


def _place(cell: Cell, folder: str, step: int) -> str:
    """Return the folder of the checkpoint of a step."""
    return str(cell.folder / ("checkpoint" if folder == "same" else f"step-{step:04d}"))


def _train_and_save(cell: Cell, folder: str) -> Run:
    """Train and save as planned, and train on until the save to be killed. Hand over to the next stage the
    results of a run that is not killed."""
    plan = _with_killed_save(cell)
    reference = replace(steps.build_reference(plan), extra_ends=tuple(plan.config.save_steps))
    steps.train_reference(plan, reference, until=plan.config.last_step)
    with cell.phase("build"):
        run = steps.build_cell_run(cell, cell.config.seed, reference.exclusions)
    *complete, last = plan.config.save_steps
    for step in complete:
        cell.files.clear()  # a save to the same folder may change them
        steps.train(cell, run, step)
        saved = steps.finish(cell, steps.save(cell, run, Path(_place(cell, folder, step)).name))
    steps.train(cell, run, last)
    state = run.retained_state()
    killed = Checkpoint(last, _place(cell, folder, last), state)
    steps.decide_compared_state(cell, reference, [saved, killed])
    handover.write_reference(cell, replace(reference, checkpoints=[saved, killed]), any_layout=True)
    return run


def _verify_killed(cell: Cell, killing: Killing, candidates: list[Checkpoint], folder: str) -> None:
    """Check by the files that ranks were killed at the point, and check that the others raised an error."""
    here = cell.world.rank == 0
    saved, killed = candidates
    usual = cell.files[saved.checkpoint_id].digests or {}
    before: FileDigests = usual if folder == "same" else {}
    after = digest_files(Path(killed.checkpoint_id)) if here else {}

    def wrong(at: At) -> list[Mismatch]:
        problems = misplaced(at, killing, usual, before, after)
        late = [rank for rank in killing.expected if rank not in killing.arrived]
        problems += [f"rank {rank} did not arrive there" for rank in late]
        return [contract.violation("where it was killed", problem) for problem in problems]

    # The control: the same files contradict every other point.
    others = [wrong(at)[:1] for at in At if at is not killing.at] if here else []
    broken = [violation for violations in others for violation in violations] if all(others) else []
    where, names = Place("of the save of step {step}", killed.step), ["where it was killed"] if here else []
    cell.record("contract_held", Compared.of(wrong(killing.at) if here else [], broken, names), where)

    raised = {int(mark.stem) for mark in killing.marks.glob("*.raised")}
    left = {*range(cell.world.size)} - ({*killing.ranks} if not killing.uploader else set())
    if here and left:
        cell.measure("ranks_hung", len(left - raised), phase="save")

    def silent(raised: set[int]) -> list[Mismatch]:
        ranks = sorted(left - raised)
        return [contract.violation("the save", f"rank {rank} did not raise") for rank in ranks]

    if killing.uploader:
        compared = Compared.of(silent(raised), silent(set()), ["the save"])
        cell.record("contract_held", compared, where._replace(how=", reported"))


def _load_newest(cell: Cell, target: Run, candidates: list[Checkpoint]) -> Checkpoint | None:
    """Load the newest checkpoint that loads, as any restarted job does. Return it if it is one of the
    candidates, otherwise None."""
    folders = newest_first([cell.folder])
    complete = [str(audited.folder) for audited in folders if audited.state is FolderState.complete]

    def is_now(checkpoint: Checkpoint) -> bool:
        state, group = target.live_state(), cell.world.group
        saved = checkpoint.state.items()
        mismatches = [checkpoint.compare(leaves, state[part], group, closely=False) for part, leaves in saved]
        return not cell.world.any_rank(any(mismatches))

    def load_first(places: list[str]) -> tuple[Loaded, Checkpoint | None]:
        for place in places:
            there = [candidate for candidate in candidates if candidate.checkpoint_id == place]
            try:
                steps.load(cell, target, there[0])
            except (Exception, CheckpointException):  # noqa: BLE001, S112 - any error is a refusal
                continue
            loaded_checkpoint = next(filter(is_now, there), None)
            return (Loaded.mixture if loaded_checkpoint is None else Loaded.new), loaded_checkpoint
        return Loaded.refused, None

    # The controls: no checkpoint is there, and the state before the load is none of the candidates.
    controls = {Loaded.refused: load_first([])[0] is Loaded.refused}
    controls[Loaded.mixture] = not any(map(is_now, candidates))
    loaded, newest = load_first(cell.world.gathered(complete)[0])

    for check, kind in (("crash_recoverable", Loaded.refused), ("crash_consistent", Loaded.mixture)):
        violation = contract.violation(str(StateKind(Crash.killed, False, kind)), "the next start finds it")
        found_now, control = [violation] if loaded is kind else [], [violation] if controls[kind] else []
        cell.record(check, Compared.of(found_now, control, [violation.name]), "after the ranks were killed")
    return newest
