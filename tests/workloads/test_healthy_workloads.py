"""Workloads and trainers with state of every kind: what is healthy passes, what torch refuses is a skip that
says so."""

import pytest

from conftest import Finished, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("healthy") / "sweep", "experiment=healthy_workloads")


def test_what_is_healthy_passes(sweep: Finished) -> None:
    assert sweep.rows, sweep.err
    assert {row["cell"]: row["reason"] for row in sweep.rows if row["status"] != "pass"} == {}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_python_values_in_optimizer_state_have_controls(sweep: Finished, parallel: str) -> None:
    row = sweep.row(model="support.healthy_workloads.python_state", parallel=parallel)
    control = row["details"]["checks"]["optim_equal"]["control"]
    for entry in ("step", "decay", "warm", "never", "last", "seen"):
        assert control[f"state.2.bias.{entry} in the checkpoint of step 1"], entry
