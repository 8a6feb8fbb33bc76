"""Resume a sweep: recognize its cells, keep the rows that are still valid, and say why the others are not.

A cell is recognized by its identity (`Job.run`), not by the words that ask for it, and keeps its name. A row
is valid if it is from this configuration, this code and this torch. So the rows of a sweep that was
interrupted and resumed are those of one that was not. A file that cannot be read or removed raises a
ConfigError.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpbench.config.errors import ConfigError, value_text
from dcpbench.config.groups import Rerun
from dcpbench.config.schema import Config
from dcpbench.config.text import counted, listed
from dcpbench.core.axes import AXES
from dcpbench.records import files, store
from dcpbench.records.row import Row
from dcpbench.records.row_reader import parse
from dcpbench.records.source import DCPBENCH, Source, changed_files, commits_text, recorded
from dcpbench.sweep.identity import identity_of
from dcpbench.sweep.job import Job, Run, attempts, code_digest
from dcpbench.sweep.manifest import Record

_Asked = tuple[Config, Sequence[str]]
"""The configuration of a cell, and its overrides."""
_NAMED = 3
"""The most keys by which a cell is named that a sweep does not have."""
_VERSIONS = {"torch_version": "torch", "load_torch_version": "torch of load_python"}
"""Columns that must not have changed, and their names."""


@dataclass
class Found:
    """The lines of a folder whose rows are valid, by the names of their cells; the others; the number of
    cells that run again by reason; whether the last line is torn; and how many rows belong to no cell."""

    standing: dict[str, store.Line]
    superseded: list[store.Line]
    reasons: Counter[str]
    torn: bool
    foreign: int = 0

    @property
    def done(self) -> dict[str, Row]:
        """The valid rows by the names of their cells."""
        return {name: line.row for name, line in self.standing.items() if line.row}

    def sentences(self, cells: int) -> list[str]:
        """Describe the valid rows and reruns of a sweep with this number of cells."""
        sentences = [f"resume: {len(self.standing)} of {cells} cells are done"]
        for why, number in self.reasons.items():
            sentences.append(f"resume: {counted(number, 'cell')} again: {why}")
        if self.foreign:
            sentences.append(f"resume: {counted(self.foreign, 'row')} of no cell of this sweep; moved away")
        if self.torn:
            sentences.append(f"resume: the last line of {store.RESULTS_JSONL} was torn and is removed")
        return sentences


def recognized(
    jobs: Sequence[Job], record: Record, config_of: Callable[[Sequence[str]], Config | None], asked: str
) -> list[Job]:
    """Return the jobs with the names that their cells have in the record of a sweep.

    Cells with equal identities differ only in how they run: each takes the name of the recorded one that
    differs least from it.

    Args:
        config_of: returns the decided configuration of a cell, given its overrides; None if they are wrong,
            such as a value in another `--config-dir`.
        asked: the key and the folder that ask for the sweep, for errors.

    Raises:
        ConfigError: the jobs are other cells than those of the record.
    """
    composed = {tuple(job.cell.overrides): job.config for job in jobs}
    found = {name: composed.get((*words,)) or config_of(words) for name, words in record.cells.items()}
    configs = {name: config for name, config in found.items() if config}
    here: defaultdict[Run, list[Job]] = defaultdict(list)
    there: defaultdict[Run, list[str]] = defaultdict(list)
    for job in jobs:
        here[job.run].append(job)
    for name, config in configs.items():
        there[identity_of(config).digest, config.repeat].append(name)
    if {run: len(equal) for run, equal in here.items()} != {run: len(names) for run, names in there.items()}:
        first = {run: (equal[0].config, equal[0].cell.overrides) for run, equal in here.items()}
        recorded = {run: (configs[names[0]], record.cells[names[0]]) for run, names in there.items()}
        counts = f"{counted(len(found), 'cell')} there, {len(jobs)} here"
        raise ConfigError(
            f"{asked}: is another matrix: {_difference(first, recorded)} ({counts}); pass all words about "
            "the cells of that sweep, or none, or name another folder"
        )
    if wrong := found.keys() - configs.keys():
        raise ConfigError(f"{asked}: is another matrix: these words give no cell {min(wrong)}")
    called: dict[str, str] = {}
    for run, names in there.items():
        for name in names:
            apart = [_distance(job.config, configs[name]) for job in here[run]]
            called[here[run].pop(apart.index(min(apart))).cell.name] = name
    return [job.called(called[job.cell.name]) for job in jobs]


def look(folder: Path, lines: Iterable[store.Line], jobs: Iterable[Job], rerun: Rerun) -> Found:
    """Find out which lines of a sweep's folder are valid rows of these jobs; write nothing."""
    by_name = {job.cell.name: job for job in jobs}
    by_run: defaultdict[Run, list[Job]] = defaultdict(list)
    for job in by_name.values():
        by_run[job.run].append(job)

    def job_of(row: Row) -> Job | None:
        equal = by_run.get((str(row.config_digest), row.repeat or 0), [])
        named = by_name.get(row.cell)
        return named if named in equal or not equal else equal[0]

    code = recorded(_environment(folder))
    found = Found({}, [], Counter(), torn=False)
    try:
        for line in lines:
            if line.torn:
                found.torn = True
                continue
            mine = job_of(line.row) if line.row else None
            if line.row and mine:
                why = _why_again(mine, line.row, rerun, code)
            else:
                why = None if line.row else "its line is not a row of this version"
                found.foreign += bool(line.row)
            found.reasons.update([why] if why else [])
            if mine and not why:
                earlier = found.standing.pop(mine.cell.name, None)
                found.superseded += [earlier] if earlier else []
                found.standing[mine.cell.name] = line
            else:
                found.superseded.append(line)
    except store.ResultsError as error:
        raise ConfigError(f"resume={folder}: {error}") from None
    return found


