"""From what each rank saw, in all stages of a try, to one verdict."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dcpbench.config.groups import Expect
from dcpbench.executors.base import Outcome
from dcpbench.records.checks import CHECKS
from dcpbench.records.findings import Finding, RaisedError
from dcpbench.records.rank_report import CheckReport, RankReport, badness
from dcpbench.records.sentences import cause_sentence, check_sentence, finding_sentence, powerless_sentence
from dcpbench.sweep.plan.job import Job

_KEPT = 10
"""How many findings the details of a row have for each check."""


class FailedCheck(NamedTuple):
    """A check that did not hold: its first finding, on which rank, and the names of all that differs."""

    check: str
    rank: int
    first: Finding
    names: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What a try of a cell came to, as the columns of its row say it; `failed` and `error` are what known
    failures and faults are matched against."""

    status: str
    reason: str | None = None
    checks: dict[str, bool | None] = field(default_factory=dict)
    failed: tuple[FailedCheck, ...] = ()
    error: RaisedError | None = None
    powered: bool | None = None
    max_abs_diff: float | None = None
    first_mismatch: str | None = None
    fault_seen: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)


def verdict_of(job: Job, outcomes: Sequence[Outcome]) -> Verdict:
    """What the stages of a try came to together, with regard to what is known to fail and what was
    planted."""
    verdict = _ended(outcomes)
    if verdict.status == "skip":
        return verdict
    verdict = _with_known_failures(job, verdict)
    return _with_fault(job, verdict) if job.config.fault.target else verdict


def _ended(outcomes: Sequence[Outcome]) -> Verdict:
    last = outcomes[-1]
    if last.problem:
        return Verdict("error", last.problem, details=last.details)
    if last.status and last.cause is not None:
        raised = last.cause if isinstance(last.cause, RaisedError) else None
        rank = raised.rank if raised else 0
        failed = tuple(
            FailedCheck(check, rank, seen.first, tuple(seen.names))
            for check, seen in last.before.items()
            if seen.first
        )
        details = {"reports_of_ranks": sorted(report.rank for report in last.reports), **last.details}
        reason = cause_sentence(last.cause, [check_sentence(*one) for one in failed])
        return Verdict(last.status, reason, failed=failed, error=raised, details=details)
    if all(report.skip for report in last.reports):
        return Verdict("skip", last.reports[0].skip)
    return judge(report for outcome in outcomes for report in outcome.reports)


def judge(reports: Iterable[RankReport]) -> Verdict:
    """A check holds if it held on every rank; it has power if each name was reported by some rank.

    Some rank, not every: a shard of zeros may equal its perturbed counterpart's, and an empty shard
    has nothing to differ in.
    """
    ranks = sorted(reports, key=lambda report: report.rank)
    checks: dict[str, bool | None] = dict.fromkeys(CHECKS)
    failed: list[FailedCheck] = []
    details: dict[str, Any] = {}
    distances: list[float] = []
    powerless: list[str] = []
    for check in CHECKS:
        seen = [(report.rank, report.checks[check]) for report in ranks if check in report.checks]
        if not seen:
            continue
        checks[check] = not any(view.count for _, view in seen)
        distances.append(max(view.max_abs_diff for _, view in seen))
        controlled = dict.fromkeys(name for _, view in seen for name in view.control)
        fired = {name: any(view.control.get(name) for _, view in seen) for name in controlled}
        missed = sorted(name for name, reported in fired.items() if not reported)
        details[check] = {
            "held": checks[check],
            "control": fired,
            "control_missed": missed if fired else None,
            "worst": _worst(seen),
            "mismatch_count": sum(view.count for _, view in seen),
        }
        if missed or not fired:
            powerless.append(powerless_sentence(check, missed))
        if not checks[check]:
            rank, first = next((rank, view.first) for rank, view in seen if view.first)
            names = dict.fromkeys(name for _, view in seen for name in view.names)
            failed.append(FailedCheck(check, rank, first, tuple(names)))
    not_compiled = [report.rank for report in ranks if report.compiled is False]
    if not_compiled:
        powerless.append(f"compile: nothing was compiled on rank {not_compiled[0]}")
    if not details:
        powerless.append("no check applied")
    return Verdict(
        status="fail" if failed else "vacuous" if powerless else "pass",
        reason="; ".join(check_sentence(*one) for one in failed) or "; ".join(powerless) or None,
        checks=checks,
        failed=tuple(failed),
        powered=not powerless,
        max_abs_diff=max(distances, default=None),
        first_mismatch=f"rank {failed[0].rank}: {finding_sentence(failed[0].first)}" if failed else None,
        details={"checks": details, "ranks": [report.plain() for report in ranks]},
    )


