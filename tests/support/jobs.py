"""Planned cells as a test wants them."""

from pathlib import Path
from typing import Any

from dcpbench.config.groups import Device, ScenarioConfig
from dcpbench.config.schema import Config
from dcpbench.executors.machine import Machine
from dcpbench.plan.plan import PlannedCell, identity_of, world_specs_of
from dcpbench.verdict.known_failures import KnownFailure
from support.rows import row


def job(
    config: Config | None = None,
    known: tuple[KnownFailure, ...] = (),
    skip: str | None = None,
    **columns: Any,
) -> PlannedCell:
    """A planned cell with these columns in its row."""
    scenario = ScenarioConfig(name="a", target="x.y")
    decided = config or Config(scenario=scenario, world_size=4, device=Device.cpu)
    given = row()
    names = ("cell", "scenario", "parallel", "save", "model", "optimizer", "storage", "checkpointer")
    about = {name: given[name] for name in (*names, "compile", "world_size", "device", "seed", "overrides")}
    kinds = world_specs_of(decided, Machine(4, {}))
    about_cell = "a", [], decided, Path("a"), None, decided, identity_of(decided)
    return PlannedCell(*about_cell, skip, known, {**about, **columns}, kinds)
