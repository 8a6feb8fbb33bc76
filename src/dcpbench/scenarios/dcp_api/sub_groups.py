"""Saves of sub-groups between saves of the world: each half of the ranks has a state of its own."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpbench.cell import checks, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint_files import wait_until_seen
from dcpbench.compare.controls import compare_controlled
from dcpbench.formats.audit import compare_manifest
from dcpbench.state.snapshot import expected_entries, retained, snapshot_nested
from dcpbench.workloads.stateful import MovingObject
from dcpbench.workloads.world import World, new_group

_WHERE = "in the checkpoint of this rank's half"


def sub_groups(cell: Cell) -> None:
    """Each half saves and loads its state at the same time as the other. Earlier checkpoints of the world can
    still be loaded, and the world can save again."""
    reference = uninterrupted.train_and_save_reference(cell)
    checkpoints = reference.checkpoints
    number, half = _half(cell)
    _save_and_load(cell, number, half)

    target = steps.build_target(cell, reference)
    for variation, checkpoint in enumerate(reversed(checkpoints)):
        checks.load_and_verify(cell, target, checkpoint, variation)
        checks.resume(cell, target, checkpoint, reference)
    checks.verify_saved_again(cell, target, checkpoints[0], reference)


def _half(cell: Cell) -> tuple[int, World]:
    """Return the number and the world of this rank's half; a lone rank has one."""
    world, ranks = cell.world, range(cell.world.size)
    halves = [half for half in (ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]) if half]
    groups = [new_group(half) for half in halves]
    number = next(number for number, half in enumerate(halves) if world.rank in half)
    group = groups[number]
    cell.endings.callback(dist.destroy_process_group, group)
    rank = halves[number].index(world.rank)
    return number, World(rank, len(halves[number]), world.device, group, group)


def _save_and_load(cell: Cell, number: int, half: World) -> None:
    of_half = replace(cell, world=half)
    checkpointer = of_half.checkpointer
    checkpoint_id = str(cell.folder / f"half-{number}")
    state = _state(half, seed=cell.config.seed + number)
    leaves = retained(snapshot_nested(state))
    with cell.phase("save"):
        checkpointer.save(state, checkpoint_id).wait()
        wait_until_seen(of_half, checkpoint_id, _WHERE)
    manifest = checkpointer.manifest(checkpoint_id)
    cell.record("checkpoint_whole", compare_manifest(manifest, expected_entries(leaves)), _WHERE)

    loaded = _state(half, seed=steps.other_seed(cell, number))
    before = retained(snapshot_nested(loaded))
    with cell.phase("load"):
        checkpointer.load(loaded, checkpoint_id)
    cell.record("extra_equal", compare_controlled(leaves, snapshot_nested(loaded), before), _WHERE)


def _state(half: World, seed: int) -> dict[str, Any]:
    """Return values of every kind, and a tensor that is sharded unevenly over the ranks of the half."""
    group: Any = half.checkpoint_group
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = torch.randn(2 * half.size + 1, 3, generator=torch.Generator().manual_seed(seed))
    sharded = distribute_tensor(rows, mesh, [Shard(0)])
    return {"half": {"sharded": sharded, **MovingObject(seed, torch.device("cpu")).state_dict()}}
