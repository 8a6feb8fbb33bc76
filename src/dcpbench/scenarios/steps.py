"""The steps that scenarios are told in: build, train, save, load. Each stands here once; what is
verified between them is in `dcpbench.scenarios.checks`."""

import itertools
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcpbench.checkpointers.saving import PendingSave, hold_back
from dcpbench.checkpointers.storage import Storage
from dcpbench.faults import inject
from dcpbench.scenarios.cell import Cell
from dcpbench.verify.audit import Expected, audit, controls, expected_of
from dcpbench.verify.compare import Recall
from dcpbench.verify.gather import gathered
from dcpbench.verify.perturb import perturb_model, perturb_optimizer
from dcpbench.verify.retain import kept
from dcpbench.verify.snapshot import Leaves, snapshot_model, snapshot_nested, snapshot_optimizer
from dcpbench.workloads import training_run as trainees
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.training_run import Trainee

_PREFIXES = {"model_equal": "model.", "optim_equal": "optimizer."}
"""What the keys of a checkpoint begin with, by the check that looks at what lies there."""


@dataclass(frozen=True)
class Snapshot:
    """This rank's live state, by check."""

    model_equal: Leaves
    optim_equal: Leaves
    extra_equal: Leaves

    def kept(self) -> "Snapshot":
        """The state as it is now, whatever becomes of it."""
        return Snapshot(kept(self.model_equal), kept(self.optim_equal), kept(self.extra_equal))

    def by_check(self) -> dict[str, Leaves]:
        """The leaves that each check looks at."""
        return {
            "model_equal": self.model_equal,
            "optim_equal": self.optim_equal,
            "extra_equal": self.extra_equal,
        }


@dataclass
class Checkpoint:
    """A checkpoint and what the state was at its moment, which is what it must bring back."""

    step: int
    checkpoint_id: str
    storage: Storage
    snapshot: Snapshot
    keys: dict[str, Expected]
    pending: PendingSave

    def __str__(self) -> str:
        return f"in the checkpoint of step {self.step}"


@dataclass(frozen=True)
class Oracle:
    """What a resumed run is held against: the uninterrupted one, and the unwrapped twin."""

    trained: Trainee
    twin: Trainee
    data: Batches


def build(cell: Cell) -> Oracle:
    """The trainee of the cell and its unwrapped twin, from the same seed, and the data for both."""
    with cell.phase("build"):
        config, seed = cell.config, cell.config.seed
        twin = trainees.build_plain(config, cell.world, seed)
        data = Batches(
            seed=seed,
            size=config.model.batch_size,
            input_size=cast(int, twin.model.input_size),
            output_size=cast(int, twin.model.output_size),
            device=cell.world.device,
        )
        return Oracle(trainees.build(config, cell.world, seed), twin, data)


def build_anew(cell: Cell) -> Trainee:
    """A target for loads, built from another seed, with the state that DCP gives a fresh optimizer."""
    with cell.phase("build"):
        target = trainees.build(cell.config, cell.world, other_seed(cell, 0))
        target.state()["optimizer"].state_dict()
    return target


def make_different(cell: Cell, target: Trainee, number: int) -> None:
    """Change every element and every hyperparameter of a target, so that a load which restores
    nothing of it cannot go unseen; `number` counts the loads."""
    with cell.phase("build"):
        seed = other_seed(cell, number)
        perturb_model(target.model, seed)
        perturb_optimizer(target.optimizer, seed)
        target.forget(seed)


def open_storage(cell: Cell) -> Storage:
    """The storage of the cell, with the one writer for all its saves."""
    config = cell.config
    storage: Storage = pkgutil.resolve_name(config.storage.target)(cell.folder, config.storage, config.save)
    return storage


def train(cell: Cell, trainee: Trainee, data: Batches, until: int) -> list[float]:
    """Train up to and including step `until`; the losses of the steps taken."""
    with cell.phase("train"):
        return trainee.train(data, until)


