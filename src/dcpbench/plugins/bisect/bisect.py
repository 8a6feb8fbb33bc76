"""`dcpbench bisect`: find the first torch, between a good and a bad one, with another result of a cell.

A version is bad if the worst status of the cell's runs differs from that with the good version, or if the
median of a metric exceeds that of the good version by a given ratio. Versions after a bad one are assumed to
be bad too. A version in which the cell cannot run is reported and skipped.
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
from dcpbench.config.overrides import quoted
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
class _Cell:
    """A cell: its overrides, and the folder in which its modules are found."""

    words: list[str]
    cwd: Path


@dataclass(frozen=True)
class _Attempt:
    """The result of a cell with a version: the rows of its runs, or why there are none."""

    version: Version
    python: str
    rows: Sequence[Row] = ()
    problem: str | None = None

    @property
    def worst(self) -> Row:
        """The run with the worst status."""
        return min(self.rows, key=lambda row: SEVERITY[row.status])

    def median(self, metric: str) -> float | None:
        """Return the median of a metric over the runs; None if no run has measured it."""
        values = [value for row in self.rows if (value := row.metrics.get(metric)) is not None]
        return statistics.median(values) if values else None


@dataclass
class _Bisection:
    """Runs a cell with versions. A `metric` that is `slower` by this ratio is bad too."""

    cell: _Cell
    pythons: dict[Version, str]
    metric: str | None
    slower: float
    repeats: int
    folder: Path
    tried: list[_Attempt] = field(default_factory=list)
    skipped: dict[Version, str] = field(default_factory=dict)

    def attempt(self, version: Version) -> _Attempt | None:
        """Run the cell with a version; return None if it cannot run."""
        found = self._attempt(version)
        if found.problem:
            self.skipped[version] = found.problem
            _report(f"torch {version}: not tried: {found.problem}")
            return None
        self.tried.append(found)
        _report(f"torch {version}: {found.worst.status}")
        return found

    def _attempt(self, version: Version) -> _Attempt:
        python = self.pythons.get(version)
        if python is None:
            return _Attempt(version, "-", problem="it has no environment (--python)")
        folder = self.folder / str(version)
        place = quoted(str(folder))
        words = [*self.cell.words, f"repeats={self.repeats}", f"hydra.sweep.dir={place}"]
        folder.mkdir(parents=True)
        log = self.folder / f"{version}-{_LOG}"
        with tempfile.TemporaryDirectory(prefix="dcpbench-") as own, log.open("wb") as written:
            status = subprocess.run(
                [_from_anywhere(python), "-m", "dcpbench", "run", *words],
                stdout=written,
                stderr=subprocess.STDOUT,
                cwd=self.cell.cwd,
                env=environment_of(Path(own)),
                check=False,
            ).returncode
        rows = [*stored_rows(folder)]
        if len({row.config_digest for row in rows}) > 1:
            raise ConfigError(f"{' '.join(self.cell.words)}: names several cells; name one")
        runs = manifest.read(folder, "").cells if rows else []
        if not rows or {row.cell for row in rows} != {*runs}:
            *_, why = log.read_text(errors="replace").strip().splitlines() or ["it printed no output"]
            after = f" after {len(rows)} of {counted(len(runs), 'run')}" if rows else ""
            return _Attempt(version, python, problem=f"it ended with {status}{after}: {why}")
        return _Attempt(version, python, rows)

    def why_bad(self, attempt: _Attempt) -> str | None:
        """Return why a version is worse than the first; None if it is not."""
        good = self.tried[0]
        worst = attempt.worst
        if worst.status != good.worst.status:
            reason = f": {short_reason(worst.flat())}" if worst.reason else ""
            return f"{good.worst.status} -> {worst.status}{reason}"
        if self.metric and (ratio := self.ratio(attempt)) is not None and ratio >= self.slower:
            return f"{self.metric} is {ratio:.2f} times that of {good.version}"
        return None

    def ratio(self, attempt: _Attempt) -> float | None:
        """Return the ratio of the median of the metric to that of the good version, if both exist."""
        if not self.metric:
            return None
        value, good = attempt.median(self.metric), self.tried[0].median(self.metric)
        return value / good if value is not None and good else None

    def table(self) -> Table:
        """Return a table of the results by version."""
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
    """Find the first bad version. Return the exit status, 1 if there is none.

    Raises:
        ConfigError: an argument is invalid.
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
    bisection = _Bisection(_cell_of(cell), pythons, metric, slower, repeats, folder)
    with standard_output():
        return _found(bisection, first, last, between)


