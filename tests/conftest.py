"""Tests run the real thing: a driver in a process of its own, real ranks, real files.

Drivers are forked from one agent that has everything imported (`support.drivers`), which says what that
leaves untested; `own_process=True` starts `python -m dcpbench` as a shell does.
"""

import gc
import json
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pytest
import yaml

from dcpbench.config.schema import conf_folder
from dcpbench.core.plugins import load_plugins
from dcpbench.records.store import read_rows
from dcpbench.sweep.signals import ENDING_SIGNALS
from support import drivers
from support.commands import python
from support.drivers import Driver, environment

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from torch.distributed.device_mesh import DeviceMesh

    from support.browser import Browser
    from support.gloo_ranks import Ask

TESTS = Path(__file__).parent
ONE_STEP = ("train_steps=1", "resume_steps=1")
SMALL = ("model=short", *ONE_STEP)
"""For sweeps that need no more: what a cell costs goes with its parameters and its steps."""
SECONDS = "dcpbench/seconds"
"""Where pytest's cache has how long each test took when it last ran."""
CPU_LIMIT_S = {"check": 20.0, "test": 80.0}
"""CPU seconds that a test of a tier may use, with the fixtures made for it and the ranks of its cells."""
BEGAN = pytest.StashKey[float]()
TIERS = [line.split(" ", 2) for line in (TESTS / "tiers.txt").read_text("utf-8").splitlines()]
"""Of each test that is not cheap: its tier, its CPU seconds, and its name with its parameters."""
MARKED = {name: {"extended": "extended", "second": "cell"}.get(tier) for tier, _, name in TIERS}
"""The marker of each of them that its tier gives it."""
PARALLELISMS = ("none", "ddp", "fsdp", "hsdp", "fsdp_tp", "fsdp2", "hsdp2", "fsdp2_tp")


_seconds: defaultdict[str, float] = defaultdict(float)

# Until all tests are collected; what is imported is never garbage.
gc.disable()

load_plugins()

# What tests compute is small, and threads that wait for each other spin on cores that ranks need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis would import the plug-ins of other packages, such as trio.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

# The compiler need not try the processor's vector instructions: ten CPU seconds in a new cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell that starts the tests in the background has them ignore what comes from the terminal, and whatever
# they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let a worker of xdist fork its agents from those of this process."""
    node.workerinput["agents"] = drivers.share()


def pytest_configure(config: pytest.Config) -> None:
    """Know where, in such a worker."""
    drivers.shared = getattr(config, "workerinput", {}).get("agents")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that scripts/choose_tests.py has left out of `make test` are `extended`; a new test is not. Those
    which take a second of CPU, and those on ranks, are not in `make check`."""
    mark = "cell" if "ask" in getattr(item, "fixturenames", ()) else None
    if mark := MARKED.get(item.nodeid) or mark:
        item.add_marker(mark)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file is not imported if its `pytestmark` leaves all of its tests out of what `-m` asks for."""
    asked = config.option.markexpr
    if collection_path.suffix != ".py" or not re.fullmatch(r"not \w+( and not \w+)*", asked):
        return None
    marks = re.search(r"^pytestmark = (.*(?:\n[ \]].*)*)", collection_path.read_text("utf-8"), re.MULTILINE)
    left_out = re.findall(r"not (\w+)", asked)
    return True if marks and {*re.findall(r"mark\.(\w+)", marks[1])} & {*left_out} else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files whose selected tests took longest come first: where workers share the tests, what is left at the
    end is short. Of files that have not run yet, those with costs in tiers.txt come first, then sweeps."""
    recorded = {name: float(cpu_s) for _, cpu_s, name in TIERS}
    seconds, of_file = recorded | _seconds_before(config), defaultdict[Path, float](float)
    for item in items:
        of_file[item.path] += seconds.get(item.nodeid, 0)
    sweeps = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (-of_file[item.path], item.path not in sweeps))
    if any(item.get_closest_marker("extended") for item in items):
        for item in items:  # whose shared sweep has cells for all of them: it can take a quarter of an hour
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(1300))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up how long a test takes, with its fixtures."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record it, in the process to which workers report."""
    config = session.config
    if hasattr(config, "cache") and not hasattr(config, "workerinput"):
        config.cache.set(SECONDS, _seconds_before(config) | _seconds)


