"""The folder that a sweep is asked to use: refused, claimed, described and given up."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Rerun
from dcpbench.config.schema import PART
from dcpbench.config.text import counted
from dcpbench.records.store import read_lines
from dcpbench.sweep import manifest, parts, resume
from dcpbench.sweep.job import Job
from dcpbench.sweep.part import Part

_MULTIRUN_YAML = "multirun.yaml"
"""The configuration of the sweep, named as by Hydra's own sweepers, which write it before the first batch."""


class SweepFolder:
    """The folder of one sweep, or of its part. Nothing is written before `claim`.

    Raises:
        ConfigError: the folder cannot be used, or what is asked for does not fit what it holds.
    """

    def __init__(self, base: DictConfig) -> None:
        self._base = base
        self.path = Path(str(base.hydra.sweep.dir)).resolve()
        self.part = Part.parse(base.part) if base.part else None
        if self.part and self.path != self.part.folder(self.path.parent):
            raise ConfigError(f"part={base.part}: must be said on the command line, just so")
        before = _resumed(base, self.path)
        self.is_resumed = before is not None
        self._record = before or manifest.Record(manifest.own_words(sys.argv[1:]), str(Path.cwd()), [], [])
        self._claim = ExitStack()
        self._is_claimed = False
        if not self.is_resumed:
            manifest.refuse_used(self.path)

    def claim(self) -> None:
        """Be the only driver in the folder, from now on until `release`.

        Raises:
            ConfigError: it cannot be written to, another driver is at work there, or it holds something.
        """
        if not self._is_claimed:
            self._claim.enter_context(manifest.held(self.path))
            self._is_claimed = True
            if not self.is_resumed:
                manifest.refuse_used(self.path)  # once more, now that no other driver can write there

    def release(self, begun: bool) -> None:
        """Give the folder up; of a sweep that has not begun nothing stays."""
        if self._is_claimed and not (begun or self.is_resumed):  # another sweeper may have left it
            (self.path / _MULTIRUN_YAML).unlink(missing_ok=True)
        self._claim.close()

    def mine(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of all jobs that this driver runs.

        Raises:
            ConfigError: there is none.
        """
        mine = self.part.jobs(jobs) if self.part else list(jobs)
        if not mine:
            raise ConfigError(f"part={self.part}: has none of {counted(len(jobs), 'cell')}")
        return mine

    def found(self, jobs: Sequence[Job]) -> resume.Found | None:
        """What the folder of a sweep that is resumed holds of its jobs.

        Raises:
            ConfigError: it has other cells, or its rows cannot be read.
        """
        if not self.is_resumed:
            return None
        resume.same_matrix(self.path, self._record, {one.cell.name for one in jobs})
        return resume.look(self.path, read_lines(self.path), jobs, self._base.rerun)

    def refuse_unusable(self, jobs: Sequence[Job]) -> None:
        """Make sure that a sweep of these jobs could begin or be resumed; writes nothing.

        Raises:
            ConfigError: a folder cannot be made or written to, or holds something.
        """
        manifest.refuse_unusable(self.path, begun=self.is_resumed)
        for root in self._new_roots(jobs):
            manifest.refuse_unusable(root / self.path.name, "storage.root")

    def begin(self, jobs: Sequence[Job], of_all: Sequence[Job], found: resume.Found | None) -> None:
        """Claim the folder, write down what is asked for, and clear what a resumed sweep does not keep.

        Args:
            of_all: the jobs of all parts.
            found: what `found` returned.

        Raises:
            ConfigError: a folder cannot be used.
        """
        if self.part:
            words = [word for word in self._record.arguments if not word.startswith(f"{PART}=")]
            whole = manifest.Record(words, self._record.cwd, *_asked_for(of_all))
            parts.begin(self.path, whole)
        self.claim()
        self.describe(jobs)
        if found:
            resume.take_up(self.path, jobs, found)
        else:
            OmegaConf.save(self._base, self.path / _MULTIRUN_YAML)

    def describe(self, jobs: Sequence[Job]) -> None:
        """Write down the jobs, and make a folder for them below each `storage.root` that they name.

        Raises:
            ConfigError: a folder cannot be used.
        """
        new = self._new_roots(jobs)
        for root in new:
            manifest.claim(root / self.path.name, "storage.root")
        names, _, overrides = _asked_for(jobs)
        storage = sorted([*map(str, new), *self._record.storage])
        self._record = replace(self._record, cells=names, storage=storage, overrides=overrides)
        self._record.write(self.path)

    def _new_roots(self, jobs: Sequence[Job]) -> list[Path]:
        """The folders of `storage.root` in which the sweep has none of its own yet."""
        roots = {str(Path(root).resolve()) for job in jobs if (root := job.config.storage.root)}
        return [Path(root) for root in sorted(roots.difference(self._record.storage))]


def _asked_for(jobs: Sequence[Job]) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """For a record: the names of the cells, no storage yet, and the overrides of each."""
    return [one.cell.name for one in jobs], [], {one.cell.name: one.cell.overrides for one in jobs}


def _resumed(base: DictConfig, folder: Path) -> manifest.Record | None:
    """The record of the sweep to resume, if one is; refuses `resume` and `rerun` that make no sense."""
    if base.resume is None:
        for key, null in (("rerun", Rerun.none), ("trust", False)):
            if base[key] != null:
                value = str(base[key]).lower()
                raise ConfigError(f"{key}={value}: says what to do with resume=<folder>, which is not set")
        return None
    if not str(base.resume):
        raise ConfigError("resume=: names no folder")
    if Path(str(base.resume)).resolve() != folder:
        raise ConfigError(f"resume={base.resume}: hydra.sweep.dir={folder} is another folder")
    record = manifest.read(folder)
    if not base.trust:
        record.refuse_foreign(folder)
    parts.refuse_whole(folder)
    return record
