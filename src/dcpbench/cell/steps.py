"""The steps that scenarios are made of: build, train, save, load. What is verified between them is in
`dcpbench.cell.checks`."""

import itertools
import multiprocessing
import pkgutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dcpbench.cell import contract, side_effects
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint, SavedCheckpoint
from dcpbench.cell.explained import StoredFiles, explained
from dcpbench.cell.shared_folder import wait_until_seen
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.core.plugins import all_of
from dcpbench.core.rank_report import NOTHING
from dcpbench.verify.audit import compare_manifest
from dcpbench.verify.plain_read import compare_stored
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads import build_run
from dcpbench.workloads.batches import Batches, batches_of
from dcpbench.workloads.run_state import RANDOM, State, promised_keys, retained_state
from dcpbench.workloads.training_run import TrainingRun


@dataclass(frozen=True)
class Losses:
    """The reference of a resumed run: the losses of the uninterrupted run from step 1 on; the batches; the
    uninterrupted run's state after each step at which a resume ends; the losses of models of which nothing
    was restored, by number; why the losses would be others under another layout, what the run computes in
    beside its parameters' dtypes, and by which torch."""

    continued: list[float]
    data: Batches
    states: dict[int, State]
    unrestored: dict[int, list[float]] = field(default_factory=dict)
    why_layout_bound: str | None = None
    computes_in: frozenset[torch.dtype] = frozenset()
    torch_version: str = str(torch.__version__)


@dataclass(frozen=True)
class ReferenceRun:
    """The uninterrupted run, with its state after each step at which a resume ends, `ends` beside those that
    the plan has."""

    cell: Cell
    trained: TrainingRun
    data: Batches
    ends: frozenset[int] = frozenset()
    states: dict[int, State] = field(default_factory=dict)
    unrestored: dict[int, list[float]] = field(default_factory=dict)

    @property
    def losses(self) -> Losses:
        """Those up to the step at which the run is, and what goes with them."""
        run = self.trained
        about = run.why_no_twin or run.why_layout_bound, run.computes_in
        return Losses(run.train_state.losses, self.data, self.states, self.unrestored, *about)


def other_seed(cell: Cell, number: int) -> int:
    """A seed that no training run of the cell was built from, another one for each `number`."""
    return cell.config.seed + 1000 * (number + 1)


def unrestored(cell: Cell, losses: Losses, number: int, taken: range) -> list[float]:
    """The losses in these steps of a model from another seed, trained on the same batches from step 1 on."""
    known = losses.unrestored.get(number, [])
    if len(known) < taken.stop - 1:
        unrestored_run = build_run.build_unrestored(cell.config, cell.world, other_seed(cell, number))
        known = losses.unrestored[number] = unrestored_run.train(
            losses.data, max(taken.stop - 1, cell.config.last_step)
        )
    return known[taken.start - 1 : taken.stop - 1]


def parallel_run(cell: Cell, seed: int, scheduler: bool = True) -> TrainingRun:
    """Build a run under the parallelism of the cell."""
    run = build_run.build(cell.config, cell.world, seed, scheduler)
    for hook in all_of(lambda plugin: plugin.built):
        hook(cell, run)
    return run


def build(cell: Cell) -> ReferenceRun:
    """The training run of the cell, and its data."""
    with cell.phase("build"):
        trained = parallel_run(cell, cell.config.seed)
        return ReferenceRun(cell, trained, batches_of(cell.config, cell.world.device))


def build_anew(cell: Cell, number: int = 0, step: int = 0) -> TrainingRun:
    """A target for loads, built from another seed, the one of this number; unless the cell says otherwise,
    with the state that DCP gives a fresh optimizer. It is to load what was saved after this step."""
    into = cell.config.load_into
    with cell.phase("build"):
        target = parallel_run(cell, other_seed(cell, number), into.scheduler)
        target.component.prepare(target.model, step)
        if into.filled:
            target.fill_optimizer()
    return target


