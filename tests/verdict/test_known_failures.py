"""Known failures match the listed mismatches and errors, and no others."""

import math
from dataclasses import replace
from typing import Any

import pytest

from dcpbench.analysis.causes import short_reason
from dcpbench.core.mismatch import Mismatch, Place, Problem, RaisedError
from dcpbench.core.rank_report import CheckReport, RankReport
from dcpbench.core.stage_end import StageEnd
from dcpbench.plan.known_failures import check_entry
from dcpbench.verdict.attempt import Expected, verdict_of
from dcpbench.verdict.known_failures import KnownError, KnownFailure, KnownMismatch
from dcpbench.verdict.verdict import KNOWN, UNEXPLAINED
from support.ends import raised, reported
from support.jobs import job

LISTED = KnownFailure(
    id="moments",
    cells={"parallel": ["ddp", "fsdp"]},
    torch=">=2.11,<3",
    checks={"optim_equal": [KnownMismatch(r"state\.w\..*", ["missing"])]},
    reason="a test",
)


def after(end: StageEnd, known: KnownFailure = LISTED) -> str:
    """Return the status of a cell."""
    return verdict_of(job(known=(known,)).expected, [end]).status


def powered() -> list[RankReport]:
    """Return reports of four ranks that each compared one name, with a control that detected."""
    names = {"": {"w": True}}
    checks = ("model_equal", "optim_equal")
    return [
        RankReport(rank, {check: CheckReport(compared=names, control=names) for check in checks})
        for rank in range(4)
    ]


def failing(failed: dict[str, list[str]]) -> StageEnd:
    """Return reports of ranks whose checks report these names."""
    reports = powered()
    for report in reports:
        for check, names in failed.items():
            report.checks[check].add([Mismatch(name, Problem.missing) for name in names])
    return reported(reports)


def test_intermittent_failure_can_pass() -> None:
    assert after(failing({}), replace(LISTED, always=False)) == "pass"
    assert after(failing({"optim_equal": ["state.w.exp_avg"]}), replace(LISTED, always=False)) == "xfail"


@pytest.mark.parametrize(
    ("limits", "columns", "covered"),
    [
        ({}, {"parallel": "fsdp"}, True),
        ({}, {"parallel": "hsdp"}, False),
        ({}, {"torch_version": "2.10.1"}, False),
        ({}, {"torch_version": "2.16.0.dev20261101+cu130"}, True),
        ({"cells": {"overlap_saves": True}}, {"config": {"overlap_saves": True}}, True),
        ({"cells": {"overlap_saves": True}}, {"config": {"overlap_saves": False}}, False),
        ({"cells": {"storage.options.overwrite": [None, True]}}, {"config": {}}, True),
        (
            {"cells": {"storage.options.overwrite": [None, True]}},
            {"config": {"storage.options.overwrite": False}},
            False,
        ),
        ({"load_torch": "<2.13"}, {"load_torch_version": "2.12.1"}, True),
        ({"load_torch": "<2.13"}, {"load_torch_version": "2.13.0+cpu"}, False),
        ({"load_torch": "<2.13"}, {"load_torch_version": None}, False),
    ],
)
def test_entry_covers_its_cells_and_versions(
    limits: dict[str, Any], columns: dict[str, Any], covered: bool
) -> None:
    entry = replace(LISTED, **limits)
    check_entry(entry)
    assert entry.covers({"torch_version": "2.13.0", "parallel": "ddp", **columns}) is covered


def test_a_listed_failure_is_expected() -> None:
    assert after(failing({"optim_equal": ["state.w.exp_avg"]})) == "xfail"


@pytest.mark.parametrize(
    "failed",
    [
        {"model_equal": ["w"]},
        {"optim_equal": ["state.w.exp_avg"], "model_equal": ["w"]},
        {"optim_equal": ["state.w.exp_avg", "param_groups.0.lr"]},
    ],
)
def test_unlisted_mismatch_is_a_failure(failed: dict[str, list[str]]) -> None:
    assert after(failing(failed)) == "fail"


