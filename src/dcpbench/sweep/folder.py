"""The folder of a sweep: locked, described in `sweep.json`, resumed and cleared.

One driver works in a folder at a time, and none in that of another sweep. `resume` runs what the record
names, so it refuses a folder that another user owns. A folder that cannot be used is refused by a ConfigError
with the key of the configuration that names it.
"""

import fcntl
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.config.text import program
from dcpbench.plan.plan import PlannedCell
from dcpbench.records import files, store
from dcpbench.records.store import ENVIRONMENT_JSON, RESULTS_JSONL, SWEEP_JSON, parse
from dcpbench.sweep.valid_rows import ValidRows, valid_rows
from dcpbench.verdict.verdict import OUTSIDE

DIR = "hydra.sweep.dir"
_LOCK = ".lock"
_MULTIRUN_YAML = "multirun.yaml"
"""The configuration of the sweep, named as by Hydra's own sweepers, which write it before the first batch."""


@dataclass(frozen=True)
class SweepRecord:
    """The request for a sweep: the words of the command line about its cells, the folder in which they
    were typed, the overrides of each cell by its name, each `storage.root` in which the sweep has a folder,
    and the block of each cell that is of one."""

    arguments: list[str]
    cwd: str
    cells: dict[str, list[str]]
    storage: list[str]
    blocks: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "SweepRecord":
        """Return the record in the folder of a sweep to resume."""
        where = f"resume {folder}"
        if not folder.is_dir():
            raise ConfigError(f"{where}: there is no such folder")
        try:
            known = {"blocks": {}, **parse(files.read(folder / SWEEP_JSON))}
            record = cls(**{record_field.name: known[record_field.name] for record_field in fields(cls)})
            lists = (record.arguments, record.storage, *record.cells.values(), [*record.blocks.values()])
            if not all(
                isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists
            ):
                raise ValueError("not lists of texts")
            if "\0" in "".join([record.cwd, *record.cells, *chain(*lists)]):  # TypeError if cwd is not a text
                raise ValueError("NUL bytes")
            wrong = [name for name in record.cells if name in ("", "..") or Path(name).name != name]
            if wrong or not record.cells:
                raise ValueError("no cells, or names that are no names of folders")
        except FileNotFoundError:
            raise ConfigError(f"{where}: contains no sweep to resume (no {SWEEP_JSON})") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: {SWEEP_JSON} was not written by a sweep ({error!r})") from None
        return record

    @property
    def command(self) -> str:
        """The command that began the sweep."""
        return shlex.join([*program(), "run", *self.arguments])

    def refuse_foreign(self, folder: Path) -> None:
        """Refuse to resume a sweep that another user owns."""
        owners = {path.lstat().st_uid for path in (folder, folder / SWEEP_JSON)}
        if owners != {os.geteuid()}:
            raise ConfigError(
                f"resume {folder}: another user owns it, and resuming runs what its {SWEEP_JSON} names: "
                f"`{self.command}` in {self.cwd}; if you want that, add --trust"
            )

    def write(self, folder: Path) -> None:
        """Write `sweep.json` atomically."""
        store.write_json(folder / SWEEP_JSON, asdict(self))


