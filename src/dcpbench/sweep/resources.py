"""Needs of cells: ranks and GPUs, which decide which cells run at the same time; time, estimated from
similar cells; and disk space.

How much a cell writes is unknown before its model is built, for which the driver has no torch. It is taken
from cells of the same scenario, model, optimizer, parallelism and saves earlier in the sweep, or from
`storage.needs_bytes`; without either, only `storage.keep_free_bytes` has to be free.
"""

import os
import shutil
import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dcpbench.config.groups import Sharing, StorageConfig
from dcpbench.config.text import counted, size_text
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import CellKey
from dcpbench.executors import shared_gpus
from dcpbench.executors.fork_server import Machine
from dcpbench.records import files
from dcpbench.records.row import Row, Run, cell_seconds
from dcpbench.sweep.job import Job

_SIMILAR = [[spec.key for spec in AXES.values() if spec.likeness >= level] for level in (1, 2, 3)]
"""The keys in which two cells have to be equal to take about equally long, the closest similarity first.
Cells with the same identity are closer still."""

_SIMILAR_BYTES = [*(spec.name for spec in AXES.values() if spec.writes), "saves", "save_at"]
"""The keys in which two cells have to be equal to write equally much."""

_AT_ONCE = {"cuda": 4, "cpu": 16}
"""The largest number of cells that share GPUs, or a CPU, where only their verdicts matter."""


def stretches(jobs: Iterable[Job]) -> list[list[Job]]:
    """Group jobs by the ranks that they need, in the order of their first job. Jobs of a group can run at the
    same time, or on the same ranks. Jobs whose times do not matter are in one group."""
    found: dict[object, list[Job]] = {}
    for job in jobs:
        shared = job.config.sharing is Sharing.correctness
        ranks = job.kinds[0].device if shared else (*job.kinds, job.config.sharing)
        found.setdefault(ranks, []).append(job)
    return list(found.values())