def test_unlisted_mismatch_comes_first() -> None:
    names = ["state.w.exp_avg", "param_groups.0.lr", "param_groups.0.eps"]
    reason = str(verdict_of(job(known=(LISTED,)).expected, [failing({"optim_equal": names})]).reason)
    beside = "optim_equal: param_groups.0.lr: saved, but not restored, and 1 more"
    told = f"in addition to known failure moments: {beside}"
    assert reason.startswith(f"{told}; observed: optim_equal: rank 0: state.w.exp_avg")
    assert short_reason({"status": "fail", "reason": reason}) == told
    alone = verdict_of(job(known=(LISTED,)).expected, [failing({"model_equal": ["w"]})])
    assert str(alone.reason).startswith("model_equal: rank 0: w")


def test_checks_and_errors_that_are_not_listed_are_named() -> None:
    """`details` has the checks, by which a report groups such cells; the reason the first of all."""
    failed = {"model_equal": ["w"], "optim_equal": ["state.w.exp_avg"], "extra_equal": ["steps"]}
    report = RankReport(0, {check: CheckReport() for check in failed})
    for check, names in failed.items():
        report.checks[check].add([Mismatch(name, Problem.missing) for name in names])
    verdict = verdict_of(job(known=(LISTED,)).expected, [reported([report])])
    assert verdict.details[UNEXPLAINED] == ["model_equal", "extra_equal"]
    unlisted = raised(RaisedError(0, "load", "ValueError", "no"), before=[report])
    verdict = verdict_of(job(known=(LISTED,)).expected, [unlisted])
    assert "model_equal: w: saved, but not restored, and 2 more; observed" in str(verdict.reason)
    report.checks.pop("model_equal"), report.checks.pop("extra_equal")
    verdict = verdict_of(job(known=(LISTED,)).expected, [unlisted])
    told = "in addition to known failure moments: rank 0 in load: ValueError: no; observed"
    assert str(verdict.reason).startswith(told)


def differing(**about: object) -> Mismatch:
    """Return a mismatch with every property that an entry can require."""
    given = {
        "name": "state.w.exp_avg",
        "problem": Problem.differs,
        "by": "sliced",
        "where": Place("restarted", 2),
    }
    share = about.pop("share", 0.5)
    facts = dict.fromkeys(("index", "expected", "expected_bits", "actual", "actual_bits"), "0")
    facts |= {"differing": 1, "elements": 1} | ({} if share is None else {"share": share})
    return Mismatch(**{"max_abs_diff": 1.0, **given, **about}, facts=facts)  # type: ignore[arg-type]


CLOSELY = KnownFailure(
    id="closely",
    torch=">=2",
    checks={
        "optim_equal": [
            KnownMismatch(r"state\.w\..*", ["differs"], by="sliced", within=1.0, moments=["restarted"])
        ]
    },
    reason="a test",
)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"name": "state.w.exp_avg_sq"}, "xfail"),
        ({"problem": Problem.nan}, "fail"),
        ({"problem": Problem.missing}, "fail"),
        ({"problem": Problem.dtype}, "fail"),
        ({"by": None}, "fail"),
        ({"by": "another"}, "fail"),
        ({"share": 1.5}, "fail"),
        ({"share": None}, "fail"),
        ({"share": math.nan}, "fail"),
        ({"where": Place("resumed", 2)}, "fail"),
        ({"where": Place("restarted", 2, ", saved again")}, "fail"),
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_known_mismatch_needs_every_property(beside: dict[str, object], expected: str, rank: int) -> None:
    """Mismatches of every rank count, also if a report shows fewer names."""
    reports = powered()
    many = [differing(name=f"state.w.{number}", share=0.9) for number in range(20)]
    for report in reports:
        report.checks["optim_equal"].add(many)
    reports[rank].checks["optim_equal"].add([differing(**beside)])
    assert after(reported(reports), CLOSELY) == expected


def test_largest_share_of_a_name_counts() -> None:
    reports = powered()
    reports[0].checks["optim_equal"].add([differing(), differing(share=2.0), differing()])
    assert after(reported(reports), CLOSELY) == "fail"


def test_two_defects_of_one_name_are_kept() -> None:
    report = CheckReport()
    report.add([differing(by=by) for by in ("one", "other", None)])
    assert [one.by for one in report.distinct.values()] == ["one", "other", None]