def _seconds_before(config: pytest.Config) -> dict[str, float]:
    return config.cache.get(SECONDS, {}) if hasattr(config, "cache") else {}


def pytest_collection_finish(session: pytest.Session) -> None:
    """No cell compiles in `make check`, where the agent need not know how."""
    gc.freeze()
    gc.enable()
    drivers.compiles = any(_tier(item) != "check" for item in session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """`make check` starts no drivers."""
    drivers.may_start = _tier(item) != "check"
    item.stash[BEGAN] = drivers.cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A test that costs more CPU seconds than its tier allows is an error."""
    report: pytest.TestReport = yield
    tier = _tier(item)
    if tier and call.when == "teardown" and report.passed:
        used = drivers.cpu_seconds() - item.stash[BEGAN]
        if used > CPU_LIMIT_S[tier]:
            report.outcome = "failed"
            report.longrepr = f"{used:.1f} CPU seconds: in `make {tier}` a test may use {CPU_LIMIT_S[tier]:g}"
    return report


def _tier(item: pytest.Item) -> str:
    marks = {mark.name for mark in item.iter_markers()}
    if marks & {"extended", "exhaustive", "multinode", "slurm"}:
        return ""
    return "test" if marks & {"slow", "cell", "browser"} else "check"


@dataclass(frozen=True)
class Finished:
    """A command that has ended, and the sweep that it left behind."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows with their details, in the order of the sweep's cells, without retries."""
        if not (self.folder / "results.jsonl").exists():
            return []
        cells = [*json.loads((self.folder / "sweep.json").read_text())["cells"]]
        rows = [row.flat() for row in read_rows(self.folder)[0] if row.retry_of is None]
        return sorted(rows, key=lambda row: cells.index(row["cell"]))

    @property
    def retries(self) -> dict[str, dict[str, Any]]:
        """The rows of retries, each by the digest of its cell."""
        rows = read_rows(self.folder)[0]
        return {row.config_digest: row.flat() for row in rows if row.retry_of is not None}

    def measurements(self, cell: str, metric: str) -> list[dict[str, Any]]:
        """What was measured of a metric in a cell."""
        lines = (self.folder / "measurements.jsonl").read_text().splitlines()
        measured = [json.loads(line) for line in lines]
        return [one for one in measured if (one["cell"], one["metric"]) == (cell, metric)]

    def row(self, **wanted: Any) -> dict[str, Any]:
        """The one row whose columns have these values."""
        found = [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]
        assert len(found) == 1, (wanted, [row["cell"] for row in self.rows], self.err)
        return found[0]


def words_of(folder: Path, *overrides: str) -> list[str]:
    """What stands behind `python -m dcpbench` for a sweep into `folder`, with the tests' own groups."""
    return ["--config-dir", str(TESTS / "conf"), *overrides, f"hydra.sweep.dir={folder}"]


def start(*words: str, cwd: Path, prepare: Callable[[], object] | None = None) -> Driver:
    """Start a driver with these words; `prepare` is called in its process before anything else."""
    return Driver(words, cwd, prepare)


def dcpbench(
    *words: str,
    folder: Path,
    cwd: Path | None = None,
    own_process: bool = False,
    prepare: Callable[[], object] | None = None,
    reports: bool = False,
    timeout_s: float = 1200,
) -> Finished:
    """Run `python -m dcpbench` with these words, which leaves a sweep in `folder`; with a page and junit.xml
    if `reports` are asked for, or in a process of its own."""
    cwd = cwd or folder.parent
    if own_process:
        ended = python("-m", "dcpbench", *words, timeout=timeout_s, env=environment(), cwd=cwd)
        return Finished(ended.returncode, ended.stdout, ended.stderr, folder)
    if not reports and words[0] != "script":
        prepare = partial(drivers.without_reports, prepare)
    driver = start(*words, cwd=cwd, prepare=prepare)
    out, err = driver.communicate(timeout_s)
    assert driver.returncode is not None
    return Finished(driver.returncode, out, err, folder)


def run(folder: Path, *overrides: str, **options: Any) -> Finished:
    """Run a sweep to its end."""
    return dcpbench(*words_of(folder, *overrides), folder=folder, **options)


def plan_sweep(folder: Path, *overrides: str, **options: Any) -> Finished:
    """Plan the sweep that these words would run in `folder`."""
    return dcpbench("plan", *words_of(folder, *overrides), folder=folder, **options)


def resume(folder: Path, *words: str, **options: Any) -> Finished:
    """Resume the sweep in `folder`."""
    return dcpbench("resume", str(folder), *words, folder=folder, **options)


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return what the selected tests that use this fixture have as these parameters, each once: a sweep runs
    the cells that they check. A single name gives values, several give tuples."""
    found: dict[Any, None] = {}
    for item in request.session.items:
        mine = getattr(item, "module", None) is request.module
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if mine and request.fixturename in getattr(item, "fixturenames", ()) and given.keys() >= {*names}:
            values = tuple(given[name] for name in names)
            found[values if len(values) > 1 else values[0]] = None
    return [*found]


def in_make_test(request: pytest.FixtureRequest) -> bool:
    """Return whether no selected test of this file is extended: its sweep then has fewer cells."""
    mine = (item for item in request.session.items if item.path == request.path)
    return not any(item.get_closest_marker("extended") for item in mine)


def blocks(cells: Iterable[dict[str, Any]]) -> list[str]:
    """Return the words of a sweep of these cells, in which a value may be a list."""
    return [
        f"+hydra.sweeper.matrix.b{number}={{{', '.join(f'{key}: {_quoted(cell[key])}' for key in cell)}}}"
        for number, cell in enumerate(cells)
    ]


def cells_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the blocks of an experiment of the tests, each with what holds for all of them."""
    (path,) = TESTS.rglob(f"conf/experiment/{name}.yaml")
    asked = yaml.safe_load(path.read_text())
    matrix = asked.pop("hydra")["sweeper"]["matrix"]
    chosen = [item for one in asked.pop("defaults", []) for item in one.items()]
    of_all = {group.removeprefix("override /"): value for group, value in chosen} | _flat(asked)
    return {block: {**cell, **of_all, **cell} for block, cell in matrix.items()}


def experiment(name: str, wanted: Iterable[str]) -> list[str]:
    """Return the words of an experiment of the tests with no other than the wanted blocks."""
    names = {*wanted}
    return blocks(cell for block, cell in cells_of(name).items() if block in names)


def _flat(asked: dict[str, Any], of: str = "") -> dict[str, Any]:
    found = {}
    for key, value in asked.items():
        found |= _flat(value, f"{of}{key}.") if isinstance(value, dict) else {f"{of}{key}": value}
    return found


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str | list) else _word(value)


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Finished]:
    """Run a sweep into a fresh folder."""
    return lambda *overrides, **options: run(tmp_path / "sweep", *overrides, **options)


