"""Saves that DCP has to refuse, with a clear message and without damage."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import checks, contract, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.checkpoint_files import wait_until_seen
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.records.files import everything_below
from dcpbench.state.process_state import ProcessState
from dcpbench.workloads.world import new_group


def overwrite(cell: Cell) -> None:
    """Save twice to the same path, and a third time while overwriting is forbidden: that save is refused, and
    a load restores the second one."""
    cell, unsaved = uninterrupted.train_unsaved(cell.vary(saves=2, save_at=None))
    reference = steps.build_reference(cell, unsaved)
    storage = cell.config.storage
    overwriting, refusing = (
        cell.vary(storage=replace(storage, options={**storage.options, "overwrite": allowed}))
        for allowed in (True, False)
    )

    def save(cell: Cell, name: str) -> Checkpoint:
        return steps.finish(cell, steps.save(cell, reference.live_run, name))

    for _ in range(2):
        until = reference.live_run.train_state.step + cell.config.steps_before_save
        steps.train_reference(cell, reference, until)
        second = save(overwriting, "checkpoint")
    steps.train_reference(cell, reference, until=cell.config.last_step)
    steps.decide_compared_state(cell, reference, [second])
    again, elsewhere = (partial(save, refusing, name) for name in ("checkpoint", "elsewhere"))
    # Without collectives ranks do not learn of their peers' exceptions: each raises its own.
    kind = CheckpointException if cell.config.save.uses_collectives else RuntimeError
    contract.verify_refused(cell, kind, "Checkpoint already exists", again, elsewhere)
    uninterrupted.compare_final_states(cell, unsaved, reference)

    target = steps.build_target(cell, reference)
    checks.load_and_verify(cell, target, second)
    checks.resume(cell, target, second, reference)


def no_cpu_backend(cell: Cell) -> None:
    """Save asynchronously in a process group without a CPU backend, which the upload thread would need. The
    save is refused and leaves nothing, and training continues."""
    cell, unsaved = uninterrupted.train_unsaved(cell)
    reference = steps.build_reference(cell, unsaved)
    steps.train_reference(cell, reference, until=cell.config.steps_before_save)
    device_only = new_group(backend=dist.get_default_backend_for_device(cell.world.device.type))
    without = replace(cell, world=replace(cell.world, checkpoint_group=device_only))
    refused, accepted = str(cell.folder / "refused"), str(cell.folder / "accepted")
    before = ProcessState.now(cell.world.device)
    left: list[Mismatch] = []

    def save_without() -> None:
        try:
            without.checkpointer.save(reference.live_run.state(), refused).wait()
        finally:
            left.extend(_left_behind(refused, ProcessState.now(cell.world.device).minus(before)))

    def save_with() -> None:
        cell.checkpointer.save(reference.live_run.state(), accepted).wait()

    contract.verify_refused(
        cell, AssertionError, "A CPU backend must be enabled for async save", save_without, save_with
    )
    wait_until_seen(cell, accepted, "of the save")
    broken = _left_behind(accepted, ProcessState.now(cell.world.device))
    cell.record("contract_held", Compared.of(left, broken, ["files", "threads"]), "after the refusal")
    dist.destroy_process_group(device_only)
    steps.train_reference(cell, reference, until=cell.config.last_step)
    uninterrupted.compare_final_states(cell, unsaved, reference)


def _left_behind(checkpoint_id: str, added: ProcessState) -> Iterator[Mismatch]:
    for path in everything_below(Path(checkpoint_id))[:1]:
        yield contract.violation("files", f"{path} was not removed")
    if threads := added.resources.get("threads"):
        yield contract.violation("threads", f"{', '.join(threads)} did not end")