def test_vacuous_takes_precedence_over_xfail() -> None:
    outcome = failing({"optim_equal": ["state.w.exp_avg"]})
    for report in outcome.reports:
        report.checks["model_equal"].control = {"": {"w": False}}
    verdict = verdict_of(job(known=(LISTED,)).expected, [outcome])
    assert verdict.status == "vacuous"
    assert str(verdict.reason).startswith("model_equal: its control did not report w (known failure moments")


def test_every_raised_error_has_to_be_known() -> None:
    listed = KnownFailure(id="e", torch=">=2", error=KnownError("KeyError", ["load"]), reason="x")
    known, other = RaisedError(0, "load", "KeyError", "'a'"), RaisedError(1, "load", "ValueError", "no")
    assert after(raised(known, replace(known, rank=1)), listed) == "xfail"
    assert after(raised(known, other), listed) == "error"


def test_two_entries_can_explain_one_cell() -> None:
    """A single entry is not enough, and an error is known only if it was raised."""
    names = KnownFailure(id="names", torch=">=2", error=KnownError("KeyError", ["load"]), reason="x")
    error = RaisedError(0, "load", "KeyError", "'a'")
    seen = failing({"optim_equal": ["state.w.exp_avg"]}).reports
    outcome = raised(error, reports=seen[1:], before=seen[:1])
    verdict = verdict_of(job(known=(LISTED, names)).expected, [outcome])
    assert verdict.status == "xfail"
    assert str(verdict.reason).startswith("known failure moments, names: a test; x; observed: rank 0 in load")
    assert verdict.details[KNOWN] == [["moments", "a test", None], ["names", "x", None]]
    assert verdict_of(job(known=(LISTED,)).expected, [outcome]).status == "error"
    assert verdict_of(job(known=(names,)).expected, [outcome]).status == "error"


def test_mismatches_of_earlier_stages_count() -> None:
    listed = KnownFailure(id="e", torch=">=2", error=KnownError("KeyError", ["load"]), reason="x")
    end = raised(RaisedError(0, "load", "KeyError", "'a'"))
    assert verdict_of(job(known=(listed,)).expected, [failing({}), end]).status == "xfail"
    assert verdict_of(job(known=(listed,)).expected, [failing({"model_equal": ["w"]}), end]).status == "error"


def test_only_the_listed_error_is_expected() -> None:
    listed = KnownFailure(
        id="names",
        cells={"parallel": "ddp"},
        torch=">=2",
        error=KnownError(type="KeyError", phases=["load"], message="'a.*'"),
        checks={"model_equal": [KnownMismatch("w.*", ["missing"])]},
        reason="x",
    )
    for error, expected in (
        (RaisedError(3, "load", "KeyError", "'a'"), "xfail"),
        (RaisedError(3, "save", "KeyError", "'a'"), "error"),
        (RaisedError(3, "load", "ValueError", "'a'"), "error"),
        (RaisedError(3, "load", "KeyError", "'b'"), "error"),
    ):
        assert after(raised(error), listed) == expected
    error = RaisedError(3, "load", "KeyError", "'a'")
    for check, name, expected in (
        ("model_equal", "w", "xfail"),
        ("model_equal", "v", "error"),
        ("optim_equal", "w", "error"),
    ):
        seen = RankReport(1, {check: CheckReport()})
        seen.checks[check].add([Mismatch(name, Problem.missing)])
        earlier = raised(error, before=[replace(seen, rank=3)])
        assert after(earlier, listed) == expected, "nothing hides beside it"
        assert after(raised(error, reports=[seen]), listed) == expected, "nor on a rank that went on"
    assert after(failing({"model_equal": ["w"]}), listed) == "fail", "the error is what is known"


def test_an_entry_names_every_defect_that_it_needs() -> None:
    """Without the plug-in of one of them the entry is not used."""

    def mismatches(*by: str | None) -> list[KnownMismatch]:
        return [KnownMismatch(".*", ["differs"], each) for each in by]

    checks = {"model_equal": mismatches("a", None, "b"), "optim_equal": mismatches("c")}
    error = KnownError("KeyError", ["load"], by="d")
    assert replace(LISTED, checks=checks, error=error).recomputations == {"a", "b", "c", "d"}
    assert LISTED.recomputations == set()


