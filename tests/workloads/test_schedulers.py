"""Schedulers of every kind on one rank: their state is restored, and so is the learning rate."""

import pytest
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from dcpbench.config.schema import conf_folder
from dcpbench.runs.build_run import build
from dcpbench.workloads.workload import batches_of
from support.alone import config, run_alone, unexplained, world

pytestmark = pytest.mark.cell

KINDS = sorted(path.stem for path in (conf_folder() / "scheduler").iterdir())
CLASSES = {
    "step": StepLR,
    "multi_step": MultiStepLR,
    "sequential": SequentialLR,
    "cosine": CosineAnnealingLR,
    "lambda": LambdaLR,
    "one_cycle": OneCycleLR,
    "reduce_on_plateau": ReduceLROnPlateau,
}
LIMITED = {"multi_step"}
"""Those that torch does not restore."""
RATES = {"model": "short", "saves": 1, "train_steps": 2, "resume_steps": 2}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LIMITED])
def test_scheduler_is_restored(kind: str) -> None:
    ran = run_alone(**RATES, scheduler=kind)
    assert ran.verdict.status == "pass", ran.verdict.reason
    control = ran.verdict.details["checks"]["extra_equal"]["control"]
    assert any(name.startswith("scheduler.") for name in control)


@pytest.mark.parametrize("schedule", ["function", "partial", "object"])
def test_scheduler_with_user_functions_is_restored(schedule: str) -> None:
    workload = {"target": "support.own_workload.build", "options": {"schedule": schedule}}
    ran = run_alone(**{**RATES, "train_steps": 1}, workload=workload)
    assert ran.verdict.status == "pass", ran.verdict.reason
    control = ran.verdict.details["checks"]["extra_equal"]["control"]
    kept = {
        "function": {"scheduler.lr_lambdas"},
        "partial": set(),
        "object": {"scheduler.lr_lambdas.0.steps"},
    }
    assert {name.split()[0] for name in control if "lr_lambdas" in name} == kept[schedule]


def test_each_kind_is_known() -> None:
    assert sorted(CLASSES) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_changes_the_learning_rate(kind: str) -> None:
    given = config(model="short", scheduler=kind)
    run = build(given, world(), 0)
    assert type(run.scheduler) is CLASSES[kind]
    first = run.optimizer.param_groups[0]["lr"]
    for _ in range(9):
        run.train(batches_of(given, world().device), run.train_state.step + 1)
        if run.optimizer.param_groups[0]["lr"] != first:
            return
    pytest.fail(f"{first} after nine steps")


def test_workload_has_no_scheduler_by_default() -> None:
    run = build(config(model="short", workload={"target": "support.own_workload.build"}), world(), 0)
    assert "scheduler" not in run.state().keys() | run.extra().keys()
    ran = run_alone(workload={"target": "support.ordinary_workloads.named_tuple"}, saves=1, train_steps=2)
    assert (ran.verdict.status, ran.verdict.reason) == ("pass", None)


def test_integer_keys_are_not_restored() -> None:
    ran = run_alone(**RATES, scenario="stateful_or_not", scheduler="multi_step")
    assert {"scheduler.milestones.3", "scheduler.milestones.'3'"} <= {
        finding.name for finding in ran.reports[0].checks["extra_equal"].distinct.values()
    }
    assert unexplained(ran, "integer-keys") == set()
    with_another = run_alone(
        "noise_one_draw_ahead", **RATES, scenario="stateful_or_not", scheduler="multi_step"
    )
    assert "noise.generator" in unexplained(with_another, "integer-keys")


@pytest.mark.parametrize("returns", ["schedule_for_each", "schedules_by_name", "stepped_by_name"])
def test_several_schedules_are_restored(returns: str) -> None:
    """On ranks: workloads/test_healthy_workloads.py."""
    ran = run_alone(**RATES, workload={"target": f"support.returned_objects.{returns}"})
    assert ran.verdict.status == "pass", ran.verdict.reason
    assert ran.verdict.training is True
