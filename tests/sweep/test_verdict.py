"""From ranks' reports to a verdict."""

import pytest

from dcpbench.config.groups import Expect, FaultConfig, ScenarioConfig
from dcpbench.config.schema import Config
from dcpbench.executors.base import Outcome
from dcpbench.records.checks import CHECKS
from dcpbench.records.findings import Finding, Problem, RaisedError
from dcpbench.records.rank_report import CheckReport, RankReport
from dcpbench.sweep.run.verdict import judge, verdict_of
from support.jobs import job


def reports(ranks: int = 2) -> list[RankReport]:
    return [
        RankReport(rank, {check: CheckReport(control={"w": True}) for check in CHECKS})
        for rank in range(ranks)
    ]


def finding(name: str, text: str, distance: float | None = None, where: str = "") -> Finding:
    return Finding(name, Problem.contract, None, distance, {"text": text}, where)


def test_all_held_under_controls_is_a_pass() -> None:
    verdict = judge(reports())
    assert (verdict.status, verdict.reason, verdict.powered) == ("pass", None, True)
    assert all(verdict.checks.values())


def test_one_rank_is_enough_to_fail_and_is_named() -> None:
    seen = reports()
    seen[1].checks["model_equal"].add([finding("w", "index [3]: ...", 0.5, "at step 2")])
    verdict = judge(seen)
    assert verdict.status == "fail"
    assert verdict.checks["model_equal"] is False
    assert [(one.check, one.rank, one.names) for one in verdict.failed] == [("model_equal", 1, ("w",))]
    assert verdict.max_abs_diff == 0.5
    assert verdict.first_mismatch == "rank 1: w at step 2: index [3]: ..."
    assert verdict.reason == "model_equal: rank 1: w at step 2: index [3]: ..."


@pytest.mark.parametrize("control", [{}, {"w": False}])
def test_a_check_that_could_not_have_failed_is_vacuous(control: dict[str, bool]) -> None:
    seen = reports()
    for report in seen:
        report.checks["optim_equal"].control = control
    verdict = judge(seen)
    assert verdict.status == "vacuous"
    assert verdict.powered is False
    assert verdict.reason is not None
    assert verdict.reason.startswith("optim_equal: ")


def test_a_control_needs_to_fire_on_one_rank_only() -> None:
    seen = reports()
    seen[0].checks["optim_equal"].control = {"w": False}
    assert judge(seen).status == "pass"


def test_a_failure_outranks_a_missing_control() -> None:
    seen = reports()
    seen[0].checks["model_equal"].add([finding("w", "differs")])
    seen[1].checks["optim_equal"].control = seen[0].checks["optim_equal"].control = {}
    verdict = judge(seen)
    assert (verdict.status, verdict.powered) == ("fail", False)


def test_a_compiled_cell_that_ran_eagerly_is_vacuous() -> None:
    seen = reports()
    seen[1].compiled = False
    assert judge(seen).reason == "compile: nothing was compiled on rank 1"


def test_a_cell_without_any_check_is_vacuous() -> None:
    assert judge([RankReport(0)]).status == "vacuous"


def test_the_worst_of_all_ranks_come_first_with_their_ranks() -> None:
    seen = reports()
    for number in range(12):
        seen[0].checks["model_equal"].add([finding(f"w{number}", "differs", float(number), "at 2")])
    far = Finding("w11", Problem.contract, "param", 50.0, {"text": "differs"}, "at 2")
    seen[1].checks["model_equal"].add([far, Finding("gone", Problem.missing, where="at 2")])
    verdict = judge(seen)
    details = verdict.details["checks"]["model_equal"]
    worst = details["worst"]
    assert [one["name"] for one in worst] == ["gone", "w11", *(f"w{number}" for number in range(10, 2, -1))]
    assert (worst[1]["rank"], worst[1]["ranks"], worst[1]["kind"]) == (1, [0, 1], "param")
    assert details["mismatch_count"] == 14
    assert verdict.reason is not None
    assert verdict.reason.startswith("model_equal: rank 0: w0 at 2: differs (differing: w0, w1,")


PLANTED = FaultConfig(
    name="lr",
    target="x.y",
    expects=[
        Expect(check="optim_equal", name=r"param_groups\.0\.lr", rank=-1),
        Expect(phases=["load"], error="KeyError", message="initial_lr"),
    ],
)


def with_fault(outcome: Outcome) -> bool | None:
    config = Config(scenario=ScenarioConfig(name="a", target="x"), world_size=2, fault=PLANTED)
    return verdict_of(job(config), [outcome]).fault_seen


@pytest.mark.parametrize(
    ("rank", "check", "name", "seen"),
    [
        (1, "optim_equal", "param_groups.0.lr", True),
        (0, "optim_equal", "param_groups.0.lr", False),
        (1, "model_equal", "param_groups.0.lr", False),
        (1, "optim_equal", "param_groups.0.lr_other", False),
    ],
)
def test_a_fault_is_seen_by_its_check_on_its_rank_under_its_name(
    rank: int, check: str, name: str, seen: bool
) -> None:
    found = reports()
    found[rank].checks[check].add([finding(name, "differs")])
    assert with_fault(Outcome(found)) is seen


@pytest.mark.parametrize(
    ("phase", "error", "message", "seen"),
    [
        ("load", "KeyError", "'initial_lr'", True),
        ("save", "KeyError", "'initial_lr'", False),
        ("load", "ValueError", "'initial_lr'", False),
        ("load", "KeyError", "'lr'", False),
    ],
)
def test_a_loader_that_refuses_may_be_how_a_fault_is_seen(
    phase: str, error: str, message: str, seen: bool
) -> None:
    assert with_fault(Outcome([], "error", RaisedError(1, phase, error, message))) is seen


def test_a_fault_that_nothing_tells_of_says_what_was_expected() -> None:
    config = Config(scenario=ScenarioConfig(name="a", target="x"), world_size=2, fault=PLANTED)
    verdict = verdict_of(job(config), [Outcome(reports())])
    assert verdict.status == "pass"
    assert verdict.fault_seen is False
    assert verdict.reason is not None
    assert verdict.reason.startswith("fault=lr was not seen as optim_equal on rank 1 of ")
    assert verdict.reason.endswith("KeyError in load (initial_lr): nothing was")


def test_what_the_checks_had_found_before_a_rank_raised_is_told() -> None:
    before = {"model_equal": CheckReport()}
    before["model_equal"].add([finding("w", "differs")])
    raised = RaisedError(1, "load", "ValueError", "no", "CheckpointException", 0)
    verdict = verdict_of(job(), [Outcome([], "error", raised, before=before)])
    assert verdict.reason == (
        "rank 1 in load: CheckpointException: on rank 0: ValueError: no "
        "(before that model_equal: rank 1: w: differs)"
    )
    assert verdict.error == raised
