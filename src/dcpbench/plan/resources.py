"""What cells need: ranks and GPUs, which decide which cells run at the same time; time, estimated from the
cells so far; and disk space."""

import os
import shutil
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dcpbench.config.groups import Sharing, StorageConfig
from dcpbench.config.text import size_text
from dcpbench.executors import shared_gpus
from dcpbench.plan.plan import PlannedCell
from dcpbench.records import files
from dcpbench.records.row import Row, cell_seconds

_AT_ONCE = {"cuda": 4, "cpu": 16}
"""The largest number of cells that share GPUs, or a CPU, where only their verdicts matter."""


def by_training(cells: Sequence[PlannedCell]) -> list[PlannedCell]:
    """Return the cells with those that train the same run one after another, at the place of the first: warm
    ranks keep one such run at a time, for the cells that share it."""
    first: dict[object, int] = {}
    digests = [cell.config.training_digest or cell.run for cell in cells]
    place = [first.setdefault(digest, number) for number, digest in enumerate(digests)]
    return [cell for _, cell in sorted(zip(place, cells, strict=True), key=lambda pair: pair[0])]


def stretches(cells: Iterable[PlannedCell]) -> list[list[PlannedCell]]:
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


def places(cells: Sequence[PlannedCell], gpus: int, memory: int | None = None) -> list[tuple[int, ...]]:
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
        gpus_of_runners = [everywhere[worker:] + everywhere[:worker] for worker in range(at_once)]
    elif sharing is Sharing.disjoint and size <= len(everywhere) and not several_hosts:
        gpus_of_runners = [everywhere[first : first + size] for first in range(0, gpus - size + 1, size)]
    else:
        gpus_of_runners = [everywhere]
    runs = sum(1 for cell in cells if not cell.skip)
    return gpus_of_runners[: max(1, runs)]


class Times:
    """The seconds that the cells so far took, the latest few of each scenario and world size."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._seconds: defaultdict[tuple[object, object], deque[float]] = defaultdict(
            lambda: deque(maxlen=25)
        )
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a cell that has ended; one that did not run has no effect, nor has a retry."""
        if (seconds := cell_seconds(row)) is not None and row.retry_of is None:
            self._seconds[row["scenario"], row["world_size"]].append(seconds)

    def seconds(self, cell: PlannedCell) -> float | None:
        """Return the median seconds of the cells with this scenario and world size, None without any."""
        seconds = self._seconds.get((cell.config.scenario.name, cell.config.world_size))
        return statistics.median(seconds) if seconds else None

    def left(self, cells: Iterable[PlannedCell], gpus: int) -> float | None:
        """Estimate the seconds for all of these cells that are not skipped; those of another scenario or
        world size than the cells so far take as long as the others on average. None if all are."""
        known: list[float] = []
        total = unknown = 0.0
        for together in stretches(cell for cell in cells if not cell.skip):
            at_once = len(places(together, gpus))
            for seconds in map(self.seconds, together):
                if seconds is None:
                    unknown += 1 / at_once
                else:
                    known.append(seconds)
                    total += seconds / at_once
        return total + unknown * statistics.fmean(known) if known else None


def too_little_space(storage: StorageConfig, checkpoints: Path) -> str | None:
    """Return why the folder of a cell's checkpoints has too little space for them, None if it has enough."""
    place = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
    free, needs = shutil.disk_usage(place).free, storage.needs_bytes
    if free - (needs or 0) >= storage.keep_free_bytes:
        return None
    wanted = f"it needs {size_text(needs)} (storage.needs_bytes) and " if needs else ""
    stays = f"{size_text(storage.keep_free_bytes)} have to stay free (storage.keep_free_bytes)"
    return f"too little disk space: {size_text(free)} are free in {place}, {wanted}{stays}"


def bytes_in(folder: Path) -> int | None:
    """Return the bytes of all files below a folder, None if that cannot be determined."""
    with suppress(OSError):
        return sum(status.st_size for status in files.files_below(folder).values())
    return None
