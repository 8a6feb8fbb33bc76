"""Estimates of the seconds that cells take, from the cells so far, and of their disk space."""

import shutil
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dcpbench.config.groups import StorageConfig
from dcpbench.config.text import size_text
from dcpbench.plan.at_once import gpus_of_runners, groups_by_ranks
from dcpbench.plan.plan import PlannedCell
from dcpbench.records import files
from dcpbench.records.row import Row, cell_seconds


class TimeEstimates:
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

    def remaining_s(self, cells: Iterable[PlannedCell], gpus: int) -> float | None:
        """Estimate the seconds for all of these cells that are not skipped; those of another scenario or
        world size than the cells so far take as long as the others on average. None if all are."""
        known: list[float] = []
        total = unknown = 0.0
        for together in groups_by_ranks(cell for cell in cells if not cell.skip):
            at_once = len(gpus_of_runners(together, gpus))
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
