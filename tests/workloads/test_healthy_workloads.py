"""Workloads and trainers with state of every kind: what is healthy passes, what torch refuses is a skip that
says so."""

import pytest

from conftest import Finished, run

pytestmark = pytest.mark.slow

LOSES_ITS_BASE = "support.healthy_workloads.LosesItsBase"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("healthy") / "sweep", "experiment=healthy_workloads")


def test_what_is_healthy_passes(sweep: Finished) -> None:
    assert sweep.rows, sweep.err
    healthy = [row for row in sweep.rows if row["model"] != LOSES_ITS_BASE]
    assert {row["cell"]: row["reason"] for row in healthy if row["status"] != "pass"} == {}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_python_values_in_optimizer_state_have_controls(sweep: Finished, parallel: str) -> None:
    row = sweep.row(model="support.healthy_workloads.python_state", parallel=parallel)
    control = row["details"]["checks"]["optim_equal"]["control"]
    for entry in ("step", "decay", "warm", "never", "last", "seen"):
        assert control[f"state.2.bias.{entry} in the checkpoint of step 1"], entry


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_what_is_not_saved_of_a_model_has_to_be_built_alike(sweep: Finished, parallel: str) -> None:
    same = sweep.row(model="support.healthy_workloads.OnlyTheAdapter", parallel=parallel)
    control = same["details"]["checks"]["model_equal"]["control"]
    assert control["base.0.weight in the checkpoint of step 1"]
    other = sweep.row(model=LOSES_ITS_BASE, parallel=parallel)
    assert other["model_equal"] is False
    assert "base.0.bias (param) in the checkpoint of step 1" in other["reason"]