def train_and_save(
    cell: Cell,
    oracle: Oracle,
    state: Callable[[], dict[str, Any]] | None = None,
    beside: Leaves | None = None,
) -> list[Checkpoint]:
    """The uninterrupted run: train and save in turn, as often as the plan says, then go on.

    Training goes on while a save is under way. Each is finished before the next one begins, or with
    `overlap_saves` just after; two that are under way at once have a writer and a group each.
    """
    overlap = cell.config.overlap_saves
    lanes = {lane: open_storage(cell) for lane in ((1, 2) if overlap else (0,))}
    checkpoints: list[Checkpoint] = []
    for lane, step in zip(itertools.cycle(lanes), cell.plan.save_steps, strict=False):
        train(cell, oracle.trained, oracle.data, until=step)
        if checkpoints and not overlap:
            finish(cell, checkpoints[-1])
        checkpoints.append(save(cell, oracle.trained, lanes[lane], state=state, beside=beside, lane=lane))
        if overlap and len(checkpoints) > 1:
            finish(cell, checkpoints[-2])
    train(cell, oracle.trained, oracle.data, until=cell.plan.last_step)
    finish(cell, checkpoints[-1])
    return checkpoints


def snapshot(trainee: Trainee) -> Snapshot:
    """The live state of this rank, which goes on changing: `kept` is for what has to stay."""
    return Snapshot(
        model_equal=snapshot_model(trainee.model),
        optim_equal=snapshot_optimizer(trainee.model, trainee.optimizer),
        extra_equal=snapshot_nested(trainee.objects()),
    )


def save(
    cell: Cell,
    trainee: Trainee,
    storage: Storage,
    name: str | None = None,
    state: Callable[[], dict[str, Any]] | None = None,
    beside: Leaves | None = None,
    lane: int = 0,
) -> Checkpoint:
    """Write a checkpoint the cell's way; an asynchronous one goes on while training does.

    Args:
        name: of the checkpoint's folder, the step if none is given.
        state: what is saved instead of the trainee's own state.
        beside: what that holds beside the trainee's, as leaves by name.
        lane: which of the groups is for it: `World.group_of`.
    """
    step = trainee.train_state.step
    with cell.phase("verify", "kept"):
        saved = snapshot(trainee).kept()
    with cell.phase("save"):
        checkpoint_id = str(cell.folder / (name or f"step-{step:04d}"))
        everything = inject.staged(cell, (state or trainee.state)())
        held_back = hold_back(storage.writer) if cell.config.overlap_saves else None
        pending = write(cell, everything, checkpoint_id, storage, cell.world.group_of(lane))
        pending.held_back = held_back
        cell.uploads.follow(pending)
    cell.report.save_stall_s.append(pending.stall_s)
    inject.live(cell, trainee)
    inject.remember(cell, checkpoint_id, {**saved.model_equal, **saved.optim_equal})
    return Checkpoint(step, checkpoint_id, storage, saved, _promised(trainee, saved, beside), pending)


def write(
    cell: Cell,
    state: dict[str, Any],
    checkpoint_id: str,
    storage: Storage,
    process_group: dist.ProcessGroup | None,
) -> PendingSave:
    """Save a state dict the cell's way."""
    target = pkgutil.resolve_name(cell.config.save.target)
    pending: PendingSave = target(
        state, checkpoint_id, storage.writer, process_group, **cell.config.save.options
    )
    return pending


def finish(cell: Cell, checkpoint: Checkpoint) -> None:
    """Wait until a checkpoint is complete."""
    with cell.phase("upload" if cell.config.save.asynchronous else "save"):
        took_s = checkpoint.pending.wait()
        if not cell.config.overlap_saves:  # it was held back, for how long says nothing
            cell.report.save_s.append(took_s)
        inject.written(cell, checkpoint.checkpoint_id)
        cell.report.checkpoint_bytes = checkpoint.storage.size(checkpoint.checkpoint_id)
    with cell.phase("verify", "audit"):
        verify_whole(cell, checkpoint)
    if cell.config.raw and not cell.config.overlap_saves:
        _measure_raw(cell, checkpoint)


