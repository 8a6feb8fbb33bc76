"""Whatever asks a sweep to end: a true last line, the rows and reports that there are, and nobody left."""

import importlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, Finished, alive_in, hanging, start, wait_for, words_of

pytestmark = pytest.mark.slow

HANGS = ("-m", "scenario=save_load,hangs", "parallel=ddp", "device=cpu", "world_size=3", "saves=1", *SMALL)


@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGINT, 5),
        (signal.SIGTERM, 1),
        (signal.SIGTERM, 5),
        (signal.SIGHUP, 1),
        (signal.SIGQUIT, 2),
    ],
)
def test_it_ends_with_the_rows_that_there_are(tmp_path: Path, number: signal.Signals, times: int) -> None:
    folder = tmp_path / "sweep"
    driver = start(*words_of(folder, *HANGS), cwd=tmp_path)
    wait_for(lambda: hanging(folder))
    for _ in range(times):
        os.killpg(driver.pid, number)
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 128 + number, err
    assert "Traceback" not in err
    assert "interrupted: 1 of 2 cells have a row" in err
    assert "1 cells: 1 pass" in out
    assert len((folder / "results.jsonl").read_text().splitlines()) == 1
    assert all((folder / name).stat().st_size for name in ("results.csv", "report.html", "junit.xml"))
    assert alive_in(folder) == []


def interrupt_at(module: str, name: str) -> None:
    """Have the driver be told to end where it calls a function."""
    place = importlib.import_module(module)
    function = getattr(place, name)

    def told(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)

    setattr(place, name, told)


@pytest.mark.parametrize(
    ("module", "name", "rows", "said"),
    [
        ("dcpbench.sweep.plan.job", "plan", 0, "dcpbench: interrupted before a cell was run\n"),
        ("dcpbench.report.show", "write_reports", 1, "1 cells in "),
    ],
    ids=["composing", "reports"],
)
def test_at_other_moments_too(
    sweep: Callable[..., Finished], module: str, name: str, rows: int, said: str
) -> None:
    cell = ("parallel=none", "world_size=1", "device=cpu", "saves=1", *SMALL)
    ended = sweep(*cell, prepare=partial(interrupt_at, module, name))
    assert ended.status == 128 + signal.SIGTERM, ended.err
    assert len(ended.rows) == rows
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert (ended.folder / "report.html").exists() == bool(rows)
    assert alive_in(ended.folder) == []
