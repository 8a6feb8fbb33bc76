"""What cells need: ranks and GPUs, which decide which cells run at the same time; time, estimated from
similar cells; and disk space.

How much a cell writes is unknown before its model is built, for which the driver has no torch. It is taken
from cells of the same scenario, model, optimizer, parallelism and saves earlier in the sweep, or from
`storage.needs_bytes`; without either, only `storage.keep_free_bytes` has to be free.
"""

import os
import shutil
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from dcpbench.config.groups import Sharing, StorageConfig
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import CellKey
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.shared_gpus import sharing_sentence
from dcpbench.records import files
from dcpbench.records.row import Row
from dcpbench.sweep.job import Job

_ALIKE = [[spec.key for spec in AXES.values() if spec.likeness >= level] for level in (1, 2, 3)]
"""The keys in which two cells have to be equal to take about equally long, the closest similarity first.
Cells with the same identity are closer still."""

_WRITES_ALIKE = [*(spec.name for spec in AXES.values() if spec.writes), "saves", "save_at"]
"""The keys in which two cells have to be equal to write equally much."""

_AT_ONCE = {"cuda": 4, "cpu": 16}
"""The largest number of cells that share GPUs, or a CPU, where only their verdicts matter."""


def stretches(jobs: Iterable[Job]) -> list[list[Job]]:
    """Group jobs by the ranks that they need, in the order of their first job. Jobs of a group can run at the
    same time, or on the same ranks. Jobs of which only verdicts matter are in one group."""
    found: dict[object, list[Job]] = {}
    for job in jobs:
        shared = job.config.sharing is Sharing.correctness
        ranks = job.kinds[0].device if shared else (*job.kinds, job.config.sharing)
        found.setdefault(ranks, []).append(job)
    return list(found.values())


def places(jobs: Sequence[Job], gpus: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each runner for the jobs of a group.

    With `sharing=disjoint` each runner has separate GPUs, unless cells need several hosts; with
    `sharing=correctness` several runners share the GPUs, or the CPU; otherwise one runner has all GPUs.
    """
    device, sharing = jobs[0].kinds[0].device, jobs[0].config.sharing
    size = max(job.world_size for job in jobs)
    everywhere = tuple(range(gpus)) if device == "cuda" else ()
    several_hosts = any(job.config.executor.hosts for job in jobs)
    if sharing is Sharing.correctness:
        at_once = max(2, min(_AT_ONCE[device], (os.cpu_count() or 1) // size))
        found = [everywhere[worker:] + everywhere[:worker] for worker in range(at_once)]
    elif sharing is Sharing.disjoint and size <= len(everywhere) and not several_hosts:
        found = [everywhere[first : first + size] for first in range(0, gpus - size + 1, size)]
    else:
        found = [everywhere]
    runs = sum(1 for job in jobs if not job.skip)
    return found[: max(1, runs)]


def shared_gpu_sentences(jobs: Iterable[Job], machine: Machine) -> list[str]:
    """Return `4 ranks share 1 GPU (NCCL 2.30.7)` for each number of ranks that do so in these jobs."""
    sharing = {job.world_size for job in jobs if not job.skip and (job.ranks_per_gpu or 0) > 1}
    return [sharing_sentence(ranks, machine.gpus, machine.nccl) for ranks in sorted(sharing)]


class Estimated(NamedTuple):
    """The `keys` of a cell, and how many cells of its group run at the same time."""

    keys: list[str]
    at_once: int


def estimates(jobs: Iterable[Job], gpus: int) -> dict[str, Estimated]:
    """Return what the time of each cell is estimated from, by its name; skips are left out."""
    found: dict[str, Estimated] = {}
    for together in stretches(jobs):
        at_once = len(places(together, gpus))
        found |= {job.cell.name: Estimated(keys(job.key), at_once) for job in together if not job.skip}
    return found


def keys(cell: CellKey) -> list[str]:
    """Return the digests by which similar cells are found, the closest similarity first."""
    return [cell.digest, *map(cell.part, _ALIKE)]


class Costs:
    """Seconds and bytes of the cells so far: the latest few seconds for each similarity, and the most
    bytes."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=25))
        self._disk_bytes: defaultdict[str, int] = defaultdict(int)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a cell that has ended; one that did not run has no effect."""
        cell = CellKey(row.config)
        took_s = row["shared_cell_s"] if row["cell_s"] is None else row["cell_s"]
        for key in [] if took_s is None else keys(cell):
            self._seconds[key].append(took_s)
        kind = cell.part(_WRITES_ALIKE)
        self._disk_bytes[kind] = max(self._disk_bytes[kind], row["disk_bytes"] or 0)

    def seconds(self, cell: Iterable[str]) -> float | None:
        """Return the median seconds of the most similar cells to one with these keys, None without any."""
        key = next((key for key in cell if self._seconds.get(key)), None)
        return statistics.median(self._seconds[key]) if key else None

    def left(self, cells: Iterable[Estimated]) -> float | None:
        """Estimate the seconds for all of these cells; cells without a similar one take as long as the others
        on average. None if none of them has a similar one."""
        known: list[float] = []
        total = unknown = 0.0
        for cell in cells:
            seconds = self.seconds(cell.keys)
            if seconds is None:
                unknown += 1 / cell.at_once
            else:
                known.append(seconds)
                total += seconds / cell.at_once
        return total + unknown * statistics.fmean(known) if known else None

    def why_skip(self, cell: CellKey, storage: StorageConfig, checkpoints: Path) -> str | None:
        """Return why the folder of a cell's checkpoints has too little space for them, None if it has
        enough."""
        place = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
        free = shutil.disk_usage(place).free
        needs, because = storage.needs_bytes, "storage.needs_bytes"
        if needs is None:
            needs, because = self._disk_bytes[cell.part(_WRITES_ALIKE)], "as a similar cell wrote"
        if free - needs >= storage.keep_free_bytes:
            return None
        wanted = f"it needs {decimal(needs)} ({because}) and " if needs else ""
        stays = f"{decimal(storage.keep_free_bytes)} have to stay free (storage.keep_free_bytes)"
        return f"too little disk space: {decimal(free)} are free in {place}, {wanted}{stays}"


def bytes_in(folder: Path) -> int | None:
    """Return the bytes of all files below a folder, None if that cannot be determined."""
    try:
        return sum(found.st_size for found in files.files_below(folder).values())
    except OSError:
        return None