def _worst(seen: Sequence[tuple[int, CheckReport]]) -> list[dict[str, Any]]:
    """The worst findings of all ranks: of each piece of state at each checkpoint what the rank has on which
    it is worst, and on which ranks it differs."""
    found = [(finding, rank) for rank, view in seen for finding in view.worst]
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for finding, rank in sorted(found, key=lambda item: badness(item[0]), reverse=True):
        one = worst.setdefault((finding.name, finding.where), {**finding.plain(), "rank": rank, "ranks": []})
        one["ranks"] = sorted({*one["ranks"], rank})
    return list(worst.values())[:_KEPT]


def _with_known_failures(job: Job, verdict: Verdict) -> Verdict:
    """An `xfail` of a listed failure or error, an `xpass` of a cell that passed though it is listed.

    A cell that fails a check, or differs in a name, which is not listed for it stays a `fail`; one
    that is vacuous, or did not come as far as a verdict, stays what it is.
    """
    failed = {one.check: one.names for one in verdict.failed}
    for failure in job.known_failures:
        if verdict.status in ("fail", "error") and failure.explains(failed, verdict.error):
            return replace(verdict, status="xfail", reason=f"known failure {failure.id}: {verdict.reason}")
        if verdict.status == "pass":
            reason = f"known failure {failure.id} did not happen ({failure.reason})"
            return replace(verdict, status="xpass", reason=reason)
    return verdict


def _with_fault(job: Job, verdict: Verdict) -> Verdict:
    """Whether a planted fault was seen as it has to be: by a check, or by a loader that refused."""
    fault = job.config.fault
    failing = verdict.status in ("fail", "error")
    expects = [_of_world(expect, job.world_size) for expect in fault.expects]
    if failing and any(_is_as_expected(expect, verdict) for expect in expects):
        return replace(verdict, fault_seen=True)
    wanted = " or ".join(map(_expectation, expects))
    reason = f"fault={fault.name} was not seen as {wanted}: {verdict.reason or 'nothing was'}"
    return replace(verdict, fault_seen=False, reason=reason)


def _of_world(expect: Expect, world_size: int) -> Expect:
    """With a rank that counts from the last one as that rank."""
    if expect.rank is None or expect.rank >= 0:
        return expect
    return replace(expect, rank=max(world_size + expect.rank, 0))


def _is_as_expected(expect: Expect, verdict: Verdict) -> bool:
    error = verdict.error
    if expect.phases:
        return (
            error is not None
            and error.phase in expect.phases
            and expect.error in (None, error.type)
            and re.search(expect.message or "", error.message) is not None
        )
    return any(
        expect.check in (None, failed.check)
        and expect.rank in (None, failed.rank)
        and expect.problem in (None, failed.first.problem)
        and re.fullmatch(expect.name or ".*", failed.first.name)
        for failed in verdict.failed
    )


def _expectation(expect: Expect) -> str:
    """What an expectation asks for: `optim_equal on rank 2 of param_groups.0.lr`."""
    if expect.phases:
        text = f"{expect.error or 'an error'} in {' or '.join(expect.phases)}"
        return f"{text} ({expect.message})" if expect.message else text
    parts = (
        expect.check or "a check",
        f"on rank {expect.rank}" if expect.rank is not None else "",
        f"of {expect.name}" if expect.name else "",
        f"({expect.problem})" if expect.problem else "",
    )
    return " ".join(filter(None, parts))
