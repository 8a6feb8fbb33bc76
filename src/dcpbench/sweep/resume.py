"""Resume a sweep: keep the rows that are still valid, and say why the others are not.

A row is valid if it is from this configuration, this code and this torch. So the rows of a sweep that was
interrupted and resumed are those of one that was not. A file that cannot be read or removed raises a
ConfigError.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Rerun
from dcpbench.config.text import counted
from dcpbench.records import files, store
from dcpbench.records.row import SCHEMA_VERSION, Row
from dcpbench.records.row_reader import parse
from dcpbench.sweep.job import Job

_VERSIONS = {"torch_version": "torch", "load_torch_version": "torch of load_python"}
"""Columns that must not have changed, and their names."""


@dataclass
class Found:
    """The lines of a folder whose rows are valid, the others, the number of cells that run again by reason,
    and whether the last line is torn."""

    standing: list[store.Line]
    superseded: list[store.Line]
    reasons: Counter[str]
    torn: bool

    @property
    def done(self) -> dict[str, Row]:
        """The valid rows by cell."""
        return {line.row.cell: line.row for line in self.standing if line.row}

    def sentences(self, cells: int) -> list[str]:
        """Describe the valid rows and reruns of a sweep with this number of cells."""
        sentences = [f"resume: {len(self.standing)} of {cells} cells are done"]
        for why, number in self.reasons.items():
            sentences.append(f"resume: {counted(number, 'cell')} again: {why}")
        if self.torn:
            sentences.append(f"resume: the last line of {store.RESULTS_JSONL} was torn and is removed")
        return sentences


def look(folder: Path, lines: Iterable[store.Line], jobs: Iterable[Job], rerun: Rerun) -> Found:
    """Find out which lines of a sweep's folder are valid rows of these jobs; write nothing."""
    by_name = {job.cell.name: job for job in jobs}
    found = Found([], [], Counter(), torn=False)
    try:
        for line in lines:
            if line.torn:
                found.torn = True
                continue
            why: str | None = "its line is not a row of this version"
            if line.row and line.row.cell in by_name:
                why = _why_again(by_name[line.row.cell], line.row, rerun)
            found.reasons.update([why] if why else [])
            (found.superseded if why else found.standing).append(line)
    except store.ResultsError as error:
        raise ConfigError(f"resume={folder}: {error}") from None
    return found


def take_up(folder: Path, jobs: Iterable[Job], found: Found) -> None:
    """Keep only the valid rows, and remove all files of the cells that run again."""
    files.remove_temporary(folder)
    if found.superseded or found.torn:
        store.keep_lines(folder, found.standing, found.superseded)
    done = found.done
    store.keep_beside(folder, done)
    for job in jobs:
        if job.cell.name not in done:
            _clear(job.cell.folder, within=folder)
            if root := job.config.storage.root:
                for checkpoints in job.checkpoints(folder):
                    _clear(checkpoints, within=Path(root) / folder.name)


def earlier_machines(folder: Path, now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the earlier descriptions of the machine, as far as they differ from `now`, the latest last."""
    try:
        before, _ = parse(files.read(folder / store.ENVIRONMENT_JSON))
        earlier = list(before.pop("earlier", []))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"resume={folder}: {store.ENVIRONMENT_JSON} cannot be read: {error}") from None
    other = {key: value for key, value in before.items() if key in now and value != now[key]}
    return [*earlier, other] if other else earlier


def _clear(folder: Path, within: Path) -> None:
    """Remove a folder if it exists; refuse one that is not within the other."""
    if within.resolve() not in folder.resolve().parents:
        raise ConfigError(f"{folder}: is not in {within}, and is not removed")
    if sentence := files.remove(folder, within):
        raise ConfigError(f"{sentence} (of a cell that was interrupted)")


def _why_again(job: Job, row: Row, rerun: Rerun) -> str | None:
    """Return why a cell has to run again, or None if its row is valid."""
    now = job.columns
    if row.schema_version != SCHEMA_VERSION:
        return f"its row has schema version {row.schema_version}; the current one is {SCHEMA_VERSION}"
    for version, what in _VERSIONS.items():
        if row[version] != (is_now := now.get(version)):
            return f"{what} was {row[version]} and is {is_now}"
    if row.code_digest != now["code_digest"]:
        return f"the code has changed (it was at commit {row.git_commit}, now {now['git_commit']})"
    if any(row[column] != now[column] for column in ("config_digest", "expected_digest")):
        return "the configuration, or the list of known failures, has changed"
    if row.status == "skip" and row["cell_s"] is None and row.reason != job.skip:
        return "the reason to skip it no longer applies"
    if rerun is Rerun.failed and not row.is_ok:
        return "its row is not ok (rerun=failed)"
    return None
