"""A sweep that a sweeper other than dcpbench's own drives: batches, one folder, a number a cell."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conftest import SMALL, Finished, run, tiered
from dcpbench.config.errors import ConfigError
from dcpbench.sweep.app import objective_of
from support.rows import row

pytestmark = pytest.mark.slow

ONE_RANK = ("parallel=none", "device=cpu", "world_size=1", "saves=1", *SMALL)
OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1")


def is_one_whole_sweep(ended: Finished) -> bool:
    """Check that the folder has one sweep, a row for each cell, and every file built from the rows."""
    names = [row["cell"] for row in ended.rows]
    record = json.loads((ended.folder / "sweep.json").read_text())
    files = ("results.csv", "report.html", "junit.xml", "environment.json", "multirun.yaml")
    csv = (ended.folder / "results.csv").read_text().splitlines()
    return (
        record["cells"] == names
        and len(set(names)) == len(names) == len(csv) - 1
        and all((ended.folder / name).is_file() for name in files)
        and all((ended.folder / name / ".hydra" / "config.yaml").is_file() for name in names)
    )


@pytest.mark.parametrize("batch", tiered(["null", "2"], "2"))
def test_hydras_basic_sweeper(batch: str, tmp_path: Path) -> None:
    asked = ("hydra/sweeper=basic", f"hydra.sweeper.max_batch_size={batch}", "seed=1,2,1")
    ended = run(tmp_path / "sweep", *ONE_RANK, *asked)
    assert ended.status == 0, ended.err
    assert is_one_whole_sweep(ended)
    assert [row["seed"] for row in ended.rows] == [1, 2, 1]
    assert [row["cell"].rpartition(",")[2] for row in ended.rows] == ["seed=1", "seed=2", "seed=1#2"]
    assert ended.out.count("3 cells: 3 pass") == 1, "one table"
    assert ("[1/2] pass" in ended.err) == (batch == "2")
    assert "[3/3] pass" in ended.err


@pytest.mark.extended
def test_optuna_finds_the_least_of_a_metric(tmp_path: Path) -> None:
    asked = (*OPTUNA, "hydra.sweeper.n_trials=4", "objective=save_s", "storage.thread_count=1,2")
    ended = run(tmp_path / "sweep", *ONE_RANK, *asked)
    assert ended.status == 0, ended.err
    assert is_one_whole_sweep(ended)
    assert len(ended.rows) == 4
    assert not any("objective" in row["overrides"] for row in ended.rows)
    best: Any = OmegaConf.load(ended.folder / "optimization_results.yaml")
    assert best.best_value == min(row["save_s"] for row in ended.rows)


def test_failed_cell_is_never_the_best(tmp_path: Path) -> None:
    grid = ("hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=2", "scenario=save_load,kills_itself")
    ended = run(tmp_path / "sweep", *ONE_RANK, *OPTUNA, *grid, "objective=cell_s", "retry=0")
    assert ended.status == 1, ended.err
    assert is_one_whole_sweep(ended)
    assert {row["status"] for row in ended.rows} == {"pass", "vacuous"}
    best: Any = OmegaConf.load(ended.folder / "optimization_results.yaml")
    assert best.best_params == {"scenario": "save_load"}
    assert best.best_value == ended.row(status="pass")["cell_s"]


REFUSED = {
    "no such metric": ([*OPTUNA, "objective=stall"], ["objective=stall", "save_stall_s"]),
    "no number": ([*OPTUNA, "objective=status"], ["objective=status", "save_stall_s"]),
    "no objective": (list(OPTUNA), ["objective=null", "hydra/sweeper=optuna"]),
    "no cells": ([OPTUNA[0], "objective=save_s", "hydra.sweeper.n_jobs=0"], ["asks for no cell"]),
    "plan": (["hydra/sweeper=basic", "plan=true"], ["plan=true", "hydra/sweeper=basic"]),
    "repeats": (["hydra/sweeper=basic", "repeats=2"], ["repeats=2", "hydra/sweeper=basic"]),
    "wrong cell": (["hydra/sweeper=basic", "save_at=1,-1"], ["save_at=-1", "at least 0"]),
    "sweeper": (["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=0"], ["hydra/sweeper=basic failed"]),
}


@pytest.mark.parametrize("case", tiered(REFUSED, "no objective", "plan", "repeats", "wrong cell", "sweeper"))
def test_refused_sweeper_starts_nothing(case: str, sweep: Callable[..., Finished]) -> None:
    overrides, words = REFUSED[case]
    ended = sweep(*ONE_RANK, *overrides)
    assert ended.status == 2, ended.err
    assert not ended.out
    (line,) = [line for line in ended.err.splitlines() if "A new study created" not in line]
    assert line.startswith("dcpbench: ")
    assert all(word in line for word in words), line
    assert not ended.folder.exists()


def test_wrong_batch_ends_a_begun_sweep(tmp_path: Path) -> None:
    """Hydra's basic sweeper checks a batch when it reaches it."""
    asked = ("hydra/sweeper=basic", "hydra.sweeper.max_batch_size=1", "saves=1,0")
    ended = run(tmp_path / "sweep", "parallel=none", "device=cpu", "world_size=1", *SMALL, *asked)
    assert ended.status == 2
    assert "dcpbench: saves=0: must be at least 1" in ended.err
    assert [row["status"] for row in ended.rows] == ["pass"]
    assert "1 cell: 1 pass" in ended.out, "what there is is shown"
    resumed = [sys.executable, "-m", "dcpbench", f"resume={ended.folder}"]
    again = subprocess.run(resumed, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "hydra/sweeper=basic" in again.stderr
    assert len(ended.rows) == 1


def composed(objective: str | None, **sweeper: Any) -> Any:
    return OmegaConf.create({"objective": objective, "hydra": {"sweeper": sweeper}})


@pytest.mark.parametrize(
    ("sweeper", "worst"),
    [
        ({}, math.inf),
        ({"direction": "minimize"}, math.inf),
        ({"direction": "maximize"}, -math.inf),
        ({"optim": {"maximize": True}}, -math.inf),
        ({"ax_config": {"experiment": {"minimize": False}}}, -math.inf),
        ({"ax_config": {"experiment": {"minimize": True}}}, math.inf),
    ],
)
def test_objective_of_a_row(sweeper: dict[str, Any], worst: float) -> None:
    value_of = objective_of(composed("save_s", **sweeper))
    assert value_of(row(save_s=0.5)) == 0.5
    assert value_of(row(save_s=None)) == worst
    assert value_of(row(save_s=0.5, status="fail")) == worst
    assert value_of(row(save_s=0.5, flaky=True)) == worst
    assert value_of(None) == worst
    assert objective_of(composed(None))(row(save_s=0.5)) is None


def test_objective_has_to_be_a_metric() -> None:
    for wrong in ("reason", "model_equal", "seed", "nothing"):
        with pytest.raises(ConfigError, match=f"objective={wrong}: .* save_stall_s"):
            objective_of(composed(wrong))
