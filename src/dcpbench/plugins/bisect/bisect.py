"""`dcpbench bisect`: the first torch, from a good one to a bad one, in which a cell comes to something else.

A version is bad where the worst status of the cell's runs is not that under the good one, or the median of a
metric is that many times as much. As in every bisection, what is bad is taken to stay so. A version that
cannot be tried is passed over, and told.
"""

import datetime
import os
import re
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table

from dcpbench.analysis.cell_identity import override_words
from dcpbench.cli import reference
from dcpbench.config.errors import ConfigError
from dcpbench.config.text import counted, did_you_mean
from dcpbench.core.statuses import SEVERITY
from dcpbench.executors.interpreters import environment_of, versions_of
from dcpbench.records.row import Row
from dcpbench.records.short_reason import short_reason
from dcpbench.records.store import SWEEP_JSON, stored_rows
from dcpbench.report.labels import quantity
from dcpbench.report.styles import print_table, standard_output, style_of, text_of
from dcpbench.sweep import manifest

_LOG = "dcpbench.log"
_TRUST = "trust=true"


@dataclass(frozen=True)
class _Asked:
    """A cell: the words that ask for it, and the folder in which its modules are found."""

    words: list[str]
    cwd: Path


@dataclass(frozen=True)
class _Tried:
    """What a cell came to under a version: the rows of its runs, or why there are none."""

    version: Version
    python: str
    rows: Sequence[Row] = ()
    problem: str | None = None

    @property
    def worst(self) -> Row:
        """The run with the worst status."""
        return min(self.rows, key=lambda row: SEVERITY[row.status])

    def median(self, metric: str) -> float | None:
        """Of its runs; None where none measured it."""
        values = [value for row in self.rows if (value := row.metrics.get(metric)) is not None]
        return statistics.median(values) if values else None


