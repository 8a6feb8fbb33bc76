"""The public interface, for tests and notebooks. Other modules may change in any version.

    from dcpbench import api

    api.check("model.py::build", parallel="fsdp2", world_size=2, device="cpu").raise_if_failed()

Importing it imports neither torch nor pandas. Classes that need torch are imported on first use.
"""

import os
import re
import secrets
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib import import_module
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import (
    ExecutorConfig,
    Expect,
    FaultConfig,
    ParallelConfig,
    SaveConfig,
    ScenarioConfig,
    StageConfig,
    StorageConfig,
)
from dcpbench.config.overrides import override, overrides
from dcpbench.config.schema import Config
from dcpbench.config.text import counted, visible
from dcpbench.core.axes import AXES, AxisSpec
from dcpbench.core.checks import CheckSpec
from dcpbench.core.defects import Defect
from dcpbench.core.metrics import MetricSpec
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.plugins import CommandSpec, Plugin, TextSpec, load_plugins, plugins
from dcpbench.core.rank_report import Compared, Skip
from dcpbench.executors.base import Engine, Executor
from dcpbench.records.row import WRONG_CONFIGURATION, exit_status
from dcpbench.records.store import ResultsError, read_rows

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.analysis.frame import Sweeps
    from dcpbench.cell.cell import Cell
    from dcpbench.checkpointers.base import Checkpointer, Ranks
    from dcpbench.executors.agent import Agent
    from dcpbench.runs.own_trainer import Trainer
    from dcpbench.workloads.components import Component
    from dcpbench.workloads.workload import Workload

_OF_RANKS = {
    "Cell": "dcpbench.cell.cell",
    "Checkpointer": "dcpbench.checkpointers.base",
    "Component": "dcpbench.workloads.components",
    "Ranks": "dcpbench.checkpointers.base",
    "Trainer": "dcpbench.runs.own_trainer",
    "Workload": "dcpbench.workloads.workload",
}
"""The module of each class that needs torch."""
# fmt: off
__all__ = [
    "AxisSpec", "Cell", "CellsFailedError", "CheckSpec", "Checkpointer", "CommandSpec", "Compared",
    "Component", "Config", "ConfigError", "Defect", "Engine", "Executor", "ExecutorConfig", "Expect",
    "FaultConfig", "MetricSpec", "Mismatch", "ParallelConfig", "Plugin", "Problem", "Ranks", "Result",
    "SaveConfig", "ScenarioConfig", "Skip", "StageConfig", "StorageConfig", "TextSpec", "Trainer", "Workload",
    "audit", "check", "engine", "read_sweep", "script", "sweep",
]
# fmt: on

_MOST_CELLS = 20
"""The most cells that an exception names."""
_MESSAGE = re.compile(r"^dcpbench[ \w]*: ")
"""The start of a line in which the driver warns, or says why it ended; other lines show its progress."""
__tracebackhide__ = True
"""A failing test shows its own line and the reason: pytest leaves out the frames of this module."""

_KEPT: "ContextVar[Agent | None]" = ContextVar("kept", default=None)
_F = TypeVar("_F", bound=Callable[..., Any])


def _without_frames(function: _F) -> _F:
    """Decorate a function: its errors that explain themselves have no frames of dcpbench."""

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True  # notebooks look for it here
        try:
            return function(*arguments, **named)
        except (ConfigError, ResultsError) as error:
            raise error.with_traceback(None) from None

    return cast(_F, called)


class CellsFailedError(AssertionError):
    """Cells of a sweep are not ok; the message names them, with their reasons."""


