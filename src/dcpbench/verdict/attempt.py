"""Judges an attempt at a cell by the ends of its stages and the cell's known failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import DISK_FULL, RaisedError
from dcpbench.core.stage_end import RankEnd, StageEnd
from dcpbench.verdict.first_cause import StageStop, stop_of
from dcpbench.verdict.judge import failed_check, first_mismatch_of, judge
from dcpbench.verdict.known_failures import KnownFailure, with_known_failures
from dcpbench.verdict.sentences import cause_sentence
from dcpbench.verdict.verdict import OUTSIDE, Verdict

_RESTORED = ("model_equal", "optim_equal", "extra_equal", "random_equal")
"""The checks of what a load has restored."""


@dataclass(frozen=True)
class Expected:
    """Everything that the verdict knows about a cell.

    >>> verdict_of(Expected(worlds=[2]), [StageEnd(skip="needs 2 GPUs")]).status
    'skip'

    Args:
        worlds: number of ranks of each stage.
        dies: by the number of a stage in which a rank has to die, the function of that stage.
        known_failures: the known failures that are listed for the cell.
    """

    worlds: Sequence[int]
    dies: Mapping[int, str] = field(default_factory=dict)
    known_failures: Sequence[KnownFailure] = ()


def verdict_of(expected: Expected, ends: Sequence[StageEnd]) -> Verdict:
    """Judge an attempt by the ends of its stages, up to the first that did not end as expected."""
    stop = stop_of(ends[-1], expected.dies.get(len(ends) - 1))
    verdict = _stopped(stop, ends) if stop else _reported(expected, ends)
    return _as_consequence(with_known_failures(expected.known_failures, verdict))


def _stopped(stop: StageStop, ends: Sequence[StageEnd]) -> Verdict:
    if stop.cause is None:
        return Verdict(stop.status, stop.problem)
    reports = [report for end in ends for report in end.observed]
    failed = tuple(filter(None, (failed_check(check, reports) for check in CHECKS)))
    details = {"reports_of_ranks": sorted(report.rank for report in ends[-1].reports), **stop.details}
    if late := {str(report.rank): texts for report in reports if (texts := report.texts("late_files"))}:
        details["late_files"] = late
    if isinstance(stop.cause, RaisedError) and str(stop.cause.note).startswith(DISK_FULL):
        details[OUTSIDE] = DISK_FULL
    elif isinstance(stop.cause, RankEnd) and stop.cause.lost:
        details[OUTSIDE] = "a host was lost"
    return Verdict(
        stop.status,
        cause_sentence(stop.cause, [check.sentence for check in failed], stop.place),
        failed=failed,
        error=stop.cause if isinstance(stop.cause, RaisedError) else None,
        raised=stop.raised,
        details=details,
    )


def _as_consequence(verdict: Verdict) -> Verdict:
    """Judge a wrong restore, and not the exception that training from it has raised; or missing files, and
    not that of their load."""
    if verdict.status != "error" or not verdict.error:
        return verdict
    causes: tuple[str, ...] = _RESTORED if verdict.error.phase == "train" else ()
    if (verdict.error.phase, verdict.error.type) == ("load", FileNotFoundError.__name__):
        causes = ("files_unchanged",)
    wrong = [check for check in verdict.failed if check.check in causes]
    if not wrong:
        return verdict
    raised = replace(verdict.error, message=f"{verdict.error.message}, as a consequence")
    return replace(
        verdict,
        status="fail",
        reason="; ".join([*(check.sentence for check in verdict.failed), cause_sentence(raised)]),
        checks=dict.fromkeys(CHECKS) | {check.check: False for check in verdict.failed},
        resume=False,
        first_mismatch=first_mismatch_of(wrong[0]),
    )


def _reported(expected: Expected, ends: Sequence[StageEnd]) -> Verdict:
    last = ends[-1].reports
    if last and all(report.skip for report in last):
        return Verdict("skip", last[0].skip)
    # In a stage in which a rank has to die, no rank has to report.
    worlds = [0 if stage in expected.dies else size for stage, size in enumerate(expected.worlds)]
    return judge([end.reports for end in ends], worlds)
