"""Load targets, and optimizers that are saved under numbers, on one rank."""

from pathlib import Path

import pytest

from dcpbench.cell import checks, steps
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.state import Name, StatePart, key_of, text_of
from dcpbench.workloads.build_run import build
from support.alone import bare_cell, config, run_alone, unexplained, world

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


@pytest.mark.parametrize("scenario", ["chain", "convert"])
def test_optimizer_is_restored_by_numbers(scenario: str) -> None:
    ran = run_alone(**{**SMALL, "saves": 2}, scenario=scenario, optimizer_state="plain", verify="deep")
    assert ran.verdict.status == "pass", ran.verdict.reason
    whole = ran.verdict.details["checks"]["checkpoint_whole"]["control"]
    assert whole


def test_moment_lost_by_its_number_is_reported() -> None:
    ran = run_alone("exp_avg_zeroed", **SMALL, optimizer_state="plain")
    assert ran.verdict.fault_seen is True, ran.verdict.reason


def test_optimizer_keys_are_numbers() -> None:
    named, numbered = (
        build(config(model="short", optimizer="adamw_groups", **how), world(), 0)
        for how in ({}, {"optimizer_state": "plain"})
    )
    assert named.numbers == {}
    # Weights are the first group.
    assert numbered.numbers == {"net1.weight": 0, "net2.weight": 1, "net1.bias": 2, "net2.bias": 3}
    keys: dict[Name, str] = {
        ("state", "net1.bias", "exp_avg"): "optimizer.state.2.exp_avg",
        ("param_groups", 0, "lr"): "optimizer.param_groups.0.lr",
    }
    for name, key in keys.items():
        assert key_of(StatePart.optimizer, name, numbered.numbers) == key
        assert key_of(StatePart.optimizer, name, named.numbers) == f"optimizer.{text_of(name)}"
    assert key_of(StatePart.extra, ("state", "net1.bias"), numbered.numbers) == "state.net1.bias"
