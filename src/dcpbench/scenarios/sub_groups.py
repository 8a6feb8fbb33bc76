"""Saves of sub-groups between the world's: each half of the ranks has a state of its own."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.shared_folder import wait_until_seen
from dcpbench.verify.audit import compare_manifest
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.snapshot import expected_of, retained, snapshot_nested
from dcpbench.workloads.stateful import MovingObject
from dcpbench.workloads.world import World

_WHERE = "in the checkpoint of this rank's half"


def sub_groups(cell: Cell) -> None:
    """What either half saves comes back to it, while the other saves and loads as well; what the world has
    saved before does too, and it can save again."""
    reference = steps.build(cell)
    checkpoints = steps.train_and_save(cell, reference)
    checks.verify_training(cell, reference)

    number, half = _half(cell)
    _save_and_load(cell, number, half)

    target = steps.build_anew(cell)
    for other, checkpoint in enumerate(reversed(checkpoints)):
        checks.load_and_verify(cell, target, checkpoint, other)
        checks.resume(cell, target, checkpoint, reference.losses)
    checks.verify_saved_again(cell, target, checkpoints[0])


def _half(cell: Cell) -> tuple[int, World]:
    """Which half of the ranks this one is in, and the world that they are; of one rank there is one."""
    world, ranks = cell.world, range(cell.world.size)
    halves = [half for half in (ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]) if half]
    groups: list[Any] = [dist.new_group([*half], backend="gloo") for half in halves]
    number = next(number for number, half in enumerate(halves) if world.rank in half)
    cell.endings.callback(dist.destroy_process_group, groups[number])
    rank = halves[number].index(world.rank)
    group = groups[number]
    return number, World(rank, len(halves[number]), world.device, group, group)


def _save_and_load(cell: Cell, number: int, half: World) -> None:
    checkpointer = steps.open_checkpointer(replace(cell, world=half))
    checkpoint_id = str(cell.folder / f"half-{number}")
    state = _state(half, seed=cell.config.seed + number)
    leaves = retained(snapshot_nested(state))
    with cell.phase("save"):
        checkpointer.save(state, checkpoint_id).wait()
        wait_until_seen(replace(cell, world=half), checkpoint_id, _WHERE)
    manifest = checkpointer.manifest(checkpoint_id)
    cell.record("checkpoint_whole", compare_manifest(manifest, expected_of(leaves)), _WHERE)

    loaded = _state(half, seed=steps.other_seed(cell, number))
    before = retained(snapshot_nested(loaded))
    with cell.phase("load"):
        checkpointer.load(loaded, checkpoint_id)
    cell.record("extra_equal", compare_controlled(leaves, snapshot_nested(loaded), before), _WHERE)


def _state(half: World, seed: int) -> dict[str, Any]:
    """Values of every kind, and a tensor that is sharded unevenly over the half's ranks."""
    group: Any = half.checkpoint_group
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = torch.randn(2 * half.size + 1, 3, generator=torch.Generator().manual_seed(seed))
    sharded = distribute_tensor(rows, mesh, [Shard(0)])
    return {"half": {"sharded": sharded, **MovingObject(seed, torch.device("cpu")).state_dict()}}
