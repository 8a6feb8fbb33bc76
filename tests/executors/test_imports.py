"""Ranks of a user's code import installed packages once for all, and the user's own files each."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from conftest import ONE_STEP, run, wait_for
from dcpbench.core.rank_report import Imports
from dcpbench.executors.agent import PROBE, Agent, agent_of

pytestmark = pytest.mark.slow

NOTES = """
import os
with open(os.environ["IMPORTED"], "a") as file:
    file.write(f"{__name__} {os.getpid()} {os.environ.get('FAST')}\\n")
"""
MINE = f"""
os_environ = __import__("os").environ
os_environ["FAST"] = "yes"
import installed
from support.ordinary_workloads import Workload, inputs, net, reversed_loss
{NOTES}
def build():
    import installed.late
    assert installed.late.FAST == "yes"
    return Workload(net(), inputs, reversed_loss)
"""
PACKAGES = {
    "installed": NOTES,
    "raises": "raise ValueError('only ranks can import it')",
    "leaves": "raise SystemExit(3)",
    "threaded": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "opens": "import os; FILE = open(os.__file__)",
    "ends": "import os; os._exit(0)",
    "of_user": "import mine",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, the file in which imports are noted, and a user's file."""
    for name, text in PACKAGES.items():
        (tmp_path / "site-packages" / name).mkdir(parents=True)
        (tmp_path / "site-packages" / name / "__init__.py").write_text(text)
    late = tmp_path / "site-packages" / "installed" / "late.py"
    late.write_text(f"{NOTES}\nFAST = os.environ['FAST']\n")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setenv("IMPORTED", str(tmp_path / "imported.txt"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    return tmp_path


def test_later_ranks_import_only_the_users_files(packages: Path) -> None:
    words = ("device=cpu", "world_size=2", "parallel=ddp,fsdp2", "saves=1", "retry=0", *ONE_STEP)
    ended = run(packages / "sweep", "-m", "workload.target=mine.build", *words, cwd=packages)
    assert [row["status"] for row in ended.rows] == ["pass", "pass"], ended.out
    assert {row["restart"] for row in ended.rows} == {"interpreter"}
    notes = [line.split() for line in (packages / "imported.txt").read_text().splitlines()]
    processes = {name: {pid for other, pid, _ in notes if other == name} for name, _, _ in notes}
    ranks, cells, stages = 2, 2, 3
    assert len(processes["mine"]) == 1 + ranks * cells * stages, "one looks at the signature"
    servers = 2  # of the two interpreters
    assert len(processes["installed"]) == 1 + ranks + servers
    assert len(processes["installed.late"]) == ranks + servers
    assert {fast for name, _, fast in notes if name != "mine"} == {"yes"}, "as the user's file has set it"
    assert all("imports" not in rank for row in ended.rows for rank in row["details"]["ranks"])

    def is_left(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.cwd() == str(packages)
        return False

    wait_for(lambda: not any(map(is_left, psutil.process_iter())), limit_s=30)


def main(connection: Connection, name: str) -> None:
    """Send whether this process has imported a module."""
    connection.send((name in sys.modules, os.environ.get("FAST")))


@pytest.fixture
def agent(packages: Path) -> Iterator[Agent]:
    started = agent_of(sys.executable, [PROBE], path=lambda: [*sys.path, str(packages)])
    started.start()
    yield started
    started.end()


def imports_of(*names: str) -> Imports:
    return Imports(names, (("FAST", "yes"), ("IMPORTED", os.environ["IMPORTED"])))


def test_processes_are_forked_after_the_imports(agent: Agent) -> None:
    imports = imports_of("raises", "leaves", "installed", "installed.late")
    other = agent.importing(imports)
    assert other is agent.importing(imports) is not agent
    here, process = other.fork(__name__, "installed.late")
    assert here.recv() == (True, None), "what was set for the imports is not left"
    process.wait()
    assert process.exitcode == 0
    os.kill(other.pid or 0, signal.SIGKILL)
    wait_for(lambda: not other.runs())
    assert agent.importing(imports) is agent


def test_process_that_differs_forks_no_ranks(agent: Agent) -> None:
    for name in ("threaded", "opens", "ends", "of_user"):
        assert agent.importing(imports_of(name)) is agent, name
    assert agent.importing(imports_of()) is agent
