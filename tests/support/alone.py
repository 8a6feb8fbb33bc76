"""Cells on one rank that is this very process, without a process group: what a check sees, in a second."""

import gc
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dcpbench.config.schema import Config, conf_folder
from dcpbench.executors.base import Outcome
from dcpbench.faults.registry import load_faults
from dcpbench.records.rank_report import RankReport
from dcpbench.sweep.run.verdict import Verdict, verdict_of
from dcpbench.worker.messages import CellSpec, RunId
from dcpbench.worker.run_cell import run_cell
from dcpbench.workloads.world import World
from support.jobs import job

_CHOICES = {
    "scenario": "save_load",
    "parallel": "none",
    "model": "dummy",
    "optimizer": "adam",
    "checkpointer": "dcp",
    "save": "sync",
    "storage": "file",
}

gc.freeze()  # as ranks do: a cell begins with a collection, and what is imported is never garbage


def config(fault: str = "none", **values: Any) -> Config:
    """The configuration of a cell; of a group the name of its value."""
    base = OmegaConf.structured(Config(world_size=1, fault=load_faults()[fault]))
    for group, name in _CHOICES.items():
        base[group] = OmegaConf.merge(base[group], _chosen(group, values.pop(group, name)))
    made = OmegaConf.to_object(OmegaConf.merge(base, {"device": "cpu", **values}))
    assert isinstance(made, Config)
    return made


@cache
def _chosen(group: str, name: str) -> Any:
    return OmegaConf.load(conf_folder() / group / f"{name}.yaml")


def alone(fault: str = "none", **values: Any) -> tuple[Verdict, RankReport]:
    """Run a cell; its verdict and the report that it is made of.

    Raises:
        Exception: whatever the scenario raised.
    """
    given = config(fault, **values)
    report = RankReport(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with tempfile.TemporaryDirectory() as folder:
        spec = CellSpec(RunId("tests", "cell", 0, 0), given, folder, str(Path(folder) / "checkpoints"))
        Path(spec.checkpoints).mkdir()
        try:
            run_cell(spec, World(0, 1, torch.device("cpu"), None), report, _nobody, _nobody)
        finally:
            torch.use_deterministic_algorithms(deterministic)
    return verdict_of(job(given), [Outcome([report])]), report


def _nobody(_: object) -> None:
    """Nobody follows the phases here."""
