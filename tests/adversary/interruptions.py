"""Drivers that are sent signals at a known moment: they, or a rank, wait there until that has happened."""

import importlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from conftest import SMALL, start, wait_for, words_of
from dcpbench.cell.cell import Cell
from dcpbench.config.text import counted
from dcpbench.scenarios.save_load import save_load
from support.drivers import plant

IN_DRIVER = {
    "composing": ("dcpbench.sweep.run", "cells_of"),
    "probe": ("dcpbench.executors.machine", "probe"),
    "planning": ("dcpbench.plan.plan", "_planned"),
    "begin": ("dcpbench.sweep.folder", "SweepRecord.write"),
    "join": ("dcpbench.executors.rank_group", "_fork"),
    "row": ("dcpbench.records.store", "append_row"),
    "row written": ("dcpbench.sweep.driver", "replace"),
    "end of ranks": ("dcpbench.sweep.driver", "SweepDriver.end"),
    "report": ("dcpbench.report.show", "write_reports"),
    "exit": ("dcpbench.sweep.driver", "exit_status"),
}
"""Moments of the driver, each named by a function that it calls then."""

IN_RANK = ("build", "train", "save", "upload", "load", "verify")
"""Phases of the second cell of two."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LONGEST_S = 60.0
_NO_ROW, _BEFORE = "0 of 2 cells done", "dcpbench: interrupted before a cell was run"
_REPORTS = ("results.csv", "report.html", "junit.xml")


def pause(marker: Path) -> None:
    """Wait until what `marker` asks for has happened, or the wait is interrupted."""
    marker.touch()
    until = time.monotonic() + _LONGEST_S
    while marker.exists() and time.monotonic() < until:
        time.sleep(0.01)


def pauses(cell: Cell, phase: str, marker: str) -> None:
    """`save_load`, in which rank 0 waits in a phase, the first time that it reaches it."""
    waits = [phase] if cell.world.rank == 0 else []

    def announce(name: str) -> None:
        cell.announce(name)
        if name in waits:
            waits.remove(name)
            pause(Path(marker))

    save_load(replace(cell, announce=announce))


def pause_driver(module: str, name: str, marker: Path) -> None:
    """Make the driver wait where it first calls a function."""
    tempfile.tempdir = None  # where the agent of the tests has its own files
    place: Any = importlib.import_module(module)
    *outer, name = name.split(".")
    for one in outer:
        place = getattr(place, one)
    function = getattr(place, name)
    waited: list[bool] = []

    def waits(*arguments: Any, **named: Any) -> Any:
        if not waited:
            waited.append(True)
            pause(marker)
        return function(*arguments, **named)

    setattr(place, name, waits)


def problems(folder: Path, moment: str, number: signal.Signals, times: int) -> list[str]:
    """Run a sweep of two cells into a folder that is made below this one, send its driver and all that is in
    its process group a signal at a moment, so often, and let them go on; what of its end is not right."""
    marker, sweep = folder / "pauses", folder / "sweep"
    phase = moment if moment in IN_RANK else "none"
    cells = (f"scenario.options.phase=none,{phase}" if moment in IN_RANK else "seed=1,2", "scenario=pauses")
    few = ("parallel=ddp", "device=cpu", "world_size=2", "saves=1", "save=async", "retry=0", *SMALL)
    words = words_of(sweep, "-m", *cells, f"scenario.options.marker={marker}", *few)
    prepare = partial(pause_driver, *IN_DRIVER[moment], marker) if moment in IN_DRIVER else None
    driver = start(*words, cwd=folder, prepare=prepare)
    wait_for(lambda: marker.exists() or driver.poll() is not None)
    started = psutil.Process(driver.pid).children(recursive=True)
    for _ in range(times):
        with suppress(ProcessLookupError):  # it can end at the first
            os.killpg(driver.pid, number)
        time.sleep(0.01)  # or several are one
    marker.unlink(missing_ok=True)
    out, err = driver.communicate(timeout=120)
    return [*_wrong(sweep, driver.returncode, number, out, err), *_left(started)]


def stopped(folder: Path, which: int) -> tuple[str, list[str]] | None:
    """Run a sweep of two cells, one of whose processes is stopped for good while the second trains; which one
    it was, and what of the end is not right. None where it has no more processes than `which`."""
    marker, sweep = folder / "pauses", folder / "sweep"
    limits = ("timeouts.cell_s=20", "timeouts.join_s=20", "retry=0")
    few = ("parallel=ddp", "device=cpu", "world_size=2", "saves=1", *limits, *SMALL)
    cells = ("scenario=pauses", "scenario.options.phase=none,train", f"scenario.options.marker={marker}")
    soon = partial(plant, "dcpbench.executors.agent", "ANSWER_LIMIT_S", 20.0)
    driver = start(*words_of(sweep, "-m", *cells, *few), cwd=folder, prepare=soon)
    wait_for(marker.exists)
    started = psutil.Process(driver.pid).children(recursive=True)
    if which >= len(started):
        driver.close()
        return None
    process = started[which]
    name = "agent" if process.ppid() == driver.pid else "rank or resource tracker"
    process.suspend()
    marker.unlink()
    out, err = driver.communicate(timeout=120)
    found = [] if driver.returncode in (0, 1) else [f"exit status {driver.returncode}"]
    if "2 cells: " not in out or "Traceback" in err:
        found.append(f"it said {err.strip().splitlines()[-1]}")
    return name, [*found, *_left(started)]


def _wrong(folder: Path, status: int | None, number: signal.Signals, out: str, err: str) -> Iterator[str]:
    path = folder / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if status != 128 + number:
        yield f"exit status {status}"
    if "Traceback" in out + err:
        yield "a traceback"
    if (folder / "superseded.jsonl").exists():
        yield "a row that was written is not among those it knows"
    if any(row["status"] != "pass" for row in rows):
        yield f"rows {[row['status'] for row in rows]}"
    ran = counted(len(rows), "cell")
    true = (f"{len(rows)} of 2 cells done", f"{ran} in ") if rows else (_NO_ROW, _BEFORE)
    if not any(line.startswith(true) or f"interrupted: {true[0]}" in line for line in err.splitlines()):
        yield f"with {len(rows)} rows it said: {err.strip().splitlines()[-1]}"
    if rows and f"{ran}: {len(rows)} pass" not in out:
        yield "no table"
    missing = [name for name in _REPORTS if rows and not (folder / name).exists()]
    if missing:
        yield f"no {', '.join(missing)}"


def _left(started: list[psutil.Process]) -> Iterator[str]:
    # An agent that was still at its imports sees only after them that nobody needs it.
    for process in psutil.wait_procs(started, timeout=_LONGEST_S)[1]:
        with suppress(psutil.Error):
            yield f"process {process.pid} is left: {' '.join(process.cmdline())[:80]}"