def open_checkpointer(cell: Cell) -> Checkpointer:
    """What writes and reads the checkpoints of the cell."""
    config, world = cell.config, cell.world
    made: Checkpointer = pkgutil.resolve_name(config.checkpointer.target)(cell.folder, config, world)
    cell.endings.callback(made.close)
    for hook in all_of(lambda plugin: plugin.checkpointers):
        hook(cell, made)
    return made


def train(cell: Cell, run: TrainingRun, data: Batches, until: int) -> list[float]:
    """Train up to and including step `until`; the losses of the steps taken."""
    with cell.phase("train"):
        return run.train(data, until)


def go_on(cell: Cell, reference: ReferenceRun, until: int) -> None:
    """Train the uninterrupted run up to and including step `until`; retain its state where resumes end."""
    config, run = cell.config, reference.trained
    ends = {step + config.resume_steps for step in config.save_steps} | reference.ends
    for step in sorted({*ends, until}):
        if run.train_state.step <= step <= until:
            train(cell, run, reference.data, step)
            if step in ends:
                with cell.phase("verify", "retained"):
                    reference.states[step] = retained_state(run)


def train_and_save(
    cell: Cell,
    reference: ReferenceRun,
    state: Callable[[], dict[str, Any]] | None = None,
    beside: Leaves | None = None,
    parts: Collection[str] | None = None,
    at: Iterable[int] | None = None,
) -> list[SavedCheckpoint]:
    """The uninterrupted run: train and save in turn, as often as the plan says or `at` these steps of it
    alone, then go on. `state`, `beside` and `parts` are as in `save`.

    Training goes on while a save is under way. Each is finished before the next one begins, or with
    `overlap_saves` just after; two that are under way at once are in two slots of the checkpointer, and one
    that must be refused lies beside the first.
    """
    overlap = cell.config.overlap_saves
    checkpointer = open_checkpointer(cell)
    save_one = partial(save, cell, reference.trained, checkpointer, state=state, beside=beside, parts=parts)
    checkpoints: list[SavedCheckpoint] = []
    for slot, step in zip(
        itertools.cycle((1, 2) if overlap else (0,)), at or cell.config.save_steps, strict=False
    ):
        go_on(cell, reference, until=step)
        if checkpoints and not overlap:
            finish(cell, checkpoints[-1])
        checkpoints.append(save_one(slot=slot, retained=reference.states.get(step)))
        if overlap and len(checkpoints) == 1:
            contract.verify_refused_beside(cell, checkpointer)
        elif overlap:
            for one, other in itertools.permutations(checkpoints[-2:]):
                one.beside.append(other)
            finish(cell, checkpoints[-2])
    go_on(cell, reference, until=cell.config.last_step)
    finish(cell, checkpoints[-1])
    for name, kind in reference.trained.not_looked_at.items():
        cell.report.not_applied[f"extra_equal of {name}"] = f"a {kind} has no state that can be asked for"
    if (needed := reference.trained.needs_random) is not None:
        everywhere = frozenset[str]().union(*cell.world.gathered(needed))
        _keep_random(cell, reference, checkpoints, everywhere)
    return checkpoints


def _keep_random(
    cell: Cell, reference: ReferenceRun, checkpoints: Iterable[Checkpoint], needed: frozenset[str]
) -> None:
    """Of the default generators only those that are `needed` have to come back."""
    reference.trained.keeps_random = needed
    if not needed:
        cell.report.not_applied[RANDOM] = "no step of the trainer draws what has to come back"
    states = [*reference.states.values(), *(one.state for one in checkpoints)]
    for state in {id(one): one for one in states}.values():  # a state may be in both
        if kept := {name: leaf for name, leaf in state[RANDOM].items() if name.split(".")[-1] in needed}:
            state[RANDOM] = kept
        else:
            del state[RANDOM]


