"""The folder of a sweep: refused, claimed, described, resumed and released.

A part of a sweep has a folder below that of the complete sweep, where `sweep.json` names the cells of all
parts; `dcpbench.records.store` reads such a folder as one sweep. Each part is resumed separately.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Rerun
from dcpbench.config.schema import PART, Config
from dcpbench.config.text import counted
from dcpbench.records import store
from dcpbench.sweep import manifest, resume
from dcpbench.sweep.claim import claim, held, refuse_unusable, refuse_used
from dcpbench.sweep.job import Job, Part

_DIR = f"{manifest.DIR}="
_MULTIRUN_YAML = "multirun.yaml"
"""The configuration of the sweep, named as by Hydra's own sweepers, which write it before the first batch."""


class SweepFolder:
    """The folder of one sweep, or of its part. Nothing is written before `claim`.

    A folder that cannot be used, or contains another sweep than requested, raises a ConfigError.
    """

    def __init__(self, base: DictConfig) -> None:
        self._base = base
        self.path = Path(str(base.hydra.sweep.dir)).resolve()
        self.part = Part.parse(base.part) if base.part else None
        if self.part and self.path != self.part.folder(self.path.parent):
            raise ConfigError(f"part={base.part}: pass it on the command line, exactly so")
        before = _resumed(base, self.path)
        self.is_resumed = before is not None
        self._record = before or manifest.Record(manifest.own_words(sys.argv[1:]), str(Path.cwd()), {}, [])
        self._claim = ExitStack()
        self._is_claimed = False
        if not self.is_resumed:
            refuse_used(self.path)

    @property
    def recorded(self) -> tuple[list[str], list[list[str]]] | None:
        """The words about its cells of a resumed sweep's command, and the overrides of each cell of the
        complete sweep, as far as they are known; None if no sweep is resumed."""
        cells = [] if self.part else [*self._record.cells.values()]
        return (self._record.arguments, cells) if self.is_resumed else None

    def claim(self) -> None:
        """Be the only driver in the folder until `release`."""
        if not self._is_claimed:
            self._claim.enter_context(held(self.path))
            self._is_claimed = True
            if not self.is_resumed:
                refuse_used(self.path)  # once more, now that no other driver can write there

    def release(self) -> None:
        """Release the folder."""
        self._claim.close()

    def named(self, jobs: Sequence[Job], config_of: Callable[[Sequence[str]], Config | None]) -> list[Job]:
        """Return the jobs of the complete sweep with the names that its folder has for their cells; refuse
        others than it has. `config_of` is that of `resume.recognized`."""
        whole = self.path.parent
        if self.part and (whole / store.SWEEP_JSON).exists():
            return resume.recognized(jobs, manifest.read(whole, _DIR), config_of, f"{_DIR}{whole}")
        if self.is_resumed and not self.part:
            return resume.recognized(jobs, self._record, config_of, f"resume={self.path}")
        return [*jobs]

    def mine(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that this driver runs, of those that `named` returned."""
        mine = [*jobs]
        if self.part and self.is_resumed:
            mine = [job for job in jobs if job.cell.name in self._record.cells]
            if len(mine) < len(self._record.cells):
                raise ConfigError(f"resume={self.path}: is of another matrix than {self.path.parent}")
        elif self.part:
            mine = self.part.jobs(jobs)
        if not mine:
            raise ConfigError(f"part={self.part}: has none of {counted(len(jobs), 'cell')}")
        return mine

    def found(self, jobs: Sequence[Job]) -> resume.Found | None:
        """Return the rows of a resumed sweep's jobs."""
        if not self.is_resumed:
            return None
        return resume.look(self.path, store.read_lines(self.path), jobs, self._base.rerun)

    def refuse_unusable(self, jobs: Sequence[Job]) -> None:
        """Refuse folders in which a sweep of these jobs cannot begin or be resumed; write nothing."""
        refuse_unusable(self.path, begun=self.is_resumed)
        for root in self._new_roots(jobs):
            refuse_unusable(root / self.path.name, "storage.root")

    def begin(self, jobs: Sequence[Job], of_all: Sequence[Job], found: resume.Found | None) -> None:
        """Claim and describe the folder, and clear the cells of a resumed sweep that run again.

        Args:
            of_all: the jobs of all parts.
            found: the result of `found`.
        """
        for root in self._new_roots(jobs):
            refuse_unusable(root / self.path.name, "storage.root")
        if self.part:
            words = [word for word in self._record.arguments if not word.startswith(f"{PART}=")]
            cells = {one.cell.name: one.cell.overrides for one in of_all}
            begin_part(self.path, manifest.Record(words, self._record.cwd, cells, []))
        self.claim()
        self.describe(jobs, found.standing if found else ())
        if found:
            resume.take_up(self.path, jobs, found, self._record.storage)
        else:
            OmegaConf.save(self._base, self.path / _MULTIRUN_YAML)

    def describe(self, jobs: Sequence[Job], done: Collection[str] = ()) -> None:
        """Write `sweep.json`, and make a folder for the jobs below each `storage.root` that they name. Cells
        that are `done` keep the overrides with which they ran."""
        new = self._new_roots(jobs)
        for root in new:
            claim(root / self.path.name, "storage.root")
        cells = {one.cell.name: one.cell.overrides for one in jobs}
        cells |= {name: words for name, words in self._record.cells.items() if name in done}
        storage = sorted([*map(str, new), *self._record.storage])
        self._record = replace(self._record, cells=cells, storage=storage)
        self._record.write(self.path)

    def progress(self) -> str:
        """Say how many cells of the complete sweep of a part have a row."""
        whole = self.path.parent
        rows, cells = sum(1 for _ in store.stored_rows(whole)), manifest.read(whole, "").cells
        return f"part={self.part}: {rows} of {counted(len(cells), 'cell')} of {whole} have a row"

    def _new_roots(self, jobs: Sequence[Job]) -> list[Path]:
        """Return each `storage.root` in which the sweep has no folder yet."""
        roots = {str(Path(root).resolve()) for job in jobs if (root := job.config.storage.root)}
        return [Path(root) for root in sorted(roots.difference(self._record.storage))]


def begin_part(folder: Path, record: manifest.Record) -> None:
    """Prepare the folder of the complete sweep, which has this record, for the part in `folder`."""
    whole = folder.parent
    try:
        claim(whole, manifest.DIR)
        record.write(whole)
    except ConfigError:  # another part may have begun, just now too
        if not (whole / store.SWEEP_JSON).exists() or (whole / store.RESULTS_JSONL).exists():
            raise
    if {*manifest.read(whole, _DIR).cells} != {*record.cells}:
        others = "another part began just now with the same cells under other names, or with other cells"
        raise ConfigError(f"{_DIR}{whole}: {others}; start this part again")
    counts = {path.name.rpartition("-")[2] for path in (*whole.glob(store.PARTS), folder)}
    if len(counts) > 1:
        raise ConfigError(f"part: {whole} has {' and '.join(sorted(counts))} parts; choose one number")


def _resumed(base: DictConfig, folder: Path) -> manifest.Record | None:
    """Return the record of the sweep to resume, if any; refuse `resume` and `rerun` where they do not
    apply."""
    if base.resume is None:
        for key, null in (("rerun", Rerun.none), ("trust", False)):
            if base[key] != null:
                value = str(base[key]).lower()
                raise ConfigError(f"{key}={value}: needs resume=<folder>, which is not set")
        return None
    if not str(base.resume):
        raise ConfigError("resume=: names no folder")
    if Path(str(base.resume)).resolve() != folder:
        raise ConfigError(f"resume={base.resume}: {manifest.DIR}={folder} is another folder")
    record = manifest.read(folder)
    if not base.trust:
        manifest.refuse_foreign(folder, record)
    _refuse_parts(folder)
    return record


def _refuse_parts(whole: Path) -> None:
    """Refuse to resume a sweep in parts as one."""
    begun = {path.name.rpartition("-part-")[2]: path for path in whole.glob(store.PARTS)}
    if not begun:
        return
    count = int(next(iter(begun)).rpartition("-")[2])
    unfinished = []
    for number in range(1, count + 1):
        part = begun.get(f"{number}-of-{count}")
        try:
            rows = {row.cell for row in store.stored_rows(part)} if part else set()
            done = part is not None and rows.issuperset(manifest.read(part).cells)
        except (ConfigError, store.ResultsError):
            done = False
        unfinished += [] if done else [f"{manifest.command('resume', whole)} part={number}/{count}"]
    which = f": {', '.join(unfinished)}" if unfinished else "; all are complete (rerun=failed with part=…)"
    raise ConfigError(f"resume={whole}: has {count} parts, each resumed separately{which}")
