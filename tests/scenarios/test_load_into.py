"""Load targets, and optimizers that are saved under numbers, on one rank."""

from pathlib import Path

import pytest

from dcpbench.cell import checks, steps
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.state import StatePart
from support.alone import bare_cell, config, run_alone, unexplained

pytestmark = pytest.mark.cell

SMALL = {"model": "short", "saves": 1, "train_steps": 2, "resume_steps": 1}
HERE = "after the load of step 2"


@pytest.mark.parametrize("into", ["gradients", "never_stepped"])
def test_target_is_restored(into: str) -> None:
    ran = run_alone(**SMALL, load_into=into)
    assert ran.verdict.status == "pass", ran.verdict.reason
    gradients = {"gradients.net1.weight", "gradients.net2.bias"}
    looked_at = ran.reports[0].checks["side_effect_free"].control[HERE]
    assert (gradients <= looked_at.keys()) is (into == "gradients")


@pytest.mark.parametrize(
    ("into", "filled", "gradients", "scheduled"),
    [
        ({}, True, False, True),
        ({"load_into": "never_stepped"}, False, False, True),
        ({"load_into": "gradients"}, True, True, True),
        ({"load_into": "never_stepped_gradients"}, False, True, True),
        ({"load_into": "no_scheduler"}, True, False, False),
    ],
)
def test_targets_before_the_load(
    into: dict[str, str], filled: bool, gradients: bool, scheduled: bool, tmp_path: Path
) -> None:
    cell = bare_cell(tmp_path, config(**SMALL, **into))
    target = steps.build_target(cell, steps.Story())
    nothing = Checkpoint(0, "", {})
    checks.make_different(cell, target, nothing)
    assert bool(target.optimizer.state) is filled
    assert all((value.grad is not None) is gradients for value in target.model.parameters())
    assert ("initial_lr" in target.optimizer.param_groups[0]) is scheduled
    assert bool(target.extra()[StatePart.scheduler]) is scheduled


def test_load_that_changes_gradients_is_reported() -> None:
    ran = run_alone("gradients_touched", **SMALL, load_into="gradients")
    assert ran.verdict.fault_seen is True, ran.verdict.reason
    assert {one.check for one in ran.verdict.failed} == {"side_effect_free"}


def test_unstepped_optimizer_is_empty_before_the_load() -> None:
    ran = run_alone(**SMALL, load_into="never_stepped_gradients")
    missing = ran.reports[0].checks["optim_equal"].distinct.values()
    assert "state.net1.weight.exp_avg" in {finding.name for finding in missing}
    assert unexplained(ran, "gradients-at-load") == set()


def test_other_mismatch_is_not_a_known_failure() -> None:
    ran = run_alone("weight_lowest_bit", **SMALL, load_into="never_stepped_gradients")
    assert "net1.weight" in unexplained(ran, "gradients-at-load")
