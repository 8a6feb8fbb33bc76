"""Rows and jobs as a test wants them."""

from pathlib import Path
from typing import Any

from dcpbench.config.cell_key import CellKey
from dcpbench.config.groups import Device, ScenarioConfig
from dcpbench.config.schema import Config
from dcpbench.records.row import Row
from dcpbench.sweep.plan.cells import SweepCell
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.plan.known_failures import KnownFailure

GIVEN: dict[str, Any] = {
    "cell": "a",
    "status": "pass",
    "reason": None,
    "scenario": "save_load",
    "parallel": "ddp",
    "compile": False,
    "save": "sync",
    "model": "dummy",
    "optimizer": "adam",
    "storage": "file",
    "world_size": 4,
    "device": "cpu",
    "seed": 0,
    "overrides": "parallel=ddp",
    "checkpointer": "dcp",
}


def row(**values: Any) -> Row:
    """A row, of a passed cell unless it is said otherwise; metrics and checks by their columns."""
    return Row.of({**GIVEN, **values})


def job(
    config: Config | None = None,
    known: tuple[KnownFailure, ...] = (),
    skip: str | None = None,
    **columns: Any,
) -> Job:
    """A job with these columns in its row."""
    decided = config or Config(
        scenario=ScenarioConfig(name="a", target="x.y"), world_size=4, device=Device.cpu
    )
    about = {name: value for name, value in GIVEN.items() if name not in ("status", "reason")}
    cell = SweepCell("a", [], decided, Path("a"), None, lambda: None)  # type: ignore[arg-type, return-value]
    return Job(cell, decided, CellKey.of(decided), skip, known, {**about, **columns})
