"""The processes of a command, and what is left of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import TESTS, wait_for
from dcpbench.plugins.script.process import Process

MARK = "DCPBENCH_TEST_OF_PROCESSES"
FAMILY = """
import os, subprocess, sys, time
for words in ([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"], ["sleep", "600"]):
    if not os.fork():  # an orphan
        subprocess.Popen(words, stdout=subprocess.DEVNULL)
        os._exit(0)
    os.wait()
subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that run with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log"
    for process in marked(str(tmp_path)):
        process.kill()


def started(log: Path, *words: str) -> Process:
    with log.open("wb") as output:
        return Process(words, log.parent, os.environ | {MARK: str(log.parent)}, output)


def test_status_and_output(log: Path) -> None:
    with started(log, "sh", "-c", "echo out; echo err >&2; exit 3") as process:
        wait_for(lambda: process.poll() is not None)
        assert process.poll() == 3
    with started(log.with_name("killed"), "sh", "-c", "kill -9 $$") as process:
        wait_for(lambda: process.poll() is not None)
        assert process.poll() == -signal.SIGKILL
    assert log.read_text() == "out\nerr\n"


def test_a_helper_that_ends_after_the_command_ends_rightly(log: Path) -> None:
    with started(log, "sh", "-c", f"(sleep 0.3; echo done > {log}-helper) & exit 0") as process:
        wait_for(lambda: process.poll() is not None)
    assert Path(f"{log}-helper").read_text() == "done\n"


def test_all_descendants_are_stopped_continued_and_ended(log: Path) -> None:
    ready = log.with_name("ready")
    process = started(log, sys.executable, "-c", FAMILY, str(ready))
    wait_for(ready.exists)
    wait_for(lambda: len(process.descendants()) == 4)
    assert process.stop_all()
    assert {one.status() for one in process.descendants()} == {psutil.STATUS_STOPPED}
    process.continue_all()
    wait_for(lambda: psutil.STATUS_STOPPED not in {one.status() for one in process.descendants()})
    assert process.stop_all()
    process.end()
    assert marked(str(log.parent)) == []


def test_a_parent_that_waits_for_a_stopped_child_is_stopped(log: Path) -> None:
    """A process that starts others all the time: its thread waits in vfork, and cannot be stopped there."""
    endless = "import subprocess\nwhile True: subprocess.run(['true'])"
    with started(log, sys.executable, "-c", endless) as process:
        wait_for(lambda: bool(process.descendants()))
        for _ in range(20):
            assert process.stop_all()
            process.continue_all()


DRIVER = """
import os, sys
from pathlib import Path
from dcpbench.plugins.script.process import Process
from dcpbench.sweep.signals import Signals
signals, log = Signals(), Path(sys.argv[1])
signals.obey()
try:
    words = [sys.executable, "-c", sys.argv[2], f"{log.parent}/ready"]
    with Process(words, log.parent, os.environ, log.open("wb")) as process:
        while not (log.parent / "ready").exists():
            pass
        print(process.stop_all() if sys.argv[3] == "stopped" else True, flush=True)
        while process.poll() is None:
            pass
except KeyboardInterrupt:
    sys.exit(signals.status(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "state"),
    [
        (signal.SIGKILL, "running"),
        (signal.SIGKILL, "stopped"),
        (signal.SIGTERM, "stopped"),
        (signal.SIGHUP, "running"),
        (signal.SIGINT, "stopped"),
    ],
)
def test_nothing_is_left_of_a_driver_that_ends(log: Path, number: signal.Signals, state: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(log), FAMILY, state],
        stdout=subprocess.PIPE, text=True, env=os.environ | {MARK: str(log.parent)}, cwd=TESTS,
    )  # fmt: skip
    assert driver.stdout
    assert driver.stdout.readline() == "True\n"
    driver.send_signal(number)
    assert driver.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not marked(str(log.parent)), 20.0)


@pytest.mark.slow
def test_command_line_that_is_terminated(log: Path) -> None:
    """As by the limit of a CI's job."""
    words = ["script", "--dir=x", "--", sys.executable, "-c", FAMILY, "ready", "{out}"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "dcpbench", *words],
        stdout=subprocess.PIPE, text=True, env=os.environ | {MARK: str(log.parent)}, cwd=log.parent,
    )  # fmt: skip
    wait_for((log.parent / "ready").exists)
    driver.terminate()
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 128 + signal.SIGTERM
    assert out.endswith("interrupted; logs and rows: x\n")
    assert marked(str(log.parent)) == []


def test_copying_ends_with_the_driver(log: Path) -> None:
    """`cp` is no descendant of the guardian."""
    code = (
        "import subprocess; from pathlib import Path; from dcpbench.plugins.script import copies\n"
        "run = subprocess.run\n"
        "subprocess.run = lambda words, **how: run(['sleep', '600'], **how)\n"
        "copies.copy_folder(Path('a'), Path('b'))\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {MARK: str(log.parent)}, cwd=log.parent
    )
    wait_for(lambda: any(one.name() == "sleep" for one in marked(str(log.parent))))
    driver.kill()
    driver.wait()
    wait_for(lambda: not marked(str(log.parent)), 20.0)
