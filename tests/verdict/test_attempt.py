"""An exception or a death is judged together with the checks that failed before it."""

from dataclasses import replace
from typing import Any

import pytest

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import DISK_FULL, Mismatch, Problem, RaisedError
from dcpbench.core.rank_report import CheckReport, RankReport
from dcpbench.core.stage_end import Failed, StageEnd
from dcpbench.verdict.attempt import Expected, verdict_of
from dcpbench.verdict.known_failures import KnownFailure, KnownMismatch
from dcpbench.verdict.verdict import OUTSIDE, Verdict
from support.ends import on, raised, reported

DEAD = replace(on(1), exited_at=1.0, exit_status=-9)


def report_with(*failed: str) -> RankReport:
    """Return a report of rank 0 in which these checks failed."""
    report = RankReport(0, {check: CheckReport() for check in failed})
    for check in failed:
        report.checks[check].add([Mismatch(f"w of {check}", Problem.missing)])
    return report


def judged(end: StageEnd, *known: KnownFailure) -> Verdict:
    return verdict_of(Expected(worlds=[2], known_failures=known), [end])


@pytest.mark.parametrize(
    ("phase", "kind", "failed", "first"),
    [
        ("train", "RuntimeError", ["model_equal"], "model_equal"),
        ("train", "RuntimeError", ["loss_resume_equal", "optim_equal", "extra_equal"], "optim_equal"),
        ("train", "RuntimeError", ["optim_equal", "loss_resume_equal"], "optim_equal"),
        ("train", "RuntimeError", ["loss_resume_equal"], None),
        ("train", "RuntimeError", [], None),
        ("build", "RuntimeError", ["model_equal"], None),
        ("load", "FileNotFoundError", ["files_unchanged"], "files_unchanged"),
        ("load", "FileNotFoundError", ["model_equal"], None),
        ("load", "KeyError", ["files_unchanged"], None),
        ("train", "FileNotFoundError", ["files_unchanged"], None),
    ],
)
def test_an_exception_after_a_wrong_restore_is_its_consequence(
    phase: str, kind: str, failed: list[str], first: str | None
) -> None:
    error = RaisedError(0, phase, kind, "no")
    verdict = judged(raised(error, before=[report_with(*failed)]))
    in_order = [check for check in CHECKS if check in failed]
    assert (verdict.error, [check.check for check in verdict.failed]) == (error, in_order)
    if first is None:
        assert (verdict.status, verdict.checks, verdict.first_mismatch) == ("error", {}, None)
        assert "consequence" not in str(verdict.reason)
        return
    sentences = [f"{check}: rank 0: w of {check}: saved, but not restored" for check in in_order]
    assert verdict.reason == "; ".join([*sentences, f"rank 0 in {phase}: {kind}: no, as a consequence"])
    assert (verdict.status, verdict.resume) == ("fail", False)
    assert verdict.checks == dict.fromkeys(CHECKS) | dict.fromkeys(failed, False)
    assert str(verdict.first_mismatch).startswith(f"rank 0: w of {first}")


@pytest.mark.parametrize(
    ("end", "outside"),
    [
        (raised(RaisedError(0, "save", "OSError", "no", note=f"{DISK_FULL}: 0 bytes are free")), DISK_FULL),
        (raised(RaisedError(0, "save", "OSError", "no", note="something else")), None),
        (raised(RaisedError(0, "save", "OSError", "no")), None),
        (StageEnd((replace(DEAD, exit_status=None, lost="did not answer"),)), "a host was lost"),
        (StageEnd((DEAD,)), None),
        (StageEnd((on(0),), ("load", 2.0)), None),
    ],
)
def test_what_is_outside_the_cell_is_said(end: StageEnd, outside: str | None) -> None:
    """A resume repeats such a cell, and a finished one is kept."""
    assert judged(end).details.get(OUTSIDE) == outside


@pytest.mark.parametrize("ending", [{"exited_at": 1.0, "exit_status": -9}, {}])
def test_a_known_mismatch_excuses_no_death_and_no_timeout(ending: dict[str, Any]) -> None:
    known = KnownFailure(
        id="known", torch=">=2", checks={"model_equal": [KnownMismatch(".*", ["missing"])]}, reason="a test"
    )
    seen = reported([report_with("model_equal")]).ranks
    end = StageEnd((*seen, replace(on(1), **ending)), None if ending else ("load", 2.0))
    verdict = judged(end, known)
    assert [check.check for check in verdict.failed] == ["model_equal"]
    assert verdict.status == ("crash" if ending else "timeout")


def test_a_report_is_no_cause_but_a_death_after_it_is() -> None:
    """A rank can die after its report; others then raise as a consequence."""
    closed = Failed(1.0, RaisedError(2, "load", "ValueError", "closed"), secondary=True)
    died = replace(on(0), report=RankReport(0), exit_status=-9)
    verdict = judged(StageEnd((died, replace(on(2), failed=closed))))
    assert (verdict.status, verdict.details["rank"]) == ("crash", 0)
