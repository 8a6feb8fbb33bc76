"""Whether there is room on the disk for what a cell will write.

Nobody knows that before a model is built, for which the driver has no torch. So it is what a cell of
the same scenario, model, optimizer, parallelism and saves took up earlier in the sweep, or what the user
says (`storage.needs_bytes`); without either, only what is to stay free is asked for.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from rich.filesize import decimal

from dcpbench.config.cell_key import CellKey
from dcpbench.config.groups import StorageConfig

_DECIDES = (
    "scenario",
    "parallel",
    "load_parallel",
    "checkpointer",
    "model",
    "optimizer",
    "world_size",
    "saves",
    "save_at",
)


@dataclass
class DiskUse:
    """The most bytes that cells of a kind have taken up."""

    _taken: dict[str, int] = field(default_factory=dict)

    def add(self, cell: CellKey, disk_bytes: int | None) -> None:
        """Take note of a cell that has ended, and of what it took up if that is known."""
        if disk_bytes is not None:
            kind = cell.part(_DECIDES)
            self._taken[kind] = max(disk_bytes, self._taken.get(kind, 0))

    def why_skip(self, cell: CellKey, storage: StorageConfig, checkpoints: Path) -> str | None:
        """Why a cell whose checkpoints go to a folder has no room there, or None if it has."""
        place = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
        free = shutil.disk_usage(place).free
        needs, because = storage.needs_bytes, "storage.needs_bytes"
        if needs is None:
            needs, because = self._taken.get(cell.part(_DECIDES), 0), "as a cell like it took up"
        if free - needs >= storage.keep_free_bytes:
            return None
        wanted = f"it needs {decimal(needs)} ({because}) and " if needs else ""
        return (
            f"too little disk space: {decimal(free)} are free in {place}, {wanted}"
            f"{decimal(storage.keep_free_bytes)} are to stay free (storage.keep_free_bytes)"
        )


def bytes_in(folder: Path) -> int | None:
    """The bytes of all files below a folder, None if that cannot be determined."""
    try:
        return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())
    except OSError:
        return None
