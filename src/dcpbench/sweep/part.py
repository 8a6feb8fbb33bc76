"""A part of a sweep, `part=2/4`: the cells that one of several drivers runs, each in a folder of its own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcpbench.config.errors import ConfigError
from dcpbench.core.cell_key import digest_of
from dcpbench.sweep.job import Job


@dataclass(frozen=True)
class Part:
    """Which one of how many, from 1 on."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Part":
        """`2/4`; a ConfigError for anything else."""
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if not found or int(found[1]) > int(found[2]):
            raise ConfigError(f"part={text}: must be a number of how many, as 2/4")
        return cls(int(found[1]), int(found[2]))

    def folder(self, whole: Path) -> Path:
        """Where it lies in the folder of the whole sweep. Below a `storage.root` its name has to tell too of
        which sweep it is."""
        return whole / f"{whole.name}-part-{self.number}-of-{self.count}"

    def jobs(self, jobs: Sequence[Job]) -> list[Job]:
        """Its own of the jobs of a whole sweep, in their order.

        Cells that are likely to take alike long are dealt out in turn, so that parts are equally long. All
        runs of a cell are in one part: it is one machine's noise that they show. Nothing but what was asked
        for decides, so that every driver deals out the same.
        """
        runs = [tuple(one for one in job.cell.overrides if not one.startswith("repeat=")) for job in jobs]
        likeness = {run: (_likeness(job), digest_of(run)) for run, job in zip(runs, jobs, strict=True)}
        mine = {*sorted(likeness, key=likeness.__getitem__)[self.number - 1 :: self.count]}
        return [job for run, job in zip(runs, jobs, strict=True) if run in mine]


def _likeness(job: Job) -> tuple[str, ...]:
    asked = job.cell.config
    return asked.scenario.name, str(asked.compile), str(asked.world_size), asked.parallel.name
