"""What a sweep has to do, decided before it starts: for each cell whether it runs, and on what."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.executors.machine import Machine
from dcpbench.executors.rank_group import GroupKind
from dcpbench.records.store import Row
from dcpbench.sweep.folder.claim import git_commit
from dcpbench.sweep.plan import known_failures, validity
from dcpbench.sweep.plan.cells import SweepCell
from dcpbench.sweep.plan.identity import code_digest, config_digest
from dcpbench.sweep.run import row_builder


@dataclass(frozen=True)
class Job:
    """A cell with its device and world size decided, and why it cannot run if it cannot; `begun` is
    its row before it runs."""

    cell: SweepCell
    config: Config
    skip: str | None
    known_failures: list[known_failures.KnownFailure]
    begun: Row

    @property
    def kind(self) -> GroupKind:
        """The ranks that it runs on."""
        config = self.config
        assert isinstance(config.world_size, int)
        return GroupKind(config.world_size, config.device.value, config.scenario.process_group)

    def checkpoints(self, sweep: Path) -> Path:
        """Where its checkpoints go, in a sweep of that folder."""
        root = self.config.storage.root
        return Path(root) / sweep.name / self.cell.name if root else self.cell.folder / "checkpoints"


def plan(cells: Sequence[SweepCell], machine: Machine, conf: Path) -> list[Job]:
    """Decide for every cell of a sweep whether and on what it runs; nothing is written.

    Raises:
        ConfigError: one of the cells is wrong; its message names the cell if there are several.
    """
    lists: dict[Path, list[known_failures.KnownFailure]] = {}
    jobs: list[Job] = []
    commit, version = git_commit(), str(machine.description["torch"])
    for cell in cells:
        try:
            config = validity.resolve(cell.config, machine)
            skip = validity.why_skip(cell.config, config)
            path = Path(cell.config.known_failures or conf / "known_failures.yaml")
            if path not in lists:
                lists[path] = known_failures.read(path)
        except ConfigError as error:
            where = f" (in {cell.name})" if len(cells) > 1 else ""
            raise ConfigError(f"{error}{where}") from None
        row = row_builder.begun(cell, config, version, commit)
        row.config_digest = config_digest(config, row, lists[path])
        row.code_digest = code_digest(config)
        jobs.append(Job(cell, config, skip, lists[path], row))
    _refuse_shared_folders(cells)
    return jobs


def _refuse_shared_folders(cells: Sequence[SweepCell]) -> None:
    taken: dict[Path, str] = {}
    for cell in cells:
        if (other := taken.setdefault(cell.folder, cell.name)) != cell.name:
            raise ConfigError(f"hydra.sweep.subdir: {other} and {cell.name} would share {cell.folder}")