def save(
    cell: Cell,
    run: TrainingRun,
    checkpointer: Checkpointer,
    name: str | None = None,
    state: Callable[[], dict[str, Any]] | None = None,
    beside: Leaves | None = None,
    parts: Collection[str] | None = None,
    slot: int = 0,
    retained: State | None = None,
) -> SavedCheckpoint:
    """Write a checkpoint the cell's way; an asynchronous one goes on while training does.

    Args:
        name: of the checkpoint's folder, the step if none is given.
        state: what is saved instead of the run's own state.
        beside: what that holds beside the run's, as leaves by name.
        parts: the checks that look at what it has of the run's own state; all of them if none are given.
        retained: the run's state, if it is retained already.
    """
    step = run.train_state.step
    with cell.phase("verify", "retained"):
        saved = retained or retained_state(run)
    number = cell.measured("save_stall_s")
    # Buffers in shared memory are kept for each run that is saved, and are a descriptor each.
    keeps = cell.config.save.shares_memory and all(one.source is not run for one in cell.complete)
    opened = side_effects.open_before(cell, again=number > 0 and not keeps)
    with side_effects.unchanged(cell, run, f"after the save of step {step}", saved):
        with cell.phase("save"):
            checkpoint_id = str(cell.folder / (name or f"step-{step:04d}"))
            pending = checkpointer.save((state or run.state)(), checkpoint_id, slot)
            cell.uploads.follow(pending)
        with cell.phase("verify", "files"):
            files = pending.then(partial(_when_complete, cell, checkpointer, checkpoint_id))
    cell.measure("save_stall_s", pending.released - pending.started, number, "save")
    if parts is not None:
        saved = {check: saved[check] for check in parts}
    keys = promised_keys(run, saved, beside)
    return SavedCheckpoint(
        step,
        checkpoint_id,
        checkpointer,
        saved,
        source=run,
        numbers=run.numbers,
        keys=keys,
        pending=pending,
        number=number,
        files=files,
        opened=opened,
    )


def _when_complete(
    cell: Cell, checkpointer: Checkpointer, checkpoint_id: str
) -> tuple[float, Mapping[str, str]]:
    """When a save has reported success, and on rank 0 what its files are."""
    complete_at = time.time()
    return complete_at, checkpointer.digests(checkpoint_id) if cell.world.rank == 0 else {}


def finish(cell: Cell, checkpoint: SavedCheckpoint) -> None:
    """Wait until a checkpoint is complete, and audit it: rank 0 reads its manifest, every rank knows what it
    had to save."""
    folder = Path(checkpoint.checkpoint_id)
    phase = "upload" if cell.config.save.asynchronous else "save"
    with cell.phase(phase):
        took_s = checkpoint.pending.wait()
        if not cell.config.overlap_saves:  # it was held back, for how long says nothing
            cell.measure("save_s", took_s, checkpoint.number, phase)
    with cell.phase("verify", "seen"):
        on_several_hosts = wait_until_seen(cell, folder, str(checkpoint))
    size = checkpoint.checkpointer.size(checkpoint.checkpoint_id)
    cell.measure("checkpoint_bytes", size, checkpoint.number, phase)
    if why := checkpoint.checkpointer.unreadable:
        cell.report.not_applied |= dict.fromkeys(("checkpoint_whole", "files_equal", "contract_held"), why)
    with cell.phase("verify", "audit"):
        complete_at, files = checkpoint.files.result()
        if on_several_hosts and cell.world.rank == 0:
            files = checkpoint.checkpointer.digests_with_late(checkpoint.checkpoint_id, files, complete_at)
        mine = checkpoint.keys, files, _synced(cell, checkpoint)
        where = f"once the save of step {checkpoint.step} had ended"
        side_effects.verify_nothing_left_open(cell, checkpoint.opened, where)
        everybody = cell.world.gathered(mine)
        if files := everybody[0][1]:
            digests = partial(checkpoint.checkpointer.digests, checkpoint.checkpoint_id)
            cell.files[checkpoint.checkpoint_id] = str(checkpoint), files, digests
        else:
            cell.report.not_applied["files_unchanged"] = "it has no files"
        if why is None:
            _audit(cell, checkpoint, everybody)
    with cell.phase("verify", "plain_read"):
        if stored := checkpoint.checkpointer.stored(checkpoint.checkpoint_id):
            world = cell.world
            seen = compare_stored(checkpoint.by_key, stored, world.rank, world.size, world.device)
            names = frozenset(one.name for one in seen.found)

            def equal(_: str, state: State) -> set[str]:
                again = compare_stored(state.values(), stored, world.rank, world.size, world.device)
                return again.names.keys() - {one.name for one in again.found}

            about = partial(StoredFiles, checkpoint, stored, names)
            for check, one in explained(cell, "stored", {"files_equal": seen}, about, equal).items():
                cell.record(check, one, str(checkpoint))
        else:
            cell.report.not_applied.setdefault("files_equal", "nothing else reads what lies there")
    cell.complete[:] = [checkpoint]
    if cell.config.raw and not cell.config.overlap_saves:
        _measure_raw(cell, checkpoint)