def places(jobs: Sequence[Job], gpus: int, memory: int | None = None) -> list[tuple[int, ...]]:
    """Return the GPUs of each runner for the jobs of a group.

    With `sharing=disjoint` each runner has separate GPUs, unless cells need several hosts; with
    `sharing=correctness` several runners share the GPUs, or the CPU; otherwise one runner has all GPUs. Where
    ranks share a GPU, cells have to fit into half of its `memory`.
    """
    device, sharing = jobs[0].kinds[0].device, jobs[0].config.sharing
    size = max(job.world_size for job in jobs)
    everywhere = tuple(range(gpus)) if device == "cuda" else ()
    several_hosts = any(job.config.executor.hosts for job in jobs)
    if sharing is Sharing.correctness:
        at_once = max(2, min(_AT_ONCE[device], len(os.sched_getaffinity(0)) // size))
        if memory and size > len(everywhere) > 0:
            each = shared_gpus.ranks_per_gpu(size, gpus) * shared_gpus.rank_bytes()
            at_once = max(1, min(at_once, memory // 2 // each))
        found = [everywhere[worker:] + everywhere[:worker] for worker in range(at_once)]
    elif sharing is Sharing.disjoint and size <= len(everywhere) and not several_hosts:
        found = [everywhere[first : first + size] for first in range(0, gpus - size + 1, size)]
    else:
        found = [everywhere]
    runs = sum(1 for job in jobs if not job.skip)
    return found[: max(1, runs)]


def shared_gpu_sentences(jobs: Iterable[Job], machine: Machine) -> list[str]:
    """Return `4 ranks share 1 GPU (NCCL 2.30.7)` for each number of ranks that do so in these jobs, or with
    gloo if that NCCL does not support it."""
    sharing, nccl = {job.world_size for job in jobs if job.shares_gpus}, machine.nccl
    can_share = shared_gpus.nccl_can_share(nccl)
    backend = f"NCCL {nccl}" if can_share else f"gloo, because NCCL is {nccl or 'missing'}"
    gpus = counted(machine.gpus, "GPU")
    return [f"{ranks} ranks share {gpus} ({backend})" for ranks in sorted(sharing)]


_SIMILAR_MEMORY = ("model", "optimizer", "workload", "world_size")
"""The keys in which two cells have to be equal to need about the same GPU memory."""


class GpuMemory:
    """Let cells whose ranks share GPUs run at the same time as long as their tensors fit into the memory.

    What a cell needs is known after a cell of the same model, optimizer and number of ranks has run: at most
    the peak of its ranks, times the number of ranks if that cell was sharded. The first of them runs alone.
    """

    def __init__(
        self, jobs: Sequence[Job], workers: int, gpu_bytes: int | None, rows: Iterable[Row] = ()
    ) -> None:
        """Take the jobs of a group, the number of `workers`, which run one job each at a time, and the
        `rows` so far."""
        ranks = max((job.ranks_per_gpu or 0 for job in jobs if job.shares_gpus), default=0)
        # A tenth is left for fragmentation.
        self._free_bytes = int(0.9 * (gpu_bytes or 0)) - workers * ranks * shared_gpus.rank_bytes()
        self._peaks: dict[str, int] = {}
        self._running: dict[Run, int] = {}
        self._changed = threading.Condition()
        for row in rows:
            self._note(row)

    @contextmanager
    def room_for(self, job: Job) -> Iterator[Callable[[Row], None]]:
        """Context manager: wait until there is room for a cell, and yield a function to call with its row."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._needs(job) <= self._left())
            self._running[job.run] = self._needs(job)
        try:
            yield self._note
        finally:
            with self._changed:
                del self._running[job.run]
                self._changed.notify_all()

    def _left(self) -> int:
        return self._free_bytes - sum(self._running.values())

    def _needs(self, job: Job) -> int:
        if not job.shares_gpus:
            return 0
        peak = self._peaks.get(job.key.part(_SIMILAR_MEMORY))
        return self._free_bytes if peak is None else peak * (job.ranks_per_gpu or 1) * job.world_size

    def _note(self, row: Row) -> None:
        if row["peak_device_bytes"]:
            kind = CellKey(row.config).part(_SIMILAR_MEMORY)
            self._peaks[kind] = max(self._peaks.get(kind, 0), row["peak_device_bytes"])


class Estimated(NamedTuple):
    """The `keys` of a cell, and how many cells of its group run at the same time."""

    keys: list[str]
    at_once: int


def estimates(jobs: Iterable[Job], gpus: int) -> dict[Run, Estimated]:
    """Return what the time of each run is estimated from; skips are left out."""
    found: dict[Run, Estimated] = {}
    for together in stretches(jobs):
        at_once = len(places(together, gpus))
        found |= {job.run: Estimated(keys(job.key), at_once) for job in together if not job.skip}
    return found


def keys(cell: CellKey) -> list[str]:
    """Return the digests that identify similar cells, the closest similarity first."""
    return [cell.digest, *map(cell.part, _SIMILAR)]


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
        if (took_s := cell_seconds(row)) is not None:
            for key in keys(cell):
                self._seconds[key].append(took_s)
        kind = cell.part(_SIMILAR_BYTES)
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
            needs, because = self._disk_bytes[cell.part(_SIMILAR_BYTES)], "as a similar cell wrote"
        if free - needs >= storage.keep_free_bytes:
            return None
        wanted = f"it needs {size_text(needs)} ({because}) and " if needs else ""
        stays = f"{size_text(storage.keep_free_bytes)} have to stay free (storage.keep_free_bytes)"
        return f"too little disk space: {size_text(free)} are free in {place}, {wanted}{stays}"


def bytes_in(folder: Path) -> int | None:
    """Return the bytes of all files below a folder, None if that cannot be determined."""
    with suppress(OSError):
        return sum(found.st_size for found in files.files_below(folder).values())
    return None
