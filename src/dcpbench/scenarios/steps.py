"""The steps that scenarios are told in: build, train, save, load, verify. Each stands here once."""

import math
import pkgutil
from dataclasses import dataclass
from typing import cast

import torch.distributed.checkpoint as dcp

from dcpbench.checkpoint.saving import PendingSave
from dcpbench.checkpoint.storage import Storage
from dcpbench.scenarios.cell import Cell
from dcpbench.train import trainee as trainees
from dcpbench.train.batches import Batches
from dcpbench.train.trainee import Trainee
from dcpbench.verify.compare import compare
from dcpbench.verify.controls import controllable, perturb_model, perturb_optimizer
from dcpbench.verify.oracles import (
    TOLERANCES,
    compare_close,
    full_state,
    loss_name,
    losses_close,
    losses_equal,
    twin_state,
)
from dcpbench.verify.snapshot import (
    Leaves,
    snapshot_model,
    snapshot_objects,
    snapshot_optimizer,
)


@dataclass(frozen=True)
class Snapshot:
    """The live state of one rank at one moment, by check."""

    model_equal: Leaves
    optim_equal: Leaves
    extra_equal: Leaves

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
    snapshot: Snapshot
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
        target = trainees.build(cell.config, cell.world, _other_seed(cell, 0))
        target.state()["optimizer"].state_dict()
    return target


def make_different(cell: Cell, target: Trainee, number: int) -> None:
    """Change every element and every hyperparameter of a target, so that a load which restores
    nothing of it cannot go unseen; `number` counts the loads."""
    with cell.phase("build"):
        seed = _other_seed(cell, number)
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


def snapshot(trainee: Trainee) -> Snapshot:
    """Copy the live state of this rank."""
    return Snapshot(
        model_equal=snapshot_model(trainee.model),
        optim_equal=snapshot_optimizer(trainee.model, trainee.optimizer),
        extra_equal=snapshot_objects(
            {
                "tensor_object": trainee.tensor_object.contents(),
                "train_state": trainee.train_state.contents(),
            }
        ),
    )


def save(cell: Cell, trainee: Trainee, storage: Storage) -> Checkpoint:
    """Write a checkpoint the cell's way; an asynchronous one goes on while training does."""
    step = trainee.train_state.step
    with cell.phase("verify"):
        saved = snapshot(trainee)
    with cell.phase("save"):
        checkpoint_id = str(cell.folder / f"step-{step:04d}")
        write = pkgutil.resolve_name(cell.config.save.target)
        pending: PendingSave = write(
            trainee.state(),
            checkpoint_id,
            storage.writer,
            cell.world.checkpoint_group,
            **cell.config.save.options,
        )
    cell.report.save_stall_s.append(pending.stall_s)
    return Checkpoint(step, checkpoint_id, saved, pending)


def finish(cell: Cell, checkpoint: Checkpoint, storage: Storage) -> None:
    """Wait until a checkpoint is complete."""
    with cell.phase("save"):
        cell.report.save_s.append(checkpoint.pending.wait())
        cell.report.checkpoint_bytes = storage.size(checkpoint.checkpoint_id)


def load(cell: Cell, target: Trainee, checkpoint: Checkpoint, storage: Storage) -> None:
    """Load a checkpoint into a target, and plant the cell's fault if it has one."""
    with cell.phase("load"):
        before = cell.report.phases.get("load", 0.0)
        dcp.load(
            target.state(),
            storage_reader=storage.reader(checkpoint.checkpoint_id),
            process_group=cell.world.checkpoint_group,
        )
    cell.report.load_s.append(cell.report.phases["load"] - before)
    if cell.config.fault.target:
        plant = pkgutil.resolve_name(cell.config.fault.target)
        plant(target, cell.world.rank, **cell.config.fault.options)


def verify_twin(cell: Cell, oracle: Oracle) -> None:
    """Train the twin on the same batches; the parallel run must have stayed close to it."""
    trained, twin = oracle.trained, oracle.twin
    tolerance = TOLERANCES[cell.config.tolerance.value]
    with cell.phase("verify"):
        twin.train(oracle.data, trained.train_state.step)
        cell.check(
            "loss_twin_close",
            losses_close(twin.train_state.losses, trained.train_state.losses, 1, tolerance),
            "in the uninterrupted run",
        )
        expected = twin_state(twin.model, twin.optimizer)
        cell.check(
            "state_twin_close",
            compare_close(
                expected,
                full_state(trained.model, trained.optimizer),
                tolerance,
            ),
            "after the uninterrupted run",
        )
        plain = trainees.build_plain(cell.config, cell.world, _other_seed(cell, 0))
        plain.train(oracle.data, 1)
        other = twin_state(plain.model, plain.optimizer)
        reported = {found.name for found in compare_close(expected, other, tolerance)}
        cell.control("state_twin_close", {name: name in reported for name in expected})
    cell.report.losses["continued"] = trained.train_state.losses
    cell.report.losses["twin"] = twin.train_state.losses


def prove_power(cell: Cell, target: Trainee, checkpoint: Checkpoint) -> None:
    """The negative controls: each comparison against the target before anything is loaded into it."""
    with cell.phase("verify"):
        unrestored = snapshot(target).by_check()
        for check, leaves in checkpoint.snapshot.by_check().items():
            reported = {found.name for found in compare(leaves, unrestored[check])}
            fired = {name: name in reported for name in controllable(leaves)}
            cell.control(check, fired, str(checkpoint))


def verify_restored(cell: Cell, target: Trainee, checkpoint: Checkpoint) -> None:
    """What came back must be, bit for bit, what was there at the moment of saving."""
    with cell.phase("verify"):
        restored = snapshot(target).by_check()
        for check, leaves in checkpoint.snapshot.by_check().items():
            cell.check(check, compare(leaves, restored[check]), str(checkpoint))


def verify_resumed(
    cell: Cell,
    target: Trainee,
    resumed: list[float],
    checkpoint: Checkpoint,
    oracle: Oracle,
    number: int,
) -> None:
    """The resumed steps must have the uninterrupted run's losses, and those must mean something.

    They mean something if they are finite and not zero, a gradient was there, and a model from
    which nothing was restored has others.
    """
    tolerance = TOLERANCES[cell.config.tolerance.value]
    first, last = checkpoint.step + 1, checkpoint.step + cell.config.resume_steps
    where = f"after the checkpoint of step {checkpoint.step}"
    with cell.phase("verify"):
        continued = oracle.trained.train_state.losses[first - 1 : last]
        twins = oracle.twin.train_state.losses[first - 1 : last]
        cell.check("loss_resume_equal", losses_equal(continued, resumed, first), where)
        cell.check("loss_twin_close", losses_close(twins, resumed, first, tolerance), where)

        plain = trainees.build_plain(cell.config, cell.world, _other_seed(cell, number))
        unrestored = plain.losses_without_training(oracle.data, range(first, last + 1))
        telling = {
            loss_name(step): math.isfinite(loss) and loss != 0.0 and alive
            for step, (loss, alive) in enumerate(zip(resumed, target.alive, strict=False), first)
        }
        for check, found in (
            ("loss_resume_equal", losses_equal(continued, unrestored, first)),
            ("loss_twin_close", losses_close(twins, unrestored, first, tolerance)),
        ):
            reported = {mismatch.name for mismatch in found}
            fired = {name: means and name in reported for name, means in telling.items()}
            cell.control(check, fired, where)
    cell.report.resumed[checkpoint.step] = resumed


def _other_seed(cell: Cell, number: int) -> int:
    return cell.config.seed + 1000 * (number + 1)
