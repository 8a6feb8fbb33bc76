"""Which cells run at the same time, by the ranks and GPUs that they need."""

import os
from collections.abc import Iterable, Sequence

from dcpbench.config.groups import Sharing
from dcpbench.executors import shared_gpus
from dcpbench.plan.plan import PlannedCell

_AT_ONCE = {"cuda": 4, "cpu": 16}
"""The largest number of cells that share GPUs, or a CPU, where only their verdicts matter."""


def by_training(cells: Sequence[PlannedCell]) -> list[PlannedCell]:
    """Return the cells with those that train the same run one after another, at the place of the first: warm
    ranks keep one such run at a time, for the cells that share it."""
    first: dict[object, int] = {}
    digests = [cell.config.training_digest or cell.run for cell in cells]
    place = [first.setdefault(digest, number) for number, digest in enumerate(digests)]
    return [cell for _, cell in sorted(zip(place, cells, strict=True), key=lambda pair: pair[0])]


def groups_by_ranks(cells: Iterable[PlannedCell]) -> list[list[PlannedCell]]:
    """Group cells by the ranks that they need, in the order of their first cell. Cells of a group can run at
    the same time, or on the same ranks. Cells whose times do not matter are in one group."""
    groups: dict[object, list[PlannedCell]] = {}
    for cell in cells:
        shared = cell.config.sharing is Sharing.correctness
        ranks = (
            cell.world_specs[0].device if shared else (*dict.fromkeys(cell.world_specs), cell.config.sharing)
        )
        groups.setdefault(ranks, []).append(cell)
    return list(groups.values())


def gpus_of_runners(
    cells: Sequence[PlannedCell], gpus: int, memory: int | None = None
) -> list[tuple[int, ...]]:
    """Return the GPUs of each runner for the cells of a group.

    With `sharing=disjoint` each runner has separate GPUs, unless cells need several hosts; with
    `sharing=correctness` several runners share the GPUs, or the CPU; otherwise one runner has all GPUs. Where
    ranks share a GPU, cells have to fit into half of its `memory`.
    """
    device, sharing = cells[0].world_specs[0].device, cells[0].config.sharing
    size = max(cell.world_size for cell in cells)
    everywhere = tuple(range(gpus)) if device == "cuda" else ()
    several_hosts = any(cell.config.executor.hosts for cell in cells)
    if sharing is Sharing.correctness:
        at_once = max(2, min(_AT_ONCE[device], len(os.sched_getaffinity(0)) // size))
        if memory and size > len(everywhere) > 0:
            bytes_per_gpu = shared_gpus.ranks_per_gpu(size, gpus) * shared_gpus.rank_bytes()
            at_once = max(1, min(at_once, memory // 2 // bytes_per_gpu))
        runners = [everywhere[worker:] + everywhere[:worker] for worker in range(at_once)]
    elif sharing is Sharing.disjoint and size <= len(everywhere) and not several_hosts:
        runners = [everywhere[first : first + size] for first in range(0, gpus - size + 1, size)]
    else:
        runners = [everywhere]
    runs = sum(1 for cell in cells if not cell.skip)
    return runners[: max(1, runs)]
