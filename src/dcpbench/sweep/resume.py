"""What of a sweep is done already: the rows that stand, and why the others do not.

A row stands if it is of this configuration, this code and this torch, so that the rows of a sweep that
was broken off and resumed are those of one that was not.
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
from dcpbench.sweep.manifest import Record

_VERSIONS = {"torch_version": "torch", "load_torch_version": "torch of load_python"}
"""Columns that have to be as they were, and what they are of."""


@dataclass
class Found:
    """The lines of a folder's rows that stand and of those that do not, why (each reason with the
    number of its cells), and whether the last line is torn."""

    standing: list[store.Line]
    superseded: list[store.Line]
    reasons: Counter[str]
    torn: bool

    @property
    def done(self) -> dict[str, Row]:
        """The rows that stand, by cell."""
        return {line.row.cell: line.row for line in self.standing if line.row}

    def sentences(self, cells: int) -> list[str]:
        """What there is to say about it, a line each, for a sweep of so many cells."""
        sentences = [f"resume: {len(self.standing)} of {cells} cells are done"]
        for why, number in self.reasons.items():
            sentences.append(f"resume: {counted(number, 'cell')} again: {why}")
        if self.torn:
            sentences.append(f"resume: the last line of {store.RESULTS_JSONL} was broken off and is cut off")
        return sentences


def same_matrix(folder: Path, record: Record, here: set[str], key: str = "resume") -> None:
    """Refuse to go on in the folder, which `key` of the configuration asks for, of a sweep of other cells.

    Raises:
        ConfigError: naming a cell that only one of the two has.
    """
    there = set(record.cells)
    for only, where in ((here - there, "it has no cell"), (there - here, "nobody asks now for its cell")):
        if only:
            counts = f"({len(there)} cells there, {len(here)} here)"
            raise ConfigError(f"{key}={folder}: is another matrix: {where} {min(only)} {counts}")


def look(folder: Path, lines: Iterable[store.Line], jobs: Iterable[Job], rerun: Rerun) -> Found:
    """What the lines of a sweep's folder hold of these cells; writes nothing.

    Raises:
        ConfigError: its rows cannot be read.
    """
    by_name = {job.cell.name: job for job in jobs}
    found = Found([], [], Counter(), torn=False)
    try:
        for line in lines:
            if line.torn:
                found.torn = True
                continue
            why: str | None = "what stands in its line is no row of this version"
            if line.row and line.row.cell in by_name:
                why = _why_again(by_name[line.row.cell], line.row, rerun)
            found.reasons.update([why] if why else [])
            (found.superseded if why else found.standing).append(line)
    except store.ResultsError as error:
        raise ConfigError(f"resume={folder}: {error}") from None
    return found


def take_up(folder: Path, jobs: Iterable[Job], found: Found) -> None:
    """Leave only what stands: the other rows go, and so does all that their cells left behind.

    Raises:
        ConfigError: something cannot be removed.
    """
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
    """What was written down of the machine before, as far as it differs from `now`, the latest last.

    Raises:
        ConfigError: it cannot be read.
    """
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
    """Remove a folder, if there is one; refuses one that does not lie within the other."""
    if within.resolve() not in folder.resolve().parents:
        raise ConfigError(f"{folder}: does not lie in {within}, and is not removed")
    if sentence := files.remove(folder, within):
        raise ConfigError(f"{sentence} (of a cell that broke off)")


def _why_again(job: Job, row: Row, rerun: Rerun) -> str | None:
    now = job.columns
    if row.schema_version != SCHEMA_VERSION:
        return f"its row is of schema version {row.schema_version}, and rows are of {SCHEMA_VERSION} now"
    for version, what in _VERSIONS.items():
        if row[version] != (is_now := now.get(version)):
            return f"{what} was {row[version]} and is {is_now}"
    if row.code_digest != now["code_digest"]:
        versions = ((row.git_commit, row.code_digest), (now["git_commit"], now["code_digest"]))
        was, code = (f"{commit or 'no commit'}, digest {digest}" for commit, digest in versions)
        return f"the code has changed ({was}, now {code})"
    if any(row[column] != now[column] for column in ("config_digest", "expected_digest")):
        return "the configuration, or what is known to fail, has changed"
    if row.status == "skip" and row["cell_s"] is None and row.reason != job.skip:
        return "what made it a skip holds no longer"
    if rerun is Rerun.failed and not row.is_ok:
        return "it did not come out as it should (rerun=failed)"
    return None
