"""Tests run the real thing: `python -m dcpbench` in a process of its own, real ranks, real files."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from support.drivers import Driver, start_server

if TYPE_CHECKING:
    from support.browser import Browser

TESTS = Path(__file__).parent
PARALLELISMS = ("none", "ddp", "fsdp", "hsdp", "fsdp_tp", "fsdp2", "hsdp2", "fsdp2_tp")


# A shell that starts the tests in the background has them ignore Ctrl-C, and whatever they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Finished:
    """A command that has ended, and the sweep that it left behind."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows, in the order in which they were written."""
        path = self.folder / "results.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def row(self, **wanted: Any) -> dict[str, Any]:
        """The one row whose columns have these values."""
        found = [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]
        assert len(found) == 1, (wanted, [row["cell"] for row in self.rows], self.err)
        return found[0]


def environment() -> dict[str, str]:
    """This process's environment, with the tests' own scenarios importable."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def command(folder: Path, *overrides: str) -> list[str]:
    """The command line of a sweep into `folder`, with the tests' own groups."""
    program = [sys.executable, "-m", "dcpbench", "--config-dir", str(TESTS / "conf")]
    return [*program, *overrides, f"hydra.sweep.dir={folder}"]


def start(*words: str, cwd: Path, prepare: Callable[[], None] | None = None) -> Driver:
    """Start `python -m dcpbench` with these words."""
    if forkserver._forkserver._forkserver_pid is None:
        start_server(environment())
    return Driver(list(words), cwd, environment(), prepare)


def run(folder: Path, *overrides: str, timeout_s: float = 240) -> Finished:
    """Run a sweep to its end."""
    driver = start(*command(folder, *overrides)[3:], cwd=folder.parent)
    out, err = driver.communicate(timeout_s)
    assert driver.returncode is not None
    return Finished(driver.returncode, out, err, folder)


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Finished]:
    """Run a sweep into a fresh folder."""
    return lambda *overrides, **options: run(tmp_path / "sweep", *overrides, **options)


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


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Browser]":
    """A headless Chromium."""
    from support.browser import chromium

    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def show(browser: "Browser", tmp_path: Path) -> "Callable[..., Browser]":
    """Open the report page of a sweep of these rows; what it tells the console or asks for is an error."""
    from support.pages import write_page

    def opened(rows: list[Any], title: str = "sweep", **how: Any) -> "Browser":
        browser.open(write_page(tmp_path, rows, title), **how)
        assert browser.console() == []
        assert browser.requests() == []
        return browser

    return opened
