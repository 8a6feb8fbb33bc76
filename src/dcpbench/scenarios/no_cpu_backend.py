"""An asynchronous save in a process group whose only backend is the accelerator's: its upload could not
meet its peers from a thread."""

import threading
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from dcpbench.records.findings import Finding
from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell


def no_cpu_backend(cell: Cell) -> None:
    """The save is refused with torch's own clear message, leaves nothing behind, and training goes on."""
    oracle = steps.build(cell)
    steps.train(cell, oracle.trained, oracle.data, until=cell.config.train_steps)
    device_only = dist.new_group(backend=dist.get_default_backend_for_device(cell.world.device.type))
    without = replace(cell, world=replace(cell.world, checkpoint_group=device_only))
    refused, accepted = str(cell.folder / "refused"), str(cell.folder / "accepted")
    threads = threading.active_count()
    left: list[Finding] = []

    def save_without() -> None:
        try:
            steps.open_checkpointer(without).save(oracle.trained.state(), refused).wait()
        finally:
            left.extend([*_files(refused), *_threads(threads)])

    def save_with() -> None:
        steps.open_checkpointer(cell).save(oracle.trained.state(), accepted).wait()

    checks.verify_refused(
        cell, AssertionError, "A CPU backend must be enabled for async save", save_without, save_with
    )
    broken = [*_files(accepted), *_threads(threads - 1)]
    checks.verify_contract(cell, left, broken, ["files", "threads"], "after the refusal")
    dist.destroy_process_group(device_only)
    steps.train(cell, oracle.trained, oracle.data, until=cell.plan.last_step)
    checks.verify_twin(cell, oracle)


def _files(checkpoint_id: str) -> list[Finding]:
    left = sorted(str(path) for path in Path(checkpoint_id).rglob("*"))
    return [checks.breach("files", f"{left[0]} was left behind")] if left else []


def _threads(before: int) -> list[Finding]:
    more = threading.active_count() - before
    return [checks.breach("threads", f"{more} more than before")] if more > 0 else []
