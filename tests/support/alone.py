"""Cells on one rank that is this very process: what a check sees, in a second."""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from dcpbench.cell.cell import Cell, Uploads
from dcpbench.code.provenance import conf_folders
from dcpbench.config.groups import FaultConfig
from dcpbench.config.schema import Config
from dcpbench.core.plugins import declared_values, load_plugins
from dcpbench.core.rank_report import RankReport
from dcpbench.plan import known_failures
from dcpbench.rank.messages import CellSpec, RunId
from dcpbench.rank.run_cell import run_cell
from dcpbench.runs.build_run import build
from dcpbench.runs.own_run import OwnRun
from dcpbench.verdict.verdict import Verdict
from dcpbench.workloads.workload import batches_of
from dcpbench.workloads.world import World
from support.ends import reported
from support.jobs import job

_CHOICES = {
    "scenario": "save_load",
    "parallel": "none",
    "model": "dummy",
    "optimizer": "adam",
    "checkpointer": "dcp",
    "save": "sync",
    "storage": "file",
    "state_dict": "sharded",
    "scheduler": "step",
    "load_into": "default",
    "executor": "local",
    "component": "none",
}
ONCE: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}
TWICE = {**ONCE, "saves": 2}
_TESTS = Path(__file__).parents[1]
_FOLDERS = (*conf_folders(), _TESTS / "conf", *_TESTS.glob("plugins/*/conf"))

STAGES_ONCE = (torch.__version__ < "2.12") * "a DefaultStager of torch 2.11 stages once (docs/findings)"
"""Why saves after the first one fail with this torch if a stager is used again; empty if they do not."""

load_plugins()

gc.freeze()  # as ranks do: a cell begins with a collection, and what is imported is never garbage


def config(fault: str = "none", **values: Any) -> Config:
    """The configuration of a cell; of a group the name of its value."""
    chosen = tuple((group, values.pop(group, name)) for group, name in _CHOICES.items())
    base = OmegaConf.merge(_base(chosen), {"device": "cpu", **values})
    made = OmegaConf.to_object(base)
    assert isinstance(made, Config)
    if fault != "none":
        if not (declared := declared_values("fault")):
            pytest.skip("the plug-in that declares faults was deleted")
        made.fault = declared[fault]
    return made


@cache
def _base(chosen: tuple[tuple[str, str], ...]) -> Any:
    base = OmegaConf.structured(Config(world_size=1, fault=FaultConfig("none")))
    for group, name in chosen:
        path = next(path for folder in _FOLDERS if (path := folder / group / f"{name}.yaml").exists())
        base[group] = OmegaConf.merge(base[group], OmegaConf.load(path))
    return base


def world(rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> World:
    """A rank's view of a world in which there is nobody else."""
    return World(rank, size, torch.device("cpu"), group, group)


def trained(steps: int, **chosen: Any) -> OwnRun:
    """A run of a small model that has trained, on a rank with no others."""
    given = config(model="short", **chosen)
    run = build(given, world(), 0)
    run.train(batches_of(given, world().device), steps)
    return run


def bare_cell(folder: Path, given: Config | None = None, seen_by: World | None = None) -> Cell:
    """A cell in which nothing has happened yet."""
    here, report = seen_by or world(), RankReport(0)
    return Cell(given or config(model="short"), here, folder, _nobody, report, Uploads(_nobody))


@dataclass
class Ran:
    """A cell that has ended: its verdict, the report of each of its stages, what it told the driver, and what
    it left among its checkpoints."""

    verdict: Verdict
    reports: list[RankReport] = field(default_factory=list)
    announced: list[str] = field(default_factory=list)
    uploads: list[int] = field(default_factory=list)
    """Numbers of other saves in flight, whenever that changed."""
    left: list[str] = field(default_factory=list)


def run_alone(fault: str = "none", seen_by: World | None = None, **values: Any) -> Ran:
    """Run a cell, one stage after the other, on a rank that sees this world.

    Raises:
        Exception: whatever the scenario raised.
    """
    given = config(fault, **values)
    ran = Ran(Verdict("none"))
    deterministic = torch.are_deterministic_algorithms_enabled()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "checkpoints"
        checkpoints.mkdir()
        try:
            for stage in range(len(given.processes)):
                spec = CellSpec(RunId("tests", "cell", stage), given, folder, str(checkpoints))
                ran.reports.append(RankReport(0))
                tell = ran.announced.append, lambda since: ran.uploads.append(len(since))
                run_cell(spec, seen_by or world(), ran.reports[-1], *tell)
        finally:
            torch.use_deterministic_algorithms(deterministic)
        ran.left = sorted(path.name for path in checkpoints.iterdir())
    ran.verdict = job(given).verdict([reported([report]) for report in ran.reports])
    return ran


def alone(fault: str = "none", **values: Any) -> tuple[Verdict, RankReport]:
    """Run a cell; its verdict and the report of its last stage."""
    ran = run_alone(fault, **values)
    return ran.verdict, ran.reports[-1]


def unexplained(ran: Ran, known: str) -> set[str]:
    """Return the mismatches of a cell that are not listed as this known failure."""
    listed = [one for one in known_failures.default_list() if one.id == known]
    assert listed
    return {
        finding.name
        for report in ran.reports
        for check, seen in report.checks.items()
        for finding in seen.distinct.values()
        if not any(one.explains(check, finding) for one in listed)
    }


@contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    """Meanwhile this process is the only one of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _nobody(_: object) -> None:
    """Nobody follows the phases here."""
