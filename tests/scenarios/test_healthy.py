"""Models and optimizers that users have, in which nothing is wrong: every cell passes, with power."""

import pytest

from conftest import Finished, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("healthy") / "sweep", "experiment=healthy")


def test_no_false_alarm(healthy: Finished) -> None:
    assert len(healthy.rows) == 8
    assert {row["cell"]: row["reason"] for row in healthy.rows if row["status"] != "pass"} == {}


CONSTANT = ("causal", "bias", "rope", "large", "odd", "narrow", "state.net1.weight.mu", "state.net1.bias.eta")


@pytest.mark.parametrize("name", CONSTANT)
def test_constants_have_controls(healthy: Finished, name: str) -> None:
    checks = healthy.row(model="adversarial", parallel="fsdp2")["details"]["checks"]
    assert checks["state_twin_close"]["control"][f"{name} after the uninterrupted run"]
    where = "in the checkpoint of step 2"
    restored = {**checks["model_equal"]["control"], **checks["optim_equal"]["control"]}
    assert restored[f"{name} {where}"]
