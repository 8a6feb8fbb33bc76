"""Load targets on one rank."""

from pathlib import Path

import pytest

from dcpbench.cell import checks, steps
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.mismatch import Place
from support.alone import bare_cell, config, run_alone

pytestmark = pytest.mark.cell

SMALL = {"model": "short", "saves": 1, "train_steps": 2, "resume_steps": 1}
HERE = Place("loaded", 2)


@pytest.mark.parametrize("into", ["gradients", "never_stepped"])
def test_target_is_restored(into: str) -> None:
    ran = run_alone(**SMALL, load_into=into)
    assert ran.verdict.status == "pass", ran.verdict.reason
    gradients = {"gradients.net1.weight", "gradients.net2.bias"}
    looked_at = ran.reports[0].checks["side_effect_free"].control[HERE]
    assert (gradients <= looked_at.keys()) is (into == "gradients")


@pytest.mark.parametrize(
    ("into", "filled", "gradients"),
    [("default", True, False), ("never_stepped", False, False), ("gradients", True, True)],
)
def test_targets_before_the_load(into: str, filled: bool, gradients: bool, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**SMALL, load_into=into))
    target = steps.build_target(cell, steps.ReferenceRun())
    nothing = Checkpoint(0, "", {})
    checks.perturb_target(cell, target, nothing)
    assert bool(target.optimizer.state) is filled
    assert all((value.grad is not None) is gradients for value in target.model.parameters())


def test_load_that_changes_gradients_is_reported() -> None:
    ran = run_alone("gradients_touched", **SMALL, load_into="gradients")
    assert ran.verdict.fault_seen is True, ran.verdict.reason
    assert {one.check for one in ran.verdict.failed} == {"side_effect_free"}