class SweepFolder:
    """The folder of one sweep, new or resumed. Nothing is written before `hold`.

    Used as a context manager it is released at the end; one in which no sweep has begun is removed. The
    kernel releases it when the driver ends, however it ends.
    """

    def __init__(self, path: Path, record: SweepRecord) -> None:
        """Refuse a new folder that is not empty. The record of a resumed sweep has cells."""
        self.path, self.is_resumed, self._record = path, bool(record.cells), record
        self._lock: int | None = None
        if not self.is_resumed:
            refuse_used(path)

    def __enter__(self) -> "SweepFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is None:
            return
        with suppress(OSError):
            if not _used(self.path):
                files.remove(self.path, within=self.path.parent)
        os.close(self._lock)

    def hold(self) -> None:
        """Make the folder and be the only driver in it."""
        with _refusing(self.path):
            self._lock = lock_folder(self.path)

    def refuse_unusable(self, cells: Sequence[PlannedCell]) -> None:
        """Refuse folders in which a sweep of these cells cannot begin or be resumed; write nothing."""
        refuse_unusable(self.path, is_resumed=self.is_resumed)
        for place in self._new_places(cells):
            refuse_unusable(place, "storage.root")

    def valid_rows(self, cells: Sequence[PlannedCell], rerun_failed: bool) -> ValidRows:
        """Return the rows of cells that need not run again: none in a new folder."""
        if not self.is_resumed:
            return ValidRows()
        try:
            lines = store.read_lines(self.path, kept=OUTSIDE)
            return valid_rows(lines, cells, rerun_failed, self._environment())
        except store.ResultsError as error:
            raise ConfigError(f"resume {self.path}: {error}") from None

    def begin(self, cells: Sequence[PlannedCell], valid: ValidRows, config: DictConfig) -> list[str]:
        """Make a folder below each `storage.root` of the cells, and write `sweep.json`. Hold a new folder,
        and write its configuration; in that of a resumed sweep, clear the cells that run again. The others
        keep the overrides with which they ran. Return a sentence for each folder that was not cleared."""
        places = self._new_places(cells)
        for place in places:
            refuse_unusable(place, "storage.root")
        if not self.is_resumed:
            self.hold()
            refuse_used(self.path)  # once more, now that no other driver can write there
        for place in places:
            with _refusing(place, "storage.root"):
                place.mkdir(parents=True, exist_ok=True)
        recorded = self._record.cells
        words = {cell.name: cell.overrides for cell in cells}
        words |= {name: recorded[name] for cell in cells if cell.run in valid.lines and (name := cell.name)}
        storage = sorted([*(str(place.parent) for place in places), *self._record.storage])
        blocks = {cell.name: cell.block for cell in cells if cell.block}
        self._record = replace(self._record, cells=words, storage=storage, blocks=blocks)
        self._record.write(self.path)
        if self.is_resumed:
            return self.keep(cells, valid)
        OmegaConf.save(config, self.path / _MULTIRUN_YAML)
        return []

    def keep(self, cells: Sequence[PlannedCell], valid: ValidRows) -> list[str]:
        """Keep only the valid rows, and remove all files of the cells that run again, also those below each
        `storage.root` of the sweep. Return a sentence for each folder that could not be removed."""
        files.remove_temporary(self.path)
        if valid.superseded or valid.torn:
            store.keep_lines(self.path, valid.lines.values(), valid.superseded)
        store.keep_beside(self.path, {row.cell for row in valid.rows.values()})
        roots = [Path(root) / self.path.name for root in self._record.storage]
        again = [run for cell in cells if cell.run not in valid.lines for run in (cell, cell.retry)]
        folders = [(run.folder, self.path) for run in again]
        folders += [(root / run.name, root) for run in again for root in roots]
        return [*filter(None, (_clear(folder, within) for folder, within in folders))]

    def earlier_machines(self, now: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the earlier descriptions of the machine, as far as they differ from `now`, the latest
        last."""
        before = self._environment()
        earlier: list[dict[str, Any]] = before.pop("earlier", [])
        differing = {key: value for key, value in before.items() if key in now and value != now[key]}
        return [*earlier, differing] if differing else earlier

    def _environment(self) -> dict[str, Any]:
        """Return the description of the machine in the folder; empty if there is none."""
        try:
            before = parse(files.read(self.path / ENVIRONMENT_JSON))
            return {**before, "earlier": list(before.get("earlier", []))}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"resume {self.path}: {ENVIRONMENT_JSON} cannot be read: {error}") from None

    def _new_places(self, cells: Sequence[PlannedCell]) -> list[Path]:
        """Return the sweep's folder below each `storage.root` in which it has none yet."""
        roots = {str(Path(root).resolve()) for cell in cells if (root := cell.config.storage.root)}
        return [Path(root, self.path.name) for root in sorted(roots.difference(self._record.storage))]


def refuse_used(folder: Path, key: str = DIR) -> None:
    """Refuse a folder, which `key` of the configuration names, that is not empty; write nothing."""
    used: set[str] = set()
    with _refusing(folder, key), suppress(FileNotFoundError):
        used = _used(folder)
    if used:
        what = "is not empty; choose a folder that is new or empty"
        if RESULTS_JSONL in used or SWEEP_JSON in used:
            what = f"contains a sweep already; choose a new or empty folder, or run dcpbench resume {folder}"
        raise ConfigError(f"{key}={folder}: {what}")


def refuse_unusable(folder: Path, key: str = DIR, is_resumed: bool = False) -> None:
    """Refuse a folder in which no sweep can begin, or be resumed; write nothing."""
    if not is_resumed:
        refuse_used(folder, key)
    with _refusing(folder, key):
        if (folder / _LOCK).exists():
            os.close(lock_folder(folder))
        place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder}: cannot be used: {place} cannot be written to")


def lock_folder(folder: Path) -> int:
    """Make the folder if it is missing, and lock it; close the returned descriptor to release it. Processes
    that are started later do not inherit it.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:
            raise BlockingIOError("its last holder is removing the folder")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _refusing(folder: Path, key: str = DIR) -> Iterator[None]:
    """Context manager: refuse a folder, which `key` of the configuration names, if it cannot be used."""
    try:
        yield
    except BlockingIOError:
        raise ConfigError(f"{DIR}={folder}: another dcpbench is using this folder") from None
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be used: {error.strerror}") from None


def _used(folder: Path) -> set[str]:
    """Return the names in a folder, without those that a driver killed before its sweep began can leave."""
    names = {path.name for path in folder.iterdir()}
    return {name for name in names if name != _LOCK and not files.is_temporary(name)}


def _clear(folder: Path, within: Path) -> str | None:
    """Remove a folder if it exists, or return a sentence; refuse one that is not within the other."""
    if within.resolve() not in folder.resolve().parents:
        raise ConfigError(f"{folder}: is not in {within}, and is not removed")
    return files.remove(folder, within)
