"""A plug-in of pytest that runs each test alone, with its own fixtures, and records what it costs and enters.

For each test, `<ENTERED>/<worker>.jsonl` gets a line: the outcome, the fixtures that it shares, seconds, CPU
seconds with those of drivers and ranks, the numbers of the blocks that were entered, and the values that
cells of its sweeps had.
"""

import builtins
import json
import operator
import os
import re
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import entered
import psutil
import pytest
from _pytest.runner import runtestprotocol

from support import drivers

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_RECORD = Path(os.environ[entered.FOLDER], f"{_WORKER}.jsonl")
_VALUE = r'"(scenario|parallel|checkpointer|storage|save|executor|state_dict|status)": "(.*?)"'


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Leave those that are recorded; begin with what costs least, and then take the files in turns."""
    yield
    lines = [line for path in _RECORD.parent.glob("*.jsonl") for line in path.read_text().splitlines()]
    recorded = {json.loads(line)["test"] for line in lines}
    items[:] = [item for item in items if item.nodeid not in recorded]
    turns = Counter[str]()

    def turn(item: pytest.Item) -> tuple[int, int]:
        marks = {mark.name for mark in item.iter_markers()}
        tier = [bool(marks & kind) for kind in ({"slow", "cell", "browser"}, {"extended"}, {"exhaustive"})]
        turns[str(item.path)] += 1
        return sum(tier), turns[str(item.path)]

    items.sort(key=turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what tests share, so that none of them pays for it."""
    if not session.config.getoption("collectonly") and not _is_controller(session.config):
        import torch.distributed.checkpoint  # noqa: F401

        for agent in (drivers.first, drivers.restarted):
            drivers.fork(operator.is_, agent=agent)[1].wait()


def pytest_sessionstart(session: pytest.Session) -> None:
    """What this worker and its processes enter goes to a file of its own."""
    if _is_controller(session.config):
        return
    file = Path(os.environ[entered.FOLDER], f"{_WORKER}.map")
    file.write_bytes(bytes(Path(os.environ[entered.FOLDER], "map").stat().st_size))
    os.environ[entered.MAP] = str(file)
    drivers.shared = None  # its agents would write to the file of another process
    entered.use(file)


def _is_controller(config: pytest.Config) -> bool:
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Fixtures make what this test alone needs."""
    items, item.session.items = item.session.items, [item]
    try:
        return (yield)
    finally:
        item.session.items = items


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    """Run a test as if no other was selected, and record it."""
    noted: memoryview = vars(builtins)["__entered__"]
    noted[:] = bytes(len(noted))
    at, began, used = time.time(), time.monotonic(), _cpu_seconds()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    record = {
        "test": item.nodeid,
        "outcome": next((report.outcome for report in reports if not report.passed), "passed"),
        "marks": sorted({mark.name for mark in item.iter_markers()}),
        "shares": _shared(item),
        "seconds": round(time.monotonic() - began, 3),
        "cpu_s": round(_cpu_seconds() - used, 3),
        "blocks": [number for number, is_entered in enumerate(noted) if is_entered],
        "values": _values(item.config, at),
    }
    with _RECORD.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")
    return True


def _shared(item: pytest.Item) -> list[str]:
    """The fixtures that other tests of its file use too."""
    definitions = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    path = item.nodeid.partition("::")[0]
    return [f"{path}::{name}" for name, made in definitions.items() if made[-1].scope == "module"]


def _cpu_seconds() -> float:
    used = sum(os.times()[:4])
    for agent in (drivers.first, drivers.restarted):
        with suppress(psutil.Error):
            used += sum(psutil.Process(agent.pid).cpu_times()[:4]) if agent.runs() else 0
    return used


def _values(config: pytest.Config, since: float) -> list[str]:
    """The values of the cells whose rows were written since then."""
    found = set[str]()
    for folder, _, names in os.walk(config._tmp_path_factory.getbasetemp()):  # type: ignore[attr-defined]
        file = Path(folder, "results.jsonl")
        if file.name in names and file.is_file() and file.stat().st_mtime >= since:
            text = file.read_text("utf-8", "replace")
            found |= {f"{name}={value}" for name, value in re.findall(_VALUE, text)}
    return sorted(found)