def _measure_raw(cell: Cell, checkpoint: Checkpoint) -> None:
    """Write and read as many bytes as a checkpoint has, all ranks at once, in as many files, a share each.

    It is done right after the save: what else goes on on the machine and its disk meets both.
    """
    storage = checkpoint.storage
    if storage.raw is None:
        return
    lengths = [length for _, length in sorted(storage.lengths(checkpoint.checkpoint_id).items())]
    share = lengths[cell.world.rank :: cell.world.size]
    folder = cell.folder / f"raw-of-rank{cell.world.rank}"
    for do, took_s in (
        (storage.raw.write, cell.report.raw_write_s),
        (storage.raw.read, cell.report.raw_read_s),
    ):
        with cell.phase("raw"):
            cell.world.meet()
            began = time.perf_counter()
            do(folder, share)
            took_s.append(time.perf_counter() - began)


def verify_whole(cell: Cell, checkpoint: Checkpoint) -> None:
    """Audit a complete checkpoint: rank 0 reads its metadata, every rank tells what it had to save."""
    everybody = gathered(checkpoint.keys, cell.world.checkpoint_group)
    if cell.world.rank:
        return
    expected = {key: what for keys in everybody for key, what in keys.items()}
    storage = checkpoint.storage
    metadata = storage.reader(checkpoint.checkpoint_id).read_metadata()
    lengths = storage.lengths(checkpoint.checkpoint_id)
    cell.check("checkpoint_whole", audit(metadata, lengths, expected), str(checkpoint))
    cell.control("checkpoint_whole", controls(metadata, lengths, expected), str(checkpoint))


def _promised(trainee: Trainee, saved: Snapshot, beside: Leaves | None) -> dict[str, Expected]:
    """The keys that a save of a trainee has to have; what is frozen is not saved."""
    frozen = {name for name, value in trainee.parameters().items() if not value.requires_grad}
    model = {name: leaf for name, leaf in saved.model_equal.items() if name not in frozen}
    return {
        **expected_of(model, _PREFIXES["model_equal"]),
        **expected_of(saved.optim_equal, _PREFIXES["optim_equal"]),
        **expected_of(saved.extra_equal),
        **expected_of(beside or {}),
    }


def load(
    cell: Cell,
    target: Trainee,
    checkpoint: Checkpoint,
    state: dict[str, Any] | None = None,
    install: Callable[[], None] | None = None,
) -> None:
    """Load a checkpoint into a target, and plant the cell's fault if it has one.

    Args:
        state: what is loaded into instead of the target's own state.
        install: what brings `state` into the target, where loading does not.
    """
    with cell.phase("load"):
        before = cell.report.phases.get("load", 0.0)
        read(cell, target.state() if state is None else state, checkpoint.checkpoint_id, checkpoint.storage)
        if install:
            install()
    cell.report.load_s.append(cell.report.phases["load"] - before)
    inject.restored(cell, target)


def read(cell: Cell, state: dict[str, Any], checkpoint_id: str, storage: Storage) -> None:
    """`dcp.load` into a state dict."""
    dcp.load(
        state,
        storage_reader=storage.reader(checkpoint_id),
        process_group=cell.world.checkpoint_group,
    )


def set_again(cell: Cell, target: Trainee) -> None:
    """Set the state that a target has, as a load would: nothing may come of it."""
    with cell.phase("load"):
        for each in target.state().values():
            each.load_state_dict(each.state_dict())


def recall(checkpoint: Checkpoint, check: str) -> Recall:
    """What a checkpoint holds of the state that a check looks at; any rank may ask, by itself."""
    reader = checkpoint.storage.reader(checkpoint.checkpoint_id)

    def held(name: str) -> torch.Tensor | None:
        key = f"{_PREFIXES.get(check, '')}{name}"
        entry = reader.read_metadata().state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    return held


def keys(checkpoint_id: str, storage: Storage) -> set[str]:
    """What a checkpoint says that it holds, flattened: `model.net1.weight`, ….

    Its metadata is a pickle, and one that this cell wrote.
    """
    return set(storage.reader(checkpoint_id).read_metadata().state_dict_metadata)


def other_seed(cell: Cell, number: int) -> int:
    """A seed that no trainee of the cell was built from, another one for each `number`."""
    return cell.config.seed + 1000 * (number + 1)