@dataclass(frozen=True)
class Result:
    """A sweep that has ended, in its folder. `exit_status` is that of its command."""

    folder: Path
    exit_status: int

    @property
    def ok(self) -> bool:
        """Whether every row is pass, xfail or skip, and not all are skip."""
        return self.exit_status == 0

    @cached_property
    @_without_frames
    def rows(self) -> "pd.DataFrame":
        """The rows, with a column for each column of `results.jsonl`, and `config` and `details`."""
        return self._sweep.frame.drop(columns="sweep")

    @cached_property
    def _sweep(self) -> "Sweeps":
        from dcpbench.analysis.frame import read_sweep

        load_plugins()
        return read_sweep(self.folder)

    def __repr__(self) -> str:
        """Return the folder, and the line that counts the cells and their statuses."""
        try:
            from dcpbench.analysis.frame import without_retries
            from dcpbench.report.tables import headline

            left = sum(map(len, self._sweep.not_run().values()))
            counts = headline(without_retries(self.rows), left)
        except Exception as error:  # noqa: BLE001 - a debugger or an assertion can ask at any time
            counts = f"{type(error).__name__}: {error}"
        return f"Result({str(self.folder)!r}: {counts})"

    def __str__(self) -> str:
        """Return the tables and failures that `dcpbench report` prints."""
        return self._report("table")

    def _repr_markdown_(self) -> str:
        return self._report("markdown")

    @_without_frames
    def _report(self, written_as: str) -> str:
        from dcpbench.report.document import document_text
        from dcpbench.report.show import report_content

        return document_text([report_content(self._sweep)], written_as, StringIO())

    def raise_if_failed(self) -> None:
        """Raise if the sweep is not ok.

        Raises:
            CellsFailedError: it names each cell that is not ok, with its status, reason and likely causes,
                and the command that runs it again.
        """
        if self.ok:
            return
        from dcpbench.analysis.frame import as_expected, plain_rows, row_noun, without_retries
        from dcpbench.analysis.runs import row_names, why_failed

        rows = without_retries(self.rows)
        failed, skipped = rows[~as_expected(rows)], rows[rows["status"].eq("skip")]
        if len(failed):
            head = f"{len(failed)} of {counted(len(rows), row_noun(rows))} failed"
        elif len(skipped) and (len(skipped) == len(rows) or self.exit_status == WRONG_CONFIGURATION):
            every = f"every {row_noun(rows)} was" if len(skipped) == len(rows) else f"{len(skipped)} were"
            head, failed = f"{every} skipped", skipped
        else:
            head = "the sweep is not complete"
        lines = []
        for row in plain_rows(
            failed[["status"]].assign(cell=row_names(rows)[failed.index], **why_failed(failed))
        ):
            below = [*row["cause"].splitlines(), f"again: {row['again']}"]
            parts = [f"  {row['cell']}: {row['status']}: {row['reason']}", *(f"    {line}" for line in below)]
            lines.append("\n".join(map(visible, parts)))
        more = [f"  and {len(lines) - _MOST_CELLS} more"] if len(lines) > _MOST_CELLS else []
        raise CellsFailedError("\n".join([f"{head} ({self.folder})", *lines[:_MOST_CELLS], *more]))


