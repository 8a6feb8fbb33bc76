"""Decide which rows of a resumed sweep are valid, and why the other cells run again.

A row is that of the cell with the same run, and valid if it is from this code, this torch and these known
failures. So the rows of a sweep that was interrupted and resumed are those of one that was not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpbench.code.sources import DCPBENCH, Source, changed_files, commits_text, recorded
from dcpbench.config.errors import value_text
from dcpbench.config.text import counted, listed
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import CellKey
from dcpbench.plan.plan import PlannedCell, code_digest
from dcpbench.records.row import Row, RunKey, dict_in
from dcpbench.records.store import RESULTS_JSONL, Line
from dcpbench.verdict.verdict import OUTSIDE

_VERSIONS = {"torch_version": "torch", "load_torch_version": "torch of load_python"}
"""Columns that must not have changed, and their names."""


@dataclass
class ValidRows:
    """The lines of a folder whose rows are valid, by run; the others; the number of cells that run again by
    reason; whether the last line is torn; and how many rows belong to no cell. A new folder has none."""

    lines: dict[RunKey, Line] = field(default_factory=dict)
    superseded: list[Line] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    torn: bool = False
    foreign: int = 0
    is_resumed: bool = False

    @property
    def rows(self) -> dict[RunKey, Row]:
        """The valid rows."""
        return {run: line.row for run, line in self.lines.items() if line.row}

    def sentences(self, cells: int) -> list[str]:
        """Describe the valid rows and reruns of a resumed sweep with this number of cells."""
        if not self.is_resumed:
            return []
        done = sum(row.retry_of is None for row in self.rows.values())
        sentences = [f"resume: {done} of {cells} cells are done"]
        for why, number in self.reasons.items():
            sentences.append(f"resume: {counted(number, 'cell')} again: {why}")
        if self.foreign:
            sentences.append(f"resume: {counted(self.foreign, 'row')} of no cell of this sweep; moved away")
        if self.torn:
            sentences.append(f"resume: the last line of {RESULTS_JSONL} was torn and is removed")
        return sentences


def valid_rows(
    lines: Iterable[Line], cells: Sequence[PlannedCell], rerun_failed: bool, environment: Mapping[str, Any]
) -> ValidRows:
    """Find out which lines of a sweep's folder are valid rows of these cells; write nothing.

    Args:
        environment: the description of the machine in the folder, which records the sweep's code.
    """
    by_run = {cell.run: cell for cell in cells}
    by_name = {cell.name: cell for cell in cells}
    code, valid = recorded(environment), ValidRows(is_resumed=True)
    for line in lines:
        if line.torn:
            valid.torn = True
            continue
        if line.row and line.row.retry_of is not None:  # as valid as the run before it, which it repeats
            is_valid = (line.row.config_digest, line.row.retry_of) in valid.lines
            valid.superseded += [] if is_valid else [line]
            valid.lines |= {line.row.run: line} if is_valid else {}
            continue
        # A row of no cell's run is of a cell whose configuration has changed, if one has its name.
        cell = (by_run.get(line.row.run) or by_name.get(line.row.cell)) if line.row else None
        if line.row and cell:
            why = _why_again(cell, line.row, rerun_failed, code)
        else:
            why = None if line.row else "its line is not a row of this version"
            valid.foreign += bool(line.row)
        valid.reasons.update([why] if why else [])
        if cell and not why:
            earlier = valid.lines.pop(cell.run, None)
            valid.superseded += [earlier] if earlier else []
            valid.lines[cell.run] = line
        else:
            valid.superseded.append(line)
    return valid


def _why_again(cell: PlannedCell, row: Row, rerun_failed: bool, code: Mapping[str, Source]) -> str | None:
    """Return why a cell has to run again, or None if its row is valid.

    Args:
        code: that of the sweep, as far as it is recorded.
    """
    now = cell.columns
    for version, what in _VERSIONS.items():
        if row[version] != (is_now := now.get(version)):
            return f"{what} was {row[version]} and is {is_now}"
    if row.code_digest not in (now["code_digest"], code_digest(cell.config, hooks=False)):
        return _changed_code(cell, code)
    if row.run != cell.run:
        return f"its configuration has changed{_changed_keys(cell, row)}"
    if row.expected_digest != now["expected_digest"]:
        return "its known failures, or what has to detect its fault, have changed"
    if row.status == "skip" and row["cell_s"] is None and row.reason != cell.skip:
        return "the reason to skip it no longer applies"
    if outside := dict_in(row.details).get(OUTSIDE):
        return f"it failed for a reason outside it ({outside})"
    if rerun_failed and not row.is_ok:
        return "its row is not ok (--rerun-failed)"
    return None


def _changed_keys(cell: PlannedCell, row: Row) -> str:
    """Return the keys of a cell that have changed since its row was written, with both values."""
    axes = {spec.key: name for name, spec in AXES.items()}
    changed = CellKey(row.config).differences(cell.key)
    # Another value of a group has other settings.
    names = {key for key in changed if key.endswith(".name")}
    renamed = tuple(key.removesuffix("name") for key in names)
    changed = {key: both for key, both in changed.items() if key in names or not key.startswith(renamed)}
    if row.repeat != cell.config.repeat:
        changed["repeat"] = row.repeat, cell.config.repeat
    sentences = [
        f"{axes.get(key, key)} was {value_text(was)} and is {value_text(is_now)}"
        for key, (was, is_now) in changed.items()
    ]
    return f": {listed(sentences)}" if sentences else ""


def _changed_code(cell: PlannedCell, code: Mapping[str, Source]) -> str:
    """Say which code of a cell has changed since its row was written."""
    sentences = []
    for package in sorted(cell.code.keys() & code.keys(), key=lambda name: (name == DCPBENCH, name)):
        was, now = code[package], cell.code[package]
        if names := changed_files(package, [was], [now]):
            what = "dcpbench's source" if package == DCPBENCH else f"the source of {listed(names)}"
            sentences.append(f"{what} has changed{commits_text(was.commit, now.commit)}")
    return ", and ".join(sentences) or "its code has changed"