def _audit(cell: Cell, checkpoint: SavedCheckpoint, everybody: list[Any]) -> None:
    """What a checkpoint says of itself on rank 0, against what `everybody` had to save, and has synced."""
    compared = NOTHING
    if cell.world.rank == 0:
        expected = {key: what for keys, _, _ in everybody for key, what in keys.items()}
        synced = [one for _, _, one in everybody]
        known = None if None in synced else set().union(*synced)
        manifest = checkpoint.checkpointer.manifest(checkpoint.checkpoint_id)
        compared = compare_manifest(manifest, expected, everybody[0][1], known)
    cell.record("checkpoint_whole", compared, str(checkpoint))


def _synced(cell: Cell, checkpoint: SavedCheckpoint) -> set[str] | None:
    """The files that this rank has synced; None where it need not, or a process of its own may have done it
    instead."""
    raw = checkpoint.checkpointer.raw
    children = set(multiprocessing.active_children()) - cell.children_before
    if not raw or not raw.sync or children:
        return None
    return cell.synced(Path(checkpoint.checkpoint_id))


def _measure_raw(cell: Cell, checkpoint: SavedCheckpoint) -> None:
    """Write and read as many bytes as a checkpoint has, all ranks at once, in as many files, a share each:
    right after the save, so that what else goes on on the machine meets both."""
    raw = checkpoint.checkpointer.raw
    if raw is None:
        return
    files = checkpoint.checkpointer.manifest(checkpoint.checkpoint_id).found
    share = [length for _, length in sorted(files.items())][cell.world.rank :: cell.world.size]
    folder = cell.folder / f"raw-of-rank{cell.world.rank}"
    for metric, do in (("raw_write_s", raw.write), ("raw_read_s", raw.read)):
        with cell.phase("raw"):
            cell.world.meet()
            began = time.perf_counter()
            do(folder, share)
            cell.measure(metric, time.perf_counter() - began, checkpoint.number, "raw")


def load(
    cell: Cell,
    target: TrainingRun,
    checkpoint: Checkpoint,
    state: dict[str, Any] | None = None,
    install: Callable[[], None] | None = None,
) -> None:
    """Load a checkpoint into a target, or into `state` instead of the target's own, which `install` then
    brings into the target where loading does not. The run that was saved must not change, nor gradients that
    the target may have, which are cleared then."""
    where = f"after the load of step {checkpoint.step}"
    source = None if checkpoint.source is target else checkpoint.source
    with cell.phase("verify", "seen"):
        wait_until_seen(cell, checkpoint.checkpoint_id, str(checkpoint))
    opened = side_effects.open_before(cell, again=cell.measured("load_s") > 0)
    with (
        side_effects.unchanged(cell, source, where),
        side_effects.gradients_unchanged(cell, target, where),
        cell.phase("load"),
    ):
        began = time.perf_counter()
        checkpoint.checkpointer.load(target.state() if state is None else state, checkpoint.checkpoint_id)
        if install:
            install()
        target.is_at(checkpoint.step)
        cell.world.synchronize()
        took_s = time.perf_counter() - began
    cell.measure("load_s", took_s, cell.measured("load_s"), "load")
    side_effects.verify_nothing_left_open(cell, opened, where)