@dataclass
class _Bisection:
    """Tries versions; `metric` from this ratio on is bad too, `passed_over` are those that were not tried."""

    asked: _Asked
    pythons: dict[Version, str]
    metric: str | None
    slower: float
    repeats: int
    folder: Path
    tried: list[_Tried] = field(default_factory=list)
    passed_over: dict[Version, str] = field(default_factory=dict)

    def attempt(self, version: Version) -> _Tried | None:
        """The cell under a version; None where that cannot be tried."""
        found = self._attempt(version)
        if found.problem:
            self.passed_over[version] = found.problem
            _tell(f"torch {version}: not tried: {found.problem}")
            return None
        self.tried.append(found)
        _tell(f"torch {version}: {found.worst.status}")
        return found

    def _attempt(self, version: Version) -> _Tried:
        python = self.pythons.get(version)
        if python is None:
            return _Tried(version, "-", problem="it has no environment (--python)")
        folder = self.folder / str(version)
        place = manifest.quoted(str(folder))
        words = [*self.asked.words, f"repeats={self.repeats}", f"hydra.sweep.dir={place}"]
        folder.mkdir(parents=True)
        log = self.folder / f"{version}-{_LOG}"
        with tempfile.TemporaryDirectory(prefix="dcpbench-") as own, log.open("wb") as written:
            status = subprocess.run(
                [_from_anywhere(python), "-m", "dcpbench", "run", *words],
                stdout=written,
                stderr=subprocess.STDOUT,
                cwd=self.asked.cwd,
                env=environment_of(Path(own)),
                check=False,
            ).returncode
        rows = [*stored_rows(folder)]
        if len({row.config_digest for row in rows}) > 1:
            raise ConfigError(f"{' '.join(self.asked.words)}: is several cells; name one")
        runs = manifest.read(folder, "").cells if rows else []
        if not rows or {row.cell for row in rows} != {*runs}:
            *_, why = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            after = f" after {len(rows)} of {counted(len(runs), 'run')}" if rows else ""
            return _Tried(version, python, problem=f"it ended with {status}{after}: {why}")
        return _Tried(version, python, rows)

    def why_bad(self, one: _Tried) -> str | None:
        """Why a version is not as the first that was tried; None where it is."""
        good = self.tried[0]
        if one.worst.status != good.worst.status:
            reason = f": {short_reason(one.worst.flat())}" if one.worst.reason else ""
            return f"{good.worst.status} -> {one.worst.status}{reason}"
        if self.metric and (ratio := self.ratio(one)) is not None and ratio >= self.slower:
            return f"{self.metric} is {ratio:.2f} times that of {good.version}"
        return None

    def ratio(self, one: _Tried) -> float | None:
        """The median of the metric to that under the good version, if there are both."""
        if not self.metric:
            return None
        value, good = one.median(self.metric), self.tried[0].median(self.metric)
        return value / good if value is not None and good else None

    def table(self) -> Table:
        """What was tried, by version."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("torch", "status", *([self.metric, "ratio"] if self.metric else []), "", "interpreter"):
            table.add_column(name)
        for one in sorted(self.tried, key=lambda one: one.version):
            value, ratio = one.median(self.metric) if self.metric else None, self.ratio(one)
            costs = ["-" if value is None else quantity(self.metric or "", value)]
            costs.append("-" if ratio is None else f"{ratio:.2f}")
            bad = "bad" if self.why_bad(one) else "good"
            status = text_of(one.worst.status, style_of(one.worst.status))
            cells = [*(costs if self.metric else []), bad, one.python]
            table.add_row(text_of(one.worst.torch_version or ""), status, *map(text_of, cells))
        return table


def main(
    cell: Sequence[str],
    good: str,
    bad: str,
    python: Sequence[str],
    metric: str | None = None,
    slower: float = 1.2,
    repeats: int = 1,
    output: Path | None = None,
) -> int:
    """Find the first bad version; 1 if there is none.

    Raises:
        ConfigError: what was asked for is wrong.
    """
    first, last = _version(good, "--good"), _version(bad, "--bad")
    if first >= last:
        raise ConfigError(f"--good {good}: must be an earlier version than --bad {bad}")
    pythons = dict(map(_environment, python))
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = (output or Path("outputs") / f"bisect-{now}").resolve()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"-o {folder}: is not empty; choose a folder that is new or empty")
    between = sorted(version for version in pythons if first < version < last)
    bisection = _Bisection(_asked(cell), pythons, metric, slower, repeats, folder)
    with standard_output():
        return _found(bisection, first, last, between)


def _found(bisection: _Bisection, first: Version, last: Version, between: list[Version]) -> int:
    good = bisection.attempt(first)
    high = bisection.attempt(last) if good else None
    if good is None or high is None:
        print(f"nothing to tell: {first} and {last} could not both be tried")
        return 1
    if not bisection.why_bad(high):
        print_table(bisection.table())
        print(f"nothing found: {last} is as good as {first}")
        return 1
    while between:
        middle = between.pop(len(between) // 2)
        if (one := bisection.attempt(middle)) is None:
            continue
        is_bad = bisection.why_bad(one) is not None
        high = one if is_bad else high
        between = [version for version in between if (version < middle) is is_bad]
    print_table(bisection.table())
    low = max(one.version for one in bisection.tried if one.version < high.version)
    unknown = [str(one) for one in sorted(bisection.passed_over) if low < one < high.version]
    earlier = f"; not tried before it: {', '.join(unknown)}" if unknown else ""
    print(f"first bad: {high.version} ({bisection.why_bad(high)}{earlier})")
    return 0


def _asked(words: Sequence[str]) -> _Asked:
    """The cell that these words name. The signed record of a sweep says what runs: a row, which is unsigned,
    can name something else only where `trust=true` is among the words."""
    if "=" in words[0]:
        return _Asked([*words], Path.cwd())
    trusted, words = _TRUST in words, [word for word in words if word != _TRUST]
    folder = Path(words[0])
    rows = {row.cell: row for row in stored_rows(folder)}
    if not rows:
        raise ConfigError(f"{folder}: is neither key=value nor the folder of a sweep")
    if len(words) != 2 and len(rows) > 1:
        raise ConfigError(f"{folder}: name one of its {len(rows)} cells after it")
    name = words[1] if len(words) > 1 else next(iter(rows))
    if name not in rows:
        raise ConfigError(f"{folder}: has no cell {name}{did_you_mean(name, [*rows])}")
    row = rows[name]
    asked = _asked_in(row.cwd or ".", override_words(row.overrides), row.config_dir)
    if not trusted and asked != _signed(folder, name):
        raise ConfigError(
            f"bisect {folder}: the row of {name} is not what this user's {SWEEP_JSON} says: it would run "
            f"`{shlex.join(asked.words)}` in {asked.cwd}; if you want that, add {_TRUST}"
        )
    return asked if asked.cwd.is_dir() else _Asked(asked.words, Path.cwd())


def _signed(folder: Path, name: str) -> _Asked | None:
    """The cell of that name as a sweep's record has it; None if none of this user's has it.

    Raises:
        ConfigError: the record is not this user's.
    """
    if not (folder / SWEEP_JSON).exists():
        return None
    record = manifest.read(folder, "bisect ")
    record.refuse_foreign(folder, "bisect ")
    overrides = (record.overrides or {}).get(name)
    groups = reference.config_dir(record.arguments)
    return None if overrides is None else _asked_in(record.cwd, overrides, groups)


def _asked_in(cwd: str, overrides: Sequence[str], groups: str | Path | None) -> _Asked:
    """A cell whose words were typed in a folder, with the user's own groups in another, if there are any."""
    own = [word for word in overrides if not re.match(r"repeats?=", word)]
    return _Asked([*(["--config-dir", str(Path(cwd, groups).resolve())] if groups else []), *own], Path(cwd))


def _from_anywhere(python: str) -> str:
    """An interpreter that may be named by a path relative to the current folder."""
    return os.path.abspath(python) if os.sep in python else python  # noqa: PTH100 - a link to it is another


def _environment(given: str) -> tuple[Version, str]:
    """The version and the interpreter that `--python` names."""
    name, _, path = given.partition("=")
    if not path:
        raise ConfigError(f"--python {given}: must be VERSION=PATH, as 2.13.0=env/bin/python")
    version, has = _version(name, "--python"), versions_of(path, "--python").torch
    if Version(Version(has).public) != version:
        raise ConfigError(f"--python {given}: has torch {has}")
    return version, path


def _version(given: str, option: str) -> Version:
    try:
        return Version(given)
    except InvalidVersion:
        raise ConfigError(f"{option} {given}: is no version, as 2.13.0") from None


def _tell(sentence: str) -> None:
    Console(stderr=True).print(text_of(sentence), soft_wrap=True)