def take_up(folder: Path, jobs: Iterable[Job], found: Found, roots: Iterable[str] = ()) -> list[str]:
    """Keep only the valid rows, and remove all files of the cells that run again, also those below each
    `storage.root` of the sweep. Return a sentence for each folder that could not be removed."""
    files.remove_temporary(folder)
    if found.superseded or found.torn:
        store.keep_lines(folder, found.standing.values(), found.superseded)
    done = found.done
    store.keep_beside(folder, {row.cell for row in done.values()})
    left = []
    for job in jobs:
        if job.cell.name not in done:
            left.append(_clear(job.cell.folder, within=folder))
            for place in (Path(root) / folder.name for root in roots):
                left += [_clear(own, within=place) for own in attempts(place / job.cell.name)]
    return [*filter(None, left)]


def earlier_machines(folder: Path, now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the earlier descriptions of the machine, as far as they differ from `now`, the latest last."""
    before = _environment(folder)
    earlier = before.pop("earlier", [])
    other = {key: value for key, value in before.items() if key in now and value != now[key]}
    return [*earlier, other] if other else earlier


def _environment(folder: Path) -> dict[str, Any]:
    """Return the description of the machine in a sweep's folder; empty if there is none."""
    try:
        before = parse(files.read(folder / store.ENVIRONMENT_JSON))
        return {**before, "earlier": list(before.get("earlier", []))}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"resume={folder}: {store.ENVIRONMENT_JSON} cannot be read: {error}") from None


def _clear(folder: Path, within: Path) -> str | None:
    """Remove a folder if it exists, or return a sentence; refuse one that is not within the other."""
    if within.resolve() not in folder.resolve().parents:
        raise ConfigError(f"{folder}: is not in {within}, and is not removed")
    return files.remove(folder, within)


def _distance(one: Config, other: Config) -> int:
    """Return the number of keys in which two configurations differ."""
    return sum(value != getattr(other, key) for key, value in vars(one).items())


def _difference(here: Mapping[Run, _Asked], there: Mapping[Run, _Asked]) -> str:
    """Name a cell that only these words or only the sweep has, if there is one."""
    for mine, others, says in ((here, there, "it has"), (there, here, "these words give")):
        for run in mine:
            if run not in others:
                return f"{says} no cell with {_told_apart(mine[run], [*others.values()])}"
    return "it has cells that differ only in how they run, and these words give another number of them"


def _told_apart(cell: _Asked, others: Sequence[_Asked]) -> str:
    """Return the values of a cell that none of the others has: those of its overrides, else of its axes, else
    of other keys. If only their combination is new, return values in which cells differ."""
    mine, *theirs = ({**identity_of(one).values, "repeat": one.repeat} for one, _ in (cell, *others))
    axes = {spec.key: name for name, spec in AXES.items()}
    keys = dict.fromkeys([*axes, *mine, *(key for values in theirs for key in values)])
    found = {key: {values.get(key) for values in theirs} for key in keys}
    new = [key for key in keys if mine.get(key) not in found[key]]
    new = new or [key for key in keys if len(found[key]) > 1]
    typed = {word.lstrip("+~").partition("=")[0] for word in cell[1]}
    shown = [key for key in new if axes.get(key, key) in typed] or [key for key in new if key in axes] or new
    return " ".join(f"{axes.get(key, key)}={value_text(mine.get(key))}" for key in shown[:_NAMED])


def _why_again(job: Job, row: Row, rerun: Rerun, code: Mapping[str, Source]) -> str | None:
    """Return why a cell has to run again, or None if its row is valid.

    Args:
        code: that of the sweep, as far as it is recorded.
    """
    now = job.columns
    for version, what in _VERSIONS.items():
        if row[version] != (is_now := now.get(version)):
            return f"{what} was {row[version]} and is {is_now}"
    if row.code_digest not in (now["code_digest"], code_digest(job.config, hooks=False)):
        return _changed_code(job, row, code)
    if any(row[column] != now[column] for column in ("config_digest", "expected_digest")):
        return "the configuration, or the list of known failures, has changed"
    if row.status == "skip" and row["cell_s"] is None and row.reason != job.skip:
        return "the reason to skip it no longer applies"
    if rerun is Rerun.failed and not row.is_ok:
        return "its row is not ok (rerun=failed)"
    return None


def _changed_code(job: Job, row: Row, code: Mapping[str, Source]) -> str:
    """Say which code of a cell has changed since its row was written."""
    sentences = []
    for package in sorted(job.code.keys() & code.keys(), key=lambda name: (name == DCPBENCH, name)):
        was, now = code[package], job.code[package]
        if names := changed_files(package, [was], [now]):
            what = "dcpbench's source" if package == DCPBENCH else f"the source of {listed(names)}"
            sentences.append(f"{what} has changed{commits_text(was.commit, now.commit)}")
    if sentences:
        return ", and ".join(sentences)
    # An earlier version of dcpbench has recorded no code but its commit.
    own, commit = sorted(job.code.keys() - {DCPBENCH}), row.dcpbench_commit
    commits = commits_text(commit, job.code[DCPBENCH].commit)
    if own and commit and not commits:
        return f"the source of {listed(own)} has changed"
    what = f"the source of {listed(own)}, or that of dcpbench," if own else "dcpbench's source"
    return f"{what} has changed{commits}"