def _found(bisection: _Bisection, first: Version, last: Version, between: list[Version]) -> int:
    good = bisection.attempt(first)
    high = bisection.attempt(last) if good else None
    if good is None or high is None:
        print(f"no result: the cell could not run with both {first} and {last}")
        return 1
    if not bisection.why_bad(high):
        print_table(bisection.table())
        print(f"no bad version found: {last} is as good as {first}")
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
    unknown = [str(one) for one in sorted(bisection.skipped) if low < one < high.version]
    earlier = f"; not tried before it: {', '.join(unknown)}" if unknown else ""
    print(f"first bad: {high.version} ({bisection.why_bad(high)}{earlier})")
    return 0


def _cell_of(words: Sequence[str]) -> _Cell:
    """Return the cell that these words name. A row is not signed, so it must agree with the signed record of
    its sweep, unless `trust=true` is among the words."""
    if "=" in words[0]:
        return _Cell([*words], Path.cwd())
    trusted, words = _TRUST in words, [word for word in words if word != _TRUST]
    folder = Path(words[0])
    rows = {row.cell: row for row in stored_rows(folder)}
    if not rows:
        raise ConfigError(f"{folder}: is neither key=value nor a sweep folder")
    if len(words) != 2 and len(rows) > 1:
        raise ConfigError(f"{folder}: name one of its {len(rows)} cells after it")
    name = words[1] if len(words) > 1 else next(iter(rows))
    if name not in rows:
        raise ConfigError(f"{folder}: has no cell {name}{did_you_mean(name, [*rows])}")
    row = rows[name]
    cell = _cell_in(row.cwd or ".", override_words(row.overrides), row.config_dir)
    if not trusted and cell != _signed(folder, name):
        raise ConfigError(
            f"bisect {folder}: the row of {name} differs from this user's {SWEEP_JSON}: it would run "
            f"`{shlex.join(cell.words)}` in {cell.cwd}; if you want that, add {_TRUST}"
        )
    return cell if cell.cwd.is_dir() else _Cell(cell.words, Path.cwd())


def _signed(folder: Path, name: str) -> _Cell | None:
    """Return the cell of that name according to the record of a sweep; None if the record does not have it.

    Raises:
        ConfigError: the record is not this user's.
    """
    if not (folder / SWEEP_JSON).exists():
        return None
    record = manifest.read(folder, "bisect ")
    record.refuse_foreign(folder, "bisect ")
    overrides = (record.overrides or {}).get(name)
    groups = reference.config_dir(record.arguments)
    return None if overrides is None else _cell_in(record.cwd, overrides, groups)


def _cell_in(cwd: str, overrides: Sequence[str], groups: str | Path | None) -> _Cell:
    """Return a cell whose overrides were typed in a folder, with the folder of custom groups, if any."""
    own = [word for word in overrides if not re.match(r"repeats?=", word)]
    return _Cell([*(["--config-dir", str(Path(cwd, groups).resolve())] if groups else []), *own], Path(cwd))


def _from_anywhere(python: str) -> str:
    """Return the path of an interpreter such that it is valid in every folder."""
    return os.path.abspath(python) if os.sep in python else python  # noqa: PTH100 - a link is another environment


def _environment(given: str) -> tuple[Version, str]:
    """Return the version and the interpreter of a `--python` argument."""
    name, _, path = given.partition("=")
    if not path:
        raise ConfigError(f"--python {given}: must be VERSION=PATH, for example 2.13.0=env/bin/python")
    version, has = _version(name, "--python"), versions_of(path, "--python").torch
    if Version(Version(has).public) != version:
        raise ConfigError(f"--python {given}: has torch {has}")
    return version, path


def _version(given: str, option: str) -> Version:
    try:
        return Version(given)
    except InvalidVersion:
        raise ConfigError(f"{option} {given}: is not a version such as 2.13.0") from None


def _report(sentence: str) -> None:
    Console(stderr=True).print(text_of(sentence), soft_wrap=True)