def test_error_can_require_a_recomputed_defect() -> None:
    listed = KnownFailure(id="e", torch=">=2", error=KnownError("KeyError", ["load"], by="mine"), reason="x")
    assert listed.recomputations == {"mine"}
    for by, expected in (("mine", "xfail"), ("other", "error"), (None, "error")):
        assert after(raised(RaisedError(0, "load", "KeyError", "'a'", by=by)), listed) == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (failing({}), "xpass"),
        (reported([RankReport(0)]), "vacuous"),
        (raised(RaisedError(0, "load", "KeyError", "'a'")), "error"),
        (reported([RankReport(0, skip="no")]), "skip"),
    ],
)
def test_cells_that_did_not_fail(end: StageEnd, expected: str) -> None:
    assert after(end) == expected


WORDS = "list index out of range"


@pytest.mark.parametrize(
    ("known", "error", "expected"),
    [
        ({"in_torch": True}, {"in_torch": True}, "xfail"),
        ({"in_torch": True}, {"in_torch": True, "code": "copy(model)"}, "xfail"),
        ({"in_torch": True}, {"code": "raise IndexError"}, "error"),
        ({}, {"code": "loss.backward()", "in_torch": True}, "xfail"),
        ({}, {"code": "raise IndexError"}, "error"),
        ({"in_torch": True, "code": ""}, {"in_torch": True}, "xfail"),
        ({"in_torch": True, "code": ""}, {"in_torch": True, "code": "model.load(state)"}, "error"),
        ({"of": ["Adam"]}, {"of": ("AdamW", "Adam", "Optimizer")}, "xfail"),
        ({"of": ["Adam"]}, {"of": ("AdamW", "Optimizer")}, "error"),
        ({"of": ["Adam", r"state\[.*\]"]}, {"of": ("Adam", "state[str]")}, "xfail"),
        ({"of": ["Adam", r"state\[.*\]"]}, {"of": ("Adam",)}, "error"),
        ({"code": ".*closure.*"}, {"code": "assert closure"}, "xfail"),
        ({"code": ".*closure.*"}, {"code": "assert ready"}, "error"),
        ({"code": ".*closure.*"}, {}, "error"),
        ({"each": r"i(\w)"}, {"of": ("s", "n")}, "xfail"),
        ({"each": r"i(\w)"}, {"of": ("s",)}, "error"),
        ({"each": r"z(\w)"}, {}, "xfail"),
    ],
)
def test_error_can_require_where_and_of_what(
    known: dict[str, Any], error: dict[str, Any], expected: str
) -> None:
    listed = KnownFailure(
        id="e", torch=">=2", error=KnownError("IndexError", ["load"], WORDS, **known), reason="x"
    )
    assert after(raised(RaisedError(3, "load", "IndexError", WORDS, **error)), listed) == expected


def test_documented_refusal_is_a_skip() -> None:
    error = KnownError("IndexError|KeyError", ["load"])
    listed = KnownFailure(id="refused", torch=">=2", error=error, status="skip", reason="use ddp")
    end = raised(RaisedError(3, "load", "KeyError", "'a'"))
    verdict = verdict_of(Expected([4], known_failures=(listed,)), [end])
    assert verdict.status == "skip"
    assert verdict.reason == "known failure refused: use ddp; observed: rank 3 in load: KeyError: 'a'"
    assert after(failing({}), replace(listed, always=True)) == "xpass"


def test_documented_refusal_excuses_no_mismatch() -> None:
    error = KnownError("KeyError", ["load"])
    listed = KnownFailure(id="refused", torch=">=2", error=error, status="skip", reason="use ddp")
    wrong = KnownFailure(
        "wrong", torch=">=2", checks={"model_equal": [KnownMismatch("w", ["missing"])]}, reason="y"
    )
    report = RankReport(3, {"model_equal": CheckReport()})
    report.checks["model_equal"].add([Mismatch("w", Problem.missing)])
    end = raised(RaisedError(3, "load", "KeyError", "'a'"), before=[report])
    for known, status in (((listed,), "error"), ((listed, wrong), "xfail")):
        assert verdict_of(Expected([4], known_failures=known), [end]).status == status