@dataclass(frozen=True)
class Printed:
    """What a command printed, which ran in this process."""

    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of the output, with single blanks."""
        return [" ".join(line.split()) for line in self.out.splitlines()]

    def json(self) -> Any:
        """Parse the output, whose numbers are finite."""
        return json.loads(self.out, parse_constant=lambda token: pytest.fail(token))

    def refusal(self) -> str:
        """Return the one line that it printed."""
        assert (self.out, self.err.count("\n")) == ("", 1), self
        return self.err


Command = Callable[..., Printed]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run a command in this process, which ends with this exit status; a path alone is that of a `report`."""
    from dcpbench.cli import commands
    from dcpbench.executors.agent import end_own_agent

    def run(*words: object, status: int = 0) -> Printed:
        capsys.readouterr()
        named = ["report"] if isinstance(words[0], Path) else []
        try:
            ended, printed = commands.main([*named, *map(str, words)]), Printed(*capsys.readouterr())
        finally:
            end_own_agent()  # which would end with the command's process
        assert ended == status, printed
        return printed

    with mock.patch.dict(os.environ):  # what a command sets is undone
        yield run


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> Iterator[Callable[..., str]]:
    """Return the line with which a sweep refuses its words, in this process; it makes no folder."""
    from dcpbench.cli import run

    for name in ("own_agent", "end_own_agent"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["dcpbench"])
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}

    def line(*words: str, folder: Path = tmp_path / "sweep") -> str:
        there = folder.exists()
        typed = words if words[0] == "resume" else words_of(folder, *words)
        printed = command(*typed, status=2)
        assert folder.exists() is there
        return printed.refusal()

    yield line
    for number, handler in before.items():
        signal.signal(number, handler)


