"""Whatever asks a sweep to end, at whichever moment: a true last line, the rows and reports that there are,
and nobody left. Whatever is stopped, the sweep ends, with a row for each cell."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from adversary.interruptions import SIGNALS, problems
from conftest import SMALL, Finished, alive_in, wait_for, words_of
from support.drivers import environment, plant

pytestmark = pytest.mark.slow

# Each of them, so often, at each of 16 moments: bench/signals.py.
MOMENTS = ("planning", "row written", "report", "save", "upload")
HERE = [*zip(MOMENTS, itertools.cycle(SIGNALS), itertools.cycle((5, 1, 2)), strict=False)]


@pytest.mark.parametrize(("moment", "number", "times"), HERE)
def test_it_ends_as_it_should(moment: str, number: signal.Signals, times: int, tmp_path: Path) -> None:
    assert problems(tmp_path, moment, number, times) == []


def test_interrupt_while_torch_is_imported_prints_one_line(tmp_path: Path) -> None:
    words = words_of(tmp_path / "sweep", "device=cpu", "world_size=2", "parallel=ddp")
    driver = subprocess.Popen(
        [sys.executable, "-m", "dcpbench", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=tmp_path,
        start_new_session=True,
    )

    def catches_signals() -> bool:
        status = Path(f"/proc/{driver.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    wait_for(catches_signals)
    (agent,) = psutil.Process(driver.pid).children()
    assert os.getsid(agent.pid) == agent.pid, "a terminal sends it no signal"
    os.kill(driver.pid, signal.SIGSTOP)  # or it would end the agent at once
    os.killpg(driver.pid, signal.SIGINT)

    def has_imported() -> bool:
        return bool(agent.children()) or agent.status() == psutil.STATUS_ZOMBIE  # its resource tracker

    try:
        wait_for(has_imported)
        helpers = [agent, *agent.children()]
    finally:
        os.kill(driver.pid, signal.SIGCONT)
    err = driver.communicate(timeout=60)[1]
    assert err == "dcpbench: interrupted before a cell was run; nothing was written\n"
    assert driver.returncode == 130
    assert not (tmp_path / "sweep").exists()
    assert psutil.wait_procs(helpers, timeout=60)[1] == []


def test_an_agent_that_is_stopped_is_replaced(sweep: Callable[..., Finished]) -> None:
    """It neither forks the next ranks nor says that those before have ended."""
    dies = "scenario: dies, scenario.options.how: stops_agent, scenario.options.phase: train"
    blocks = (f"{{{dies}, seed: 1}}", "{scenario: save_load, seed: 3}", f"{{{dies}, seed: 4}}")
    matrix = [f"+hydra.sweeper.matrix.b{number}={block}" for number, block in enumerate(blocks)]
    asked = ("parallel=ddp", "saves=1", "device=cpu", "world_size=2", "retry=0", *SMALL)
    soon = partial(plant, "dcpbench.executors.agent", "ANSWER_LIMIT_S", 60.0)
    ended = sweep(*matrix, *asked, prepare=soon)
    assert [row["status"] for row in ended.rows] == ["error", "pass", "error"], ended.out
    assert {row["reason"] for row in ended.rows if row["status"] == "error"} == {
        "rank 0 in train without a save: ValueError: planted (support/deaths.py:181)"
    }
    assert ended.status == 1
    assert alive_in(ended.folder) == []
