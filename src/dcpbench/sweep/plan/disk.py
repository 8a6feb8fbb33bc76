"""Whether there is room on the disk for what a cell will write.

Nobody knows that before a model is built, for which the driver has no torch. So it is what a cell of
the same scenario, model, optimizer, parallelism and saves took up earlier in the sweep, or what the user
says (`storage.needs_bytes`); without either, only what is to stay free is asked for.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.filesize import decimal

from dcpbench.config.schema import Config
from dcpbench.records.store import Row

_DECIDES = (
    "scenario",
    "parallel",
    "load_parallel",
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

    def add(self, config: Config, row: Row) -> None:
        """Take note of a cell that has ended."""
        if row.disk_bytes is not None:
            kind = _kind(config)
            self._taken[kind] = max(row.disk_bytes, self._taken.get(kind, 0))

    def why_skip(self, config: Config, checkpoints: Path) -> str | None:
        """Why a cell whose checkpoints go to a folder has no room there, or None if it has."""
        storage = config.storage
        place = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
        free = shutil.disk_usage(place).free
        needs, because = storage.needs_bytes, "storage.needs_bytes"
        if needs is None:
            needs, because = self._taken.get(_kind(config), 0), "as a cell like it took up"
        if free - needs >= storage.keep_free_bytes:
            return None
        wanted = f"it needs {decimal(needs)} ({because}) and " if needs else ""
        return (
            f"too little disk space: {decimal(free)} are free in {place}, {wanted}"
            f"{decimal(storage.keep_free_bytes)} are to stay free (storage.keep_free_bytes)"
        )


def bytes_in(folder: Path) -> int | None:
    """The bytes of all files below a folder, None if that cannot be told."""
    try:
        return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())
    except OSError:
        return None


def _kind(config: Config) -> str:
    told = asdict(config)
    return json.dumps({key: told[key] for key in _DECIDES}, sort_keys=True, default=str)
