"""Which cells run at the same time, and on which GPUs."""

import os
from collections.abc import Iterable, Sequence

from dcpbench.config import Sharing
from dcpbench.sweep.jobs import Job

_AT_ONCE = 4
"""Cells that share GPUs, or a CPU, where only their verdicts matter."""


def stretches(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs by the ranks that they need, and how they share: what is together may run at once, and on
    the same ranks. In the order in which each kind is first met."""
    found: dict[object, list[Job]] = {}
    for job in jobs:
        found.setdefault((job.kind, job.config.sharing), []).append(job)
    return list(found.values())


def places(jobs: Sequence[Job], gpus: int) -> list[tuple[int, ...]]:
    """For each lane that cells of one kind may run in the GPUs that are its own, or that it shares.

    Cells on GPUs run at once where each has its own, with `sharing=none` never. With
    `sharing=correctness` as many lanes share each set of GPUs, or the CPU, as are worth it.
    """
    kind, sharing = jobs[0].kind, jobs[0].config.sharing
    size = kind.world_size
    if kind.device == "cuda":
        sets = [tuple(range(first, first + size)) for first in range(0, gpus - size + 1, size)]
    else:
        sets = [()]
    if sharing is Sharing.none:
        sets = sets[:1]
    elif sharing is Sharing.correctness:
        cores = os.cpu_count() or 1
        sets *= max(2, min(_AT_ONCE, cores // size))
    runs = sum(1 for job in jobs if not job.skip)
    return sets[: max(1, runs)]
