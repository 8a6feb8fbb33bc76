"""The folder of a sweep: refused, claimed, described, resumed and released."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Rerun
from dcpbench.config.text import counted
from dcpbench.records import store
from dcpbench.sweep import manifest, resume
from dcpbench.sweep.cells import SweepCell
from dcpbench.sweep.claim import claim, held, refuse_unusable, refuse_used
from dcpbench.sweep.job import Job, Part

_MULTIRUN_YAML = "multirun.yaml"
"""The configuration of the sweep, named as by Hydra's own sweepers, which write it before the first batch."""


class SweepFolder:
    """The folder of one sweep. Nothing is written before `claim`.

    A folder that cannot be used, or contains another sweep than requested, raises a ConfigError.
    """

    def __init__(self, base: DictConfig) -> None:
        self._base = base
        self.path = Path(str(base.hydra.sweep.dir)).resolve()
        self.part = Part.parse(base.part) if base.part else None
        before = _resumed(base, self.path)
        self.is_resumed = before is not None
        words, cwd = manifest.own_words(sys.argv[1:]), str(Path.cwd())
        self._record = replace(before or manifest.Record([], "", {}, []), arguments=words, cwd=cwd)
        self._claim = ExitStack()
        if not self.is_resumed:
            refuse_used(self.path)

    @property
    def recorded(self) -> dict[str, list[str]] | None:
        """The overrides with which a resumed sweep runs each cell, by its name; None if no sweep is
        resumed."""
        how = manifest.how_run_words(self._record.arguments)
        cells = {name: manifest.with_words(words, how) for name, words in self._record.cells.items()}
        return cells if self.is_resumed else None

    def claim(self) -> None:
        """Be the only driver in the folder until `release`."""
        self._claim.enter_context(held(self.path))

    def release(self) -> None:
        """Release the folder."""
        self._claim.close()

    def of_part(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that this driver runs; a resumed part has no others."""
        mine = self.part.jobs(jobs) if self.part and not self.is_resumed else [*jobs]
        if not mine:
            raise ConfigError(f"part={self._base.part}: has none of {counted(len(jobs), 'cell')}")
        return mine

    def named(self, cells: Sequence[SweepCell]) -> list[SweepCell]:
        """Return the cells of a resumed sweep, built from its `recorded` words, with their names."""
        names = self.recorded or [cell.name for cell in cells]
        both = zip(cells, names, strict=True)
        return [replace(cell, name=name, folder=self.path / name) for cell, name in both]

    def found(self, jobs: Sequence[Job]) -> resume.Found | None:
        """Return the rows of a resumed sweep's jobs."""
        if not self.is_resumed:
            return None
        return resume.look(self.path, store.read_lines(self.path), jobs, self._base.rerun)

    def refuse_unusable(self, jobs: Sequence[Job]) -> None:
        """Refuse folders in which a sweep of these jobs cannot begin or be resumed; write nothing."""
        refuse_unusable(self.path, begun=self.is_resumed)
        for place in self._new_places(jobs):
            refuse_unusable(place, "storage.root")

    def begin(self, jobs: Sequence[Job], found: resume.Found | None) -> list[str]:
        """Make a folder below each `storage.root` of the jobs, and write `sweep.json`. Claim a new folder; in
        that of a resumed sweep, clear the cells that run again, given the result of `found`. The others keep
        the overrides with which they ran. Return a sentence for each folder that could not be cleared."""
        places = self._new_places(jobs)
        for place in places:
            refuse_unusable(place, "storage.root")
        if not found:
            self.claim()
            refuse_used(self.path)  # once more, now that no other driver can write there
        for place in places:
            claim(place, "storage.root")
        done = [job.cell.name for job in jobs if found and job.run in found.standing]
        cells = {job.cell.name: job.cell.overrides for job in jobs}
        cells |= {name: self._record.cells[name] for name in done}
        storage = sorted([*(str(place.parent) for place in places), *self._record.storage])
        self._record = replace(self._record, cells=cells, storage=storage)
        self._record.write(self.path)
        if found:
            return resume.take_up(self.path, jobs, found, self._record.storage)
        OmegaConf.save(self._base, self.path / _MULTIRUN_YAML)
        return []

    def _new_places(self, jobs: Sequence[Job]) -> list[Path]:
        """Return the sweep's folder below each `storage.root` in which it has none yet."""
        roots = {str(Path(root).resolve()) for job in jobs if (root := job.config.storage.root)}
        return [Path(root, self.path.name) for root in sorted(roots.difference(self._record.storage))]


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
    return record