def seen_through(folder: Path, checkpointer: str) -> None:
    """Plant faults in what this checkpointer saves and loads: each is seen as where DCP does."""
    faults = ("weight_lowest_bit", "stale_stage", "key_dropped", "checkpoint_of_first_save", "file_missing")
    cells = (f"checkpointer={checkpointer}", "parallel=fsdp2", f"fault={','.join(faults)}", "saves=2")
    ended = run(folder, "-m", *SMALL, *cells, "device=cpu", "world_size=2")
    seen = [row["fault_seen"] for row in ended.rows]
    assert seen == [True] * 4 + [None], ended.out
    assert "takes checkpointer=dcp" in ended.rows[-1]["reason"]


def alive_in(folder: Path) -> list[str]:
    """Command lines of processes that have a file below `folder` open: ranks have their logs."""
    found = []
    for process in psutil.process_iter():
        try:
            names = [item.path for item in process.open_files()]
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if any(name.startswith(str(folder)) for name in names):
            found.append(f"{process.pid}: {line}")
    return found


def wait_for(happened: Callable[[], bool], limit_s: float = 120) -> None:
    """Look until it has happened; AssertionError if that takes too long."""
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def hanging(folder: Path) -> bool:
    """Whether the cell of `scenario=hangs` is under way on two ranks, after another one has ended."""
    logs = list(folder.glob("*scenario=hangs*/rank1.log"))
    return bool(logs) and (folder / "results.jsonl").exists() and len(alive_in(folder)) >= 3


@pytest.fixture(scope="module")
def ask() -> "Iterator[Ask]":
    """Four gloo ranks that call what they are sent, until the end of a file: a thread of each group that its
    tests have made wakes up a hundred times a second."""
    from support.gloo_ranks import gloo_ranks

    with gloo_ranks() as on_all:
        yield on_all


@pytest.fixture
def mesh() -> "Iterator[DeviceMesh]":
    """Of this process alone, in a group of gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def hydra_loader() -> "Iterator[ConfigLoader]":
    """Hydra's, with which cells are composed."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from dcpbench.cli.by_hydra import register_groups

    register_groups()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()
    GlobalHydra.instance().clear()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Browser]":
    """A headless Chromium."""
    from support.browser import chromium

    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def show(browser: "Browser", tmp_path: Path) -> "Callable[..., Browser]":
    """Open the report page of a sweep of these rows; what it tells the console or asks for is an error."""
    from report.pages import write_page

    def opened(
        rows: list[Any], title: str = "sweep", before: Any = None, environment: Any = None, **how: Any
    ) -> "Browser":
        browser.open(write_page(tmp_path, rows, title, before, environment), **how)
        assert browser.console() == []
        assert browser.requests() == []
        return browser

    return opened