@_without_frames
def check(
    build: str | Callable[..., Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    config_dir: str | Path | None = None,
    **keys: Any,
) -> Result:
    """Run one cell and wait for it, as `dcpbench run` does, in a separate process.

    Args:
        build: what to train: the name of a model; an importable function that returns a `Workload` (with
            `checkpointer="trainer"` a `Trainer`); or such a function as `"path.py::name"`. Ranks import it,
            so closures, lambdas and functions of a notebook are refused.
        options: keyword arguments for the function or the model.
        folder: a new or empty folder for the sweep; by default one below `outputs/`.
        config_dir: a folder with your own groups, laid out like `conf/`.
        keys: any axis or key of `dcpbench run --help`: `parallel="fsdp2"`, `device="cpu"`, `saves=1`. A key
            inside a key is a mapping, `timeouts={"cell_s": 60}`, or has dots, `**{"parallel.tp": 4}`.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        KeyboardInterrupt: after the ranks have ended and the rows are written.
    """
    if "experiment" in keys:
        raise ConfigError("experiment: check runs one cell; use sweep(experiment=...)")
    for key, value in keys.items():
        if key in AXES and isinstance(value, list | tuple):
            raise ConfigError(f"{key}={value}: check runs one cell; use sweep for several values")
    return _sweep([*_build_words(build, options), *overrides(keys)], folder, config_dir, _import_root(build))


@_without_frames
def sweep(
    build: str | Callable[..., Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    config_dir: str | Path | None = None,
    **lists: Any,
) -> Result:
    """Run every combination of the values in lists, or an experiment: `sweep(experiment="seeds")`.

    Arguments are those of `check`, but a list has several values: `sweep(parallel=["ddp", "fsdp2"])`.
    A value that is a list is a list in a list.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        KeyboardInterrupt: after the ranks have ended and the rows are written; `dcpbench resume` continues.
    """
    words = _build_words(build, options)
    for key, values in lists.items():
        if isinstance(values, list | tuple):
            if not values:
                raise ConfigError(f"{key}=[]: a list needs a value")
            words.append(override(key, *values))
        else:
            words += overrides({key: values})
    return _sweep(words, folder, config_dir, _import_root(build))


@_without_frames
def script(
    command: Sequence[str | Path],
    *,
    stops: Sequence[str] = (),
    resume_args: Sequence[str] = (),
    folder: str | Path | None = None,
    **options: Any,
) -> Result:
    """Check whether a training script resumes exactly, as `dcpbench script` does, in a separate process.

    Args:
        command: the words that start it; `{out}` is the folder of its output. `python` and `torchrun`
            are those of this process's environment.
        stops: where to stop it, such as `kill@15`; by default one of each kind.
        resume_args: words that a resume adds.
        folder: a new or empty folder for the results; by default one below `outputs/`.
        options: other options of the command: `timeout=60`, `deterministic=True`.

    Raises:
        ConfigError: the command does not run, or cannot be judged; the log that is named says why.
    """
    words = [f"--stop={stop}" for stop in stops]
    words += [f"--resume-args={shlex.join(resume_args)}"] if resume_args else []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] * bool(value) if isinstance(value, bool) else [f"{option}={value}"]
    place = _place(folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    asked = ["script", "--json", f"--dir={place}", *words, "--", *map(str, command)]
    return _run(asked, place, {**os.environ, "PATH": path})


@contextmanager
def engine() -> Iterator[None]:
    """Keep what drivers and ranks import for all sweeps of the block: each starts seconds earlier.

        with api.engine():
            for parallel in ("ddp", "fsdp2"):
                api.check("model.py::build", parallel=parallel)

    Each sweep imports your code and plug-ins again.
    """
    from dcpbench.cli.engine import kept_agent

    kept = kept_agent()
    before = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(before)
        kept.end()


@_without_frames
def read_sweep(folder: str | Path) -> Result:
    """Read the folder of a sweep. One that was interrupted is not ok.

    Raises:
        dcpbench.records.store.ResultsError: there is no sweep in the folder.
    """
    from dcpbench.sweep.folder import SweepRecord

    load_plugins()
    rows = read_rows(Path(folder), details=False)[0]
    status = exit_status(rows)
    with suppress(ConfigError):  # rows alone, copied from elsewhere
        if len({row.run for row in rows if row.retry_of is None}) < len(SweepRecord.read(Path(folder)).cells):
            status = 1
    return Result(Path(folder), status)


@_without_frames
def audit(folder: str | Path, data: bool = False) -> list[Any]:
    """Audit a checkpoint, or every checkpoint below a folder, the newest first. `data` reads tensors too.

    Returns:
        for each its `folder`, `state` (complete, damaged or torn), `because`, `findings` and `entries`.

    Raises:
        ConfigError: the plug-in for audits is not installed.
    """
    return [*_of_plugin("audit")(Path(folder), data)]


def __getattr__(name: str) -> Any:
    """Return a class that needs torch, or a name that a plug-in adds."""
    if name in _OF_RANKS:
        return getattr(import_module(_OF_RANKS[name]), name)
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return _of_plugin(name)
    except ConfigError as error:
        raise AttributeError(f"dcpbench.api.{name}: {error}") from None


def _of_plugin(name: str) -> Any:
    for plugin in plugins():
        if target := plugin.public.get(name):
            return resolve_name(target)
    raise ConfigError(f"{name}: no installed plug-in provides it")


def _build_words(build: str | Callable[..., Any] | None, options: Mapping[str, Any] | None) -> list[str]:
    """Return the words that choose a workload, or a model of the group `model`."""
    group = "workload" if build is None or callable(build) or "::" in build or "." in build else "model"
    chosen = {} if build is None else {"model" if group == "model" else "workload.target": _target(build)}
    return overrides({**chosen, **({f"{group}.options": options} if options else {})})


def _target(build: str | Callable[..., Any]) -> str:
    """Return the dotted name of a function.

    Raises:
        ConfigError: ranks could not import it.
    """
    if isinstance(build, str):
        if "::" not in build:
            return build
        path, _, name = build.rpartition("::")
        if not Path(path).is_file():
            raise ConfigError(f"{build}: there is no file {path}; expected file.py::function")
        inside = Path(path).resolve().relative_to(_root(Path(path)))
        return ".".join([*inside.with_suffix("").parts, name])
    module, name = str(getattr(build, "__module__", "")), str(getattr(build, "__qualname__", ""))
    instead = 'write it in a file and pass "file.py::function"'
    if module == "__main__":
        raise ConfigError(f"{name}: ranks cannot import a function of a notebook or script; {instead}")
    if not module or not name or "<" in name:
        raise ConfigError(f"{name or build!r}: ranks cannot import a closure, lambda or object; {instead}")
    return f"{module}:{name}" if "." in name else f"{module}.{name}"


def _root(path: Path) -> Path:
    """Return the folder from which the module of a file is imported."""
    folder = path.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _import_root(build: str | Callable[..., Any] | None) -> Path | None:
    """Return the folder of a function's module."""
    return _root(Path(build.rpartition("::")[0])) if isinstance(build, str) and "::" in build else None


def _place(folder: str | Path | None) -> Path:
    """Return the folder of a sweep: this one, or a new one."""
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"
    return Path(folder or Path("outputs", name)).resolve()


def _sweep(
    words: Sequence[str], folder: str | Path | None, config_dir: str | Path | None, root: Path | None
) -> Result:
    """Run a sweep."""
    option, place = [f"--config-dir={Path(config_dir).resolve()}"] if config_dir else [], _place(folder)
    return _run(["run", *option, *words, override("hydra.sweep.dir", place)], place, _environment(root))


def _run(asked: Sequence[str], place: Path, environment: Mapping[str, str]) -> Result:
    """Run a command in a separate process, which a test runner, a notebook or Hydra cannot disturb. Its rows
    are in `place`.

    Its progress goes to stderr as it comes, and its warnings become Python's when it has ended. Ctrl-C is
    passed on once, and the process then ends.
    """
    from dcpbench.cli.engine import Driver

    said, messages = "", list[str]()
    driver = Driver(asked, environment, _KEPT.get() if asked[0] == "run" else None)
    try:
        for line in driver.stderr:
            said += line
            if _MESSAGE.match(line):
                messages.append(_MESSAGE.sub("", line.strip()))
            else:
                sys.stderr.write(line)
    except BaseException:
        driver.interrupt()
        raise
    finally:
        status = driver.wait()
    has_rows = (place / "results.jsonl").exists()
    is_wrong = status == WRONG_CONFIGURATION and (bool(messages) or not has_rows)
    if not is_wrong and (status not in (0, 1, WRONG_CONFIGURATION) or not has_rows):
        raise RuntimeError(f"dcpbench ended with exit status {status}:\n{said}")
    for message in messages[: -1 if is_wrong else None]:
        warnings.warn(message, stacklevel=5)  # at the call of `check` or `sweep`
    if is_wrong:
        raise ConfigError(messages[-1] if messages else said)
    return Result(place, status)


def _environment(root: Path | None) -> dict[str, str]:
    """Return this process's environment, in which ranks can import what this process can import."""
    prefixes = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    places = [os.environ.get("PYTHONPATH", "")]
    for path in (Path(place or ".").resolve() for place in (root or ".", *sys.path)):
        # Ranks search the current folder too, as the last one.
        if path.is_dir() and path != Path.cwd() and not prefixes & {*path.parents}:
            places.append(str(path))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, places)))}
