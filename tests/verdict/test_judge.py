"""Verdicts from the reports of ranks."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dcpbench.config.groups import Ending, ScenarioConfig, StageConfig
from dcpbench.config.schema import Config
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import NOWHERE, Mismatch, Place, Problem, RaisedError
from dcpbench.core.notes import Note
from dcpbench.core.rank_report import CheckReport, RankReport
from dcpbench.core.stage_end import StageEnd
from dcpbench.verdict.attempt import verdict_of
from dcpbench.verdict.judge import judge
from dcpbench.verdict.verdict import Verdict
from support.ends import finding, on, raised, reported, reports, seen_at
from support.jobs import job


def test_passed_checks_with_controls_are_a_pass() -> None:
    verdict = judge([reports()], [2])
    assert (verdict.status, verdict.reason, verdict.powered) == ("pass", None, True)
    assert all(verdict.checks.values())


@pytest.mark.parametrize("rank", range(3))
def test_mismatch_on_one_rank_fails_and_names_it(rank: int) -> None:
    seen = reports(3)
    seen[rank].checks["model_equal"].add([finding("w", "index [3]: ...", 0.5, Place("at step 2"))])
    verdict = judge([seen], [3])
    assert verdict.status == "fail"
    assert verdict.checks["model_equal"] is False
    assert [(one.check, one.rank, one.names) for one in verdict.failed] == [("model_equal", rank, ["w"])]
    assert verdict.max_abs_diff == 0.5
    assert verdict.first_mismatch == f"rank {rank}: w at step 2: index [3]: ..."
    assert verdict.reason == f"model_equal: rank {rank}: w at step 2: index [3]: ..."


@pytest.mark.parametrize(
    ("looked_at", "differs_at", "first"),
    [
        (("ab", "", "cd"), ("d", "c", "b"), (2, "b")),
        (("", "", "cd"), ("d", "c", "c"), (1, "c")),
        (("", "", ""), ("c", "b", "a"), (0, "c")),
        (("", "", "a"), ("c", "b", "a"), (2, "a")),
    ],
)
def test_places_keep_the_order_of_comparison(
    looked_at: tuple[str, ...], differs_at: tuple[str, ...], first: tuple[int, str]
) -> None:
    seen = [
        RankReport(rank, {"extra_equal": seen_at(*map(Place, places))})
        for rank, places in enumerate(looked_at)
    ]
    for report, place in zip(seen, differs_at, strict=True):
        report.checks["extra_equal"].add([finding("w", "differs", where=Place(place))])
    (failed,) = judge([seen], [3]).failed
    assert (failed.rank, failed.first.where.moment) == first


def test_check_without_comparisons_has_no_control() -> None:
    seen = [RankReport(0, {"model_equal": CheckReport()})]
    verdict = judge([seen], [1])
    assert (verdict.status, verdict.reason) == ("vacuous", "model_equal: no control ran")
    assert verdict.details["checks"]["model_equal"]["control_missed"] == []


def test_control_has_to_fire_on_one_rank() -> None:
    seen = reports()
    seen[0].checks["optim_equal"].control = {NOWHERE: {"w": False}}
    assert judge([seen], [2]).status == "pass"


OLD, NEW = Place("checkpoint", 2), Place("checkpoint", 4)


def at_both(change: Callable[[list[CheckReport]], None]) -> Verdict:
    """Two ranks compare one name at two places, and something is missing."""
    seen = [RankReport(rank, {"model_equal": seen_at(OLD, NEW)}) for rank in range(2)]
    change([report.checks["model_equal"] for report in seen])
    return judge([seen], [2])


def test_complete_controls_make_a_pass() -> None:
    assert at_both(lambda views: None).status == "pass"
    assert at_both(lambda views: views[0].compared[OLD].update(w=False)).status == "pass", "an empty shard"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda views: views[0].compared.pop(OLD), f"rank 0 did not compare anything {OLD}"),
        (lambda views: views[1].compared.pop(NEW), f"rank 1 did not compare anything {NEW}"),
        (lambda views: [view.compared.pop(OLD) for view in views], f"rank 0 did not compare anything {OLD}"),
        (lambda views: [view.control.pop(OLD) for view in views], f"rank 0 has no control of w {OLD}"),
        (lambda views: views[1].control.pop(NEW), f"rank 1 has no control of w {NEW}"),
        (lambda views: [view.control[OLD].update(w=False) for view in views], f"did not report w {OLD}"),
        (lambda views: views[0].control[OLD].update(v=False), f"did not report v {OLD}"),
        (lambda views: views[1].control[OLD].update(v=False), f"did not report v {OLD}"),
        (lambda views: [view.compared[NEW].update(w=False) for view in views], f"no rank compared w {NEW}"),
        (lambda views: [view.compared[NEW].clear() for view in views], f"no rank compared anything {NEW}"),
        (lambda views: views[0].compared[NEW].update(v=True), f"rank 0 has no control of v {NEW}"),
        (lambda views: views[1].compared[NEW].update(v=False), f"no rank compared v {NEW}"),
        (
            lambda views: [view.control.update({Place("elsewhere"): {"w": True}}) for view in views],
            "rank 0 did not compare anything elsewhere",
        ),
        (
            lambda views: views[1].compared.update({Place("elsewhere"): {"w": True}}),
            "rank 0 did not compare anything elsewhere",
        ),
    ],
)
def test_incomplete_comparison_is_vacuous(change: Callable[[list[CheckReport]], None], reason: str) -> None:
    verdict = at_both(change)
    assert verdict.status == "vacuous"
    assert verdict.powered is False
    assert verdict.reason is not None
    assert verdict.reason.startswith("model_equal: ")
    assert reason in verdict.reason


def test_check_missing_on_one_rank_is_vacuous() -> None:
    seen = reports()
    del seen[1].checks["extra_equal"]
    assert judge([seen], [2]).reason == "extra_equal: rank 1 did not compare anything"


def test_each_stage_needs_its_own_ranks() -> None:
    assert judge([reports(2), reports(1)], [2, 1]).status == "pass"
    for stages, reason in (
        ([reports(2), reports(1)], "stage 1: no report of rank 1"),
        ([reports(2)], "stage 1: no report of rank 0, 1"),
        ([reports(2), []], "stage 1: no report of rank 0, 1"),
        ([reports(2)[1:], reports(2)], "stage 0: no report of rank 0"),
    ):
        verdict = judge(stages, [2, 2])
        assert (verdict.status, verdict.reason) == ("vacuous", reason)


def test_missing_reports_are_not_a_pass() -> None:
    assert verdict_of(job().expected, [reported([])]).status == "vacuous"
    assert verdict_of(job().expected, [reported(reports(3))]).reason == "stage 0: no report of rank 3"
    assert verdict_of(job().expected, [reported(reports(4))]).status == "pass"


def test_details_list_controls_and_ranks() -> None:
    details = at_both(lambda views: None).details
    seen = details["checks"]["model_equal"]
    assert seen["control"] == {f"w {OLD}": True, f"w {NEW}": True}
    assert (seen["held"], seen["control_missed"], seen["worst"]) == (True, [], [])
    assert [set(rank) for rank in details["ranks"]] == [
        {"rank", "host", "local_rank", "losses", "resumed", "not_compiled", "notes", "interpreter"}
    ] * 2
    assert [rank["rank"] for rank in details["ranks"]] == [0, 1]
    missed = at_both(lambda views: [view.control[OLD].update(w=False) for view in views])
    seen = missed.details["checks"]["model_equal"]
    assert seen["control"] == {f"w {OLD}": False, f"w {NEW}": True}
    assert seen["control_missed"] == [f"w {OLD}"]
    none = at_both(
        lambda views: [view.control[where].update(w=False) for view in views for where in (OLD, NEW)]
    )
    assert none.details["checks"]["model_equal"]["control_missed"] == sorted([f"w {OLD}", f"w {NEW}"])


def test_name_that_differs_twice_is_listed_once() -> None:
    def differs(views: list[CheckReport]) -> None:
        views[0].add([finding("w", "differs", 1.0, OLD), finding("w", "differs", 2.0, NEW)])

    verdict = at_both(differs)
    assert verdict.failed[0].names == ["w"]
    assert [one["where"] for one in verdict.details["checks"]["model_equal"]["worst"]] == [str(OLD), str(NEW)]
    assert verdict.max_abs_diff == 2.0


def test_failure_takes_precedence_over_vacuous() -> None:
    seen = reports()
    seen[0].checks["model_equal"].add([finding("w", "differs")])
    seen[1].checks["optim_equal"].control = seen[0].checks["optim_equal"].control = {}
    verdict = judge([seen], [2])
    assert (verdict.status, verdict.powered) == ("fail", False)


def test_resume_and_training_are_separate() -> None:
    """A failed check of training does not affect the resume, and vice versa."""
    verdict = judge([reports()], [2])
    assert (verdict.resume, verdict.training) == (True, True)
    for check in ("gradient_close", "model_equal"):
        seen = reports()
        seen[1].checks[check].add([finding("w", "differs")])
        verdict = judge([seen], [2])
        of_training = check == "gradient_close"
        assert (verdict.status, verdict.resume, verdict.training) == ("fail", of_training, not of_training)
        why = f"{check}: rank 1: w: differs"
        assert verdict.reason == (f"the resume is correct; training: {why}" if of_training else why)


def test_resume_is_correct_only_with_controls() -> None:
    seen = reports()
    for report in seen:
        report.checks["step_equal"].add([finding("w", "differs")])
        report.checks["optim_equal"].control = {}
    verdict = judge([seen], [2])
    assert (verdict.resume, verdict.training) == (False, False)
    assert verdict.reason == "training: step_equal: rank 0: w: differs"
    alone = [RankReport(0, {"step_equal": seen_at("")})]
    alone[0].checks["step_equal"].add([finding("w", "differs")])
    verdict = judge([alone], [1])
    assert (verdict.resume, verdict.training) == (None, False)
    assert verdict.reason == "training: step_equal: rank 0: w: differs"
    both = reports()
    for check in ("step_equal", "optim_equal"):
        both[0].checks[check].add([finding("w", "differs")])
    assert judge([both], [2]).reason == (
        "optim_equal: rank 0: w: differs; training: step_equal: rank 0: w: differs"
    )


def test_vacuous_training_does_not_change_resume() -> None:
    seen = reports()
    for report in seen:
        report.checks["gradient_close"].control = {}
    verdict = judge([seen], [2])
    assert (verdict.status, verdict.resume, verdict.training) == ("vacuous", True, False)


def test_compiled_cell_that_ran_eagerly_is_vacuous() -> None:
    for rank in range(2):
        seen = reports()
        seen[rank].not_compiled = "nothing was compiled"
        assert judge([seen], [2]).reason == f"compile: rank {rank}: nothing was compiled"


def test_cell_without_checks_is_vacuous() -> None:
    assert judge([[RankReport(0)]], [1]).status == "vacuous"


def test_the_worst_mismatches_are_listed_with_ranks() -> None:
    seen = reports()
    for number in range(24):
        seen[0].checks["model_equal"].add([finding(f"w{number}", "differs", float(number), Place("at 2"))])
    far = Mismatch("w23", Problem.contract, "param", 50.0, {"text": "differs"}, Place("at 2"))
    seen[1].checks["model_equal"].add([far, Mismatch("gone", Problem.missing, where=Place("at 2"))])
    verdict = judge([seen], [2])
    details = verdict.details["checks"]["model_equal"]
    worst = {one["name"]: one for one in details["worst"]}
    assert [*worst] == ["gone", "w0", *(f"w{number}" for number in range(6, 24))], "w0 is quoted"
    assert (worst["w23"]["rank"], worst["w23"]["ranks"], worst["w23"]["kind"]) == (1, [0, 1], "param")
    assert details["mismatch_count"] == 26
    assert verdict.max_abs_diff == 50.0
    assert verdict.reason is not None
    assert verdict.reason.startswith("model_equal: rank 0: w0 at 2: differs (differing: w0, w1,")


def test_mismatches_are_in_order_of_steps() -> None:
    """Checkpoints are compared from the newest on, and the losses of one differ more from step to step."""
    seen = reports()
    for checkpoint in (10, 4, 2):
        where = Place("resumed", checkpoint)
        steps = range(checkpoint + 1, checkpoint + 5)
        for report in seen:
            report.checks["optim_equal"].add(
                finding(f"loss of step {step}", f"on rank {report.rank}", float(step), where)
                for step in steps
            )
    verdict = judge([seen], [2])
    listed = verdict.details["checks"]["optim_equal"]["worst"]
    steps = [int(one["name"].removeprefix("loss of step ")) for one in listed]
    assert steps == [3, 4, 5, 6, 5, 6, 7, 8, 11, 12, 13, 14]
    assert all(one["ranks"] == [0, 1] for one in listed)
    quoted = next(one for one in listed if one["name"] == "loss of step 11")
    assert f"rank {quoted['rank']}: {verdict.failed[0].first.name}" in str(verdict.reason)
    assert quoted["text"] == "on rank 0"
    seen[0].checks["optim_equal"].add([finding("of no step", "differs", 1e9)])
    listed = judge([seen], [2]).details["checks"]["optim_equal"]["worst"]
    assert [each["name"] for each in listed].index("of no step") == 0


@pytest.mark.parametrize("check", CHECKS)
def test_mismatches_before_an_error_are_reported(check: str) -> None:
    before = [RankReport(1, {check: CheckReport()}, notes=[Note("late_files", "a file")])]
    before[0].checks[check].add([finding("w", "differs")])
    error = RaisedError(1, "load", "ValueError", "no", "CheckpointException", 0)
    verdict = verdict_of(job().expected, [raised(error, before=before)])
    assert verdict.reason == (
        "rank 1 in load: CheckpointException: on rank 0: ValueError: no "
        f"(before that {check}: rank 1: w: differs)"
    )
    assert (verdict.error, verdict.raised) == (error, (error,))
    assert verdict.details["late_files"] == {"1": ["a file"]}


def test_death_is_not_a_known_error() -> None:
    died = replace(on(1), phase="save", exited_at=1.0, exit_status=-9, uploads=(0.5,), log_tail=("Bang",))
    end = StageEnd((died, *reported([reports(3)[2], RankReport(0)]).ranks))
    verdict = verdict_of(job().expected, [end])
    assert (verdict.status, verdict.error, verdict.raised) == ("crash", None, ())
    assert verdict.reason == "rank 1 was killed by SIGKILL in save, an upload in flight"
    about = {"rank": 1, "phase": "save", "upload_under_way": True, "log_tail": ["Bang"]}
    assert verdict.details == {"reports_of_ranks": [0, 2], **about}


@pytest.mark.parametrize(
    ("problem", "status"), [({"not_run": "no server"}, "error"), ({"skip": "no server"}, "skip")]
)
def test_ranks_that_cannot_start_are_an_error(problem: dict[str, str], status: str) -> None:
    verdict = verdict_of(job().expected, [StageEnd(**problem)])  # type: ignore[arg-type]
    assert (verdict.status, verdict.reason, verdict.details) == (status, "no server", {})


def test_ranks_of_a_dying_stage_need_not_report() -> None:
    ends = Ending.crash, Ending.report
    stages = [StageConfig(target="x.y", ends=each) for each in ends]
    config = Config(scenario=ScenarioConfig(name="a", stages=stages), world_size=2)
    assert verdict_of(job(config).expected, [reported([]), reported(reports())]).status == "pass"
    verdict = verdict_of(job(config).expected, [reported(reports()), reported([])])
    assert verdict.reason == "stage 1: no report of rank 0, 1"
