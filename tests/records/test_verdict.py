"""From ranks' reports to a verdict."""

import pytest

from dcpbench.records.store import CHECKS
from dcpbench.records.verdict import CheckReport, RankReport, judge


def reports(ranks: int = 2) -> list[RankReport]:
    return [
        RankReport(rank, {check: CheckReport(control={"w": True}) for check in CHECKS})
        for rank in range(ranks)
    ]


def test_all_held_under_controls_is_a_pass() -> None:
    verdict = judge(reports())
    assert (verdict.status, verdict.reason, verdict.powered) == ("pass", None, True)
    assert all(verdict.checks.values())


def test_one_rank_is_enough_to_fail_and_is_named() -> None:
    seen = reports()
    seen[1].checks["model_equal"].add("w", "w at step 2: index [3]: ...", 0.5)
    verdict = judge(seen)
    assert verdict.status == "fail"
    assert verdict.checks["model_equal"] is False
    assert verdict.failed == {"model_equal": ["w"]}
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
    seen[0].checks["model_equal"].add("w", "w differs", None)
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
        seen[0].checks["model_equal"].add(f"w{number}", f"w{number} differs", float(number), where="at 2")
    seen[1].checks["model_equal"].add("w11", "w11 differs", 50.0, where="at 2", kind="param")
    seen[1].checks["model_equal"].add("gone", "gone is missing", None, where="at 2")
    verdict = judge(seen)
    details = verdict.details["checks"]["model_equal"]
    worst = details["worst"]
    assert [one["name"] for one in worst] == ["gone", "w11", *(f"w{number}" for number in range(10, 2, -1))]
    assert (worst[1]["rank"], worst[1]["ranks"], worst[1]["kind"]) == (1, [0, 1], "param")
    assert details["mismatch_count"] == 14
    assert verdict.reason is not None
    assert verdict.reason.startswith("model_equal: rank 0: w0 differs (differing: w0, w1,")
