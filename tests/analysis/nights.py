"""Sweeps of many nights, made up."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dcpbench.records.row import Row
from dcpbench.report.history import default_metrics
from report.sweeps import cell, folder_with

NIGHTS = 24
METRICS = default_metrics()


def night(folder: Path, number: int, *rows: Row) -> Path:
    """A sweep of that night with these rows, as the driver leaves it."""
    then = {
        "started_at": f"2026-{10 + number // 30:02}-{1 + number % 30:02}T01:00:00+00:00",
        "dcpbench_commit": f"{0xABC0000 + number:x}".ljust(40, "0"),
        "torch_version": "2.13.0" if number < NIGHTS // 2 else "2.14.0",
    }
    return folder_with(folder / f"night-{number:02}", *(replace(row, **then) for row in rows))


def costs(random: np.random.Generator, factor: float = 1) -> dict[str, float]:
    return {name: float(0.1 * factor * np.exp(random.normal(0, 0.03))) for name in METRICS}


def three_cells(folder: Path) -> Path:
    """ddp fails in the last two nights; fsdp's load_s is 30 % more from the 12th on; hsdp is as ever."""
    random = np.random.default_rng(3)
    for number in range(NIGHTS):
        failed = {"status": "fail", "reason": "optim_equal: rank 1:\nnet.weight"}
        ddp = cell("ddp", **costs(random), **(failed if number >= NIGHTS - 2 else {}))
        slower = costs(random)
        slower["load_s"] *= 1.3 if number >= NIGHTS // 2 else 1
        night(folder, number, ddp, cell("fsdp", **slower), cell("hsdp", **costs(random)))
    return folder
