"""Which cells run at the same time, and on which GPUs."""

import os
from collections.abc import Iterable, Sequence

from dcpbench.config.groups import Sharing
from dcpbench.sweep.plan.estimate import Estimated, keys
from dcpbench.sweep.plan.job import Job

_AT_ONCE = 4
"""Cells that share GPUs, or a CPU, where only their verdicts matter."""


def stretches(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs by the ranks that they need: what is together may run at once, and one after the other on
    the same ranks. Where only verdicts matter all are together. In the order in which each is first met."""
    found: dict[object, list[Job]] = {}
    for job in jobs:
        shared = job.config.sharing is Sharing.correctness
        ranks = job.kinds[0].device if shared else (*job.kinds, job.config.sharing)
        found.setdefault(ranks, []).append(job)
    return list(found.values())


def estimates(jobs: Iterable[Job], gpus: int) -> dict[str, Estimated]:
    """Each cell that is not a skip by its name, as what its time is estimated from."""
    found: dict[str, Estimated] = {}
    for together in stretches(jobs):
        at_once = len(places(together, gpus))
        found |= {job.cell.name: Estimated(keys(job.key), at_once) for job in together if not job.skip}
    return found


def places(jobs: Sequence[Job], gpus: int) -> list[tuple[int, ...]]:
    """For each worker that the cells of a stretch run in the GPUs that are its own, or that it shares.

    Cells on GPUs run at once where each has its own, with `sharing=none` never. With
    `sharing=correctness` as many workers share the GPUs, or the CPU, as are worth it.
    """
    device, sharing = jobs[0].kinds[0].device, jobs[0].config.sharing
    size = max(job.world_size for job in jobs)
    everywhere = tuple(range(gpus)) if device == "cuda" else ()
    if sharing is Sharing.correctness:
        at_once = max(2, min(_AT_ONCE, (os.cpu_count() or 1) // size))
        found = [everywhere[worker:] + everywhere[:worker] for worker in range(at_once)]
    elif everywhere and sharing is Sharing.disjoint:
        found = [everywhere[first : first + size] for first in range(0, gpus - size + 1, size)]
    else:
        found = [everywhere]
    runs = sum(1 for job in jobs if not job.skip)
    return found[: max(1, runs)]
