"""How long the history of many sweeps takes, as a user starts it: a process of its own, and no cache.

python bench/history.py --sweeps 1000 --cells 200

The folder is made up from the rows of docs/sample-sweep: costs with noise, in some cells a step, some rows
that fail. `--folder` keeps it for the next time.
"""

# ruff: noqa: T201

import argparse
import datetime
import hashlib
import io
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_history import history
from dcpbench.analysis.frame import read_sweeps
from dcpbench.records.store import RESULTS_JSONL
from dcpbench.report.document import render
from dcpbench.report.history import contents, default_metrics, strip_length

SAMPLE = Path(__file__).parents[1] / "docs" / "sample-sweep" / RESULTS_JSONL
COSTS = ("build_s", "train_s", "save_s", "save_stall_s", "load_s", "verify_s", "cell_s")
FIRST_NIGHT = datetime.datetime(2024, 2, 26, 1, 0, tzinfo=datetime.UTC)
NOISE = 0.03
STEP = 0.10


def main() -> None:
    """Make the folder if it is not there, then print the times of the command on it."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sweeps", type=int, default=1000)
    arguments.add_argument("--cells", type=int, default=200)
    arguments.add_argument("--folder", type=Path, help="made there and kept, or used as it is there")
    arguments.add_argument("--times", type=int, default=3)
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch) / "nights"
        if not folder.exists():
            make(folder, asked.sweeps, asked.cells)
        machine = f"{len(os.sched_getaffinity(0))} CPU cores, Python {platform.python_version()}"
        print(f"{machine}, numpy {np.__version__}, pandas {pd.__version__}")
        print(f"{folder_size(folder)}")
        for _ in range(asked.times):
            print(f"{timed(folder)}; its parts: {split(folder)}")


def make(folder: Path, sweeps: int, cells: int) -> None:
    """A folder of so many sweeps of so many cells each, a night after the other."""
    random = np.random.default_rng(7)
    templates = list(cells_of(cells))
    steps = np.where(np.arange(cells) % 20, 0, random.integers(sweeps // 4, max(1, sweeps - 10), cells))
    for night in range(sweeps):
        noise = np.exp(random.normal(0, NOISE, (cells, len(COSTS))))
        slower = np.where((steps > 0) & (night >= steps), 1 + STEP, 1.0)
        failed = random.random(cells) < 0.001
        rows = [
            aged(
                template, night, dict(zip(COSTS, noise[cell] * slower[cell], strict=True)), bool(failed[cell])
            )
            for cell, template in enumerate(templates)
        ]
        write(folder / (FIRST_NIGHT + datetime.timedelta(days=night)).date().isoformat(), rows)


def cells_of(number: int) -> Iterator[dict[str, Any]]:
    """So many cells, no two alike: those of the sample, with other models and seeds."""
    samples = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    samples = [row for row in samples if row.get("repeat") in (0, None)]
    for cell in range(number):
        row = samples[cell % len(samples)]
        seed = cell // len(samples)
        overrides = f"{row['overrides'].replace(' repeat=0', '')} seed={seed}"
        yield {
            **row,
            "seed": seed,
            "overrides": overrides,
            "cell": overrides.replace(" ", ","),
            "repeat": 0,
        }


def aged(template: dict[str, Any], night: int, factors: dict[str, float], failed: bool) -> dict[str, Any]:
    """The row of a cell in one night."""
    began = FIRST_NIGHT + datetime.timedelta(days=night)
    costs = {name: template[name] and template[name] * factor for name, factor in factors.items()}
    end = {"status": "crash", "reason": 'rank 0 in save: killed, "signal 9"', **dict.fromkeys(COSTS)}
    of_code = {
        "dcpbench_commit": hashlib.sha256(bytes(night // 3)).hexdigest()[:40],
        "torch_version": f"2.{8 + night // 200}.0+cpu",
    }
    return {**template, **costs, **(end if failed else {}), **of_code, "started_at": began.isoformat()}


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    """A sweep's folder as the driver leaves it, but for the details of its rows."""
    folder.mkdir(parents=True)
    (folder / RESULTS_JSONL).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def folder_size(folder: Path) -> str:
    """How many sweeps there are and how large their files."""
    sizes = [path.stat().st_size for path in folder.glob(f"*/{RESULTS_JSONL}")]
    return f"{len(sizes)} sweeps, {RESULTS_JSONL} {sum(sizes) / 1e6:,.0f} MB"


def timed(folder: Path) -> str:
    """Seconds of the whole command, by the clock and on the processors."""
    words = [sys.executable, "-m", "dcpbench", "history", str(folder)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return f"the command: {wall_s:.2f} s (user {user_s:.2f} s, system {system_s:.2f} s)"


def split(folder: Path) -> str:
    """Seconds of its parts, in this process, which has imported what it needs."""
    times = [time.perf_counter()]
    rows = read_sweeps([folder], details=False)
    times.append(time.perf_counter())
    found = history(rows, default_metrics())
    times.append(time.perf_counter())
    for part in contents(found, [], False, strip_length(found, 120)):
        render(part, io.StringIO())
    times.append(time.perf_counter())
    parts = zip(("reading", "analysing", "printing"), pairwise(times), strict=True)
    return ", ".join(f"{name} {end - start:.2f} s" for name, (start, end) in parts)


if __name__ == "__main__":
    main()
