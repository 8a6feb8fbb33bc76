"""From how the stages of an attempt at a cell ended to one verdict."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dcpbench.config.groups import Expect, FaultConfig, rank_of
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Gap, GapKind, Mismatch, RaisedError
from dcpbench.core.rank_report import CheckReport, RankReport, badness
from dcpbench.core.sentences import (
    beside_known_sentence,
    cause_sentence,
    check_sentence,
    failed_sentence,
    finding_sentence,
    known_sentence,
    place_sentence,
    powerless_sentence,
    rank_numbers,
    rank_sentence,
)
from dcpbench.core.stage_end import StageEnd
from dcpbench.verdict.first_cause import Stop, stop_of
from dcpbench.verdict.known_failures import KnownFailure, explaining

_KEPT = 10
"""How many mismatches the details of a row have for each check."""


class FailedCheck(NamedTuple):
    """A check that did not hold: its first mismatch, on which rank, what else there is of any rank, and where
    that rank is, if there are several hosts."""

    check: str
    rank: int
    first: Mismatch
    mismatches: tuple[Mismatch, ...]
    place: str | None = None

    @property
    def on_rank(self) -> str:
        """On which rank, in words."""
        return rank_sentence(self.rank, self.place)

    @property
    def names(self) -> list[str]:
        """Of all that differs."""
        return list(dict.fromkeys(mismatch.name for mismatch in self.mismatches))

    @property
    def sentence(self) -> str:
        """Why it did not hold."""
        return check_sentence(self.check, self.on_rank, self.first, self.names)


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt at a cell, as columns of its row.

    `failed`, `error` and what all ranks `raised` are matched with known failures and faults. `powerless`
    tells which checks could not have failed.
    """

    status: str
    reason: str | None = None
    checks: dict[str, bool | None] = field(default_factory=dict)
    failed: tuple[FailedCheck, ...] = ()
    error: RaisedError | None = None
    raised: tuple[RaisedError, ...] = ()
    powerless: tuple[str, ...] = ()
    powered: bool | None = None
    resume: bool | None = None
    training: bool | None = None
    max_abs_diff: float | None = None
    first_mismatch: str | None = None
    fault_seen: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """What the verdict has to know of a cell.

    Args:
        worlds: of how many ranks each of its stages is.
        dies: the functions of the stages that are there for a rank to die in them, by the stage's number.
        known_failures: those that are listed for it.
        fault: what is injected into it.
    """

    worlds: Sequence[int]
    dies: Mapping[int, str] = field(default_factory=dict)
    known_failures: Sequence[KnownFailure] = ()
    fault: FaultConfig | None = None

    def stop_of(self, stage: int, end: StageEnd) -> Stop | None:
        """Return why one of its stages did not end as expected; None if it did."""
        return stop_of(end, self.dies.get(stage))


def verdict_of(expected: Expected, ends: Sequence[StageEnd]) -> Verdict:
    """Judge an attempt at a cell by how its stages ended, up to the first that did not end as expected."""
    verdict = _ended(expected, ends)
    if verdict.status == "skip":
        return verdict
    fault, error = expected.fault, verdict.error
    if fault and error and error.not_injected and not verdict.failed:
        return Verdict("skip", f"fault={fault.name}: {error.message}")
    verdict = _with_known_failures(expected.known_failures, verdict)
    return _with_fault(fault, max(expected.worlds), verdict) if fault else verdict


def _ended(expected: Expected, ends: Sequence[StageEnd]) -> Verdict:
    last = ends[-1]
    if stop := expected.stop_of(len(ends) - 1, last):
        if stop.cause is None:
            return Verdict(stop.status, stop.problem)
        reports = [report for end in ends for report in end.observed]
        failed = tuple(filter(None, (_failed(check, reports) for check in CHECKS)))
        details = {"reports_of_ranks": sorted(report.rank for report in last.reports), **stop.details}
        if late := {str(report.rank): report.late_files for report in reports if report.late_files}:
            details["late_files"] = late
        return Verdict(
            stop.status,
            cause_sentence(stop.cause, [one.sentence for one in failed]),
            failed=failed,
            error=stop.cause if isinstance(stop.cause, RaisedError) else None,
            raised=stop.raised,
            details=details,
        )
    if last.reports and all(report.skip for report in last.reports):
        return Verdict("skip", last.reports[0].skip)
    # The ranks of a stage that is there to die owe no report.
    worlds = [0 if stage in expected.dies else size for stage, size in enumerate(expected.worlds)]
    return judge([end.reports for end in ends], worlds)


def judge(stages: Sequence[Sequence[RankReport]], worlds: Sequence[int]) -> Verdict:
    """A check holds if it held on every rank. It has power if every rank looked at every place, each name was
    compared on some rank, with a control wherever it was compared, and reported by some rank's control.

    Some rank, not every: a shard of zeros may equal its perturbed counterpart's, and an empty shard
    has nothing to differ in.

    Args:
        stages: the reports of each stage that ran.
        worlds: of how many ranks each stage owes a report.
    """
    ranks = sorted((report for reports in stages for report in reports), key=lambda report: report.rank)
    judged = {
        check: _judged(check, stages, ranks)
        for check in CHECKS
        if any(check in report.checks for report in ranks)
    }
    failed = [one.failed for one in judged.values() if one.failed]
    powerless = [powerless_sentence(check, one.gaps) for check, one in judged.items() if one.gaps]
    not_compiled = [f"rank {report.rank}: {report.not_compiled}" for report in ranks if report.not_compiled]
    if not_compiled:
        powerless.append(f"compile: {not_compiled[0]}")
    powerless += _not_reported(stages, worlds)
    if not judged:
        powerless.append("no check applied")
    of_resume, of_training = (
        [one.sentence for one in failed if CHECKS[one.check].training is of] for of in (False, True)
    )
    resumes = _held(judged, training=False)
    return Verdict(
        status="fail" if failed else "vacuous" if powerless else "pass",
        reason=failed_sentence(of_resume, of_training, resumes) or "; ".join(powerless) or None,
        checks=dict.fromkeys(CHECKS) | {check: one.failed is None for check, one in judged.items()},
        failed=tuple(failed),
        powerless=tuple(powerless),
        powered=not powerless,
        resume=resumes,
        training=_held(judged, training=True),
        max_abs_diff=max((one.max_abs_diff for one in judged.values()), default=None),
        first_mismatch=f"{failed[0].on_rank}: {finding_sentence(failed[0].first)}" if failed else None,
        details={
            "checks": {check: one.details for check, one in judged.items()},
            "ranks": [report.plain() for report in ranks],
        },
    )


class _Judged(NamedTuple):
    """What all ranks have seen by one check: what it found, and what of it had no power."""

    failed: FailedCheck | None
    gaps: list[Gap]
    max_abs_diff: float
    details: dict[str, Any]


def _held(judged: Mapping[str, _Judged], training: bool) -> bool | None:
    """Whether the checks of training, or all others, held and were able to fail; None where none was made."""
    some = [one for check, one in judged.items() if CHECKS[check].training is training]
    return all(one.failed is None and not one.gaps for one in some) if some else None


def _judged(check: str, stages: Sequence[Sequence[RankReport]], ranks: Sequence[RankReport]) -> _Judged:
    seen = [(report.rank, report.checks[check]) for report in ranks if check in report.checks]
    failed = _failed(check, ranks)
    gaps = [gap for reports in stages for gap in gaps_of(check, reports)]
    missed = {_named(gap.name, gap.where) for gap in gaps if gap.kind is GapKind.not_reported}
    fired = {
        one: one not in missed
        for _, view in seen
        for where, control in view.control.items()
        for name in control
        if (one := _named(name, where))
    }
    details = {
        "held": failed is None,
        "control": fired,
        "control_missed": sorted(missed),
        "worst": _worst(seen),
        "mismatch_count": sum(view.count for _, view in seen),
    }
    gaps = gaps if fired else [Gap(GapKind.no_control)]
    return _Judged(failed, gaps, max(view.max_abs_diff for _, view in seen), details)


def _failed(check: str, reports: Sequence[RankReport]) -> FailedCheck | None:
    """What all ranks found of a check; None if it held."""
    seen = [(report.rank, report.checks[check]) for report in reports if check in report.checks]
    found = tuple(mismatch for _, view in seen for mismatch in view.distinct.values())
    firsts = [(rank, view.first) for rank, view in seen if view.first]
    # In the order in which places were looked at: what is saved again carries a defect to other ranks.
    places = [*(place for _, view in seen for place in view.compared), *(one.where for _, one in firsts)]
    first = min(firsts, key=lambda one: places.index(one[1].where), default=None)
    if first is None:
        return None
    where = {report.rank: place_sentence(report.local_rank, report.host) for report in reports}
    several = len({report.host for report in reports}) > 1
    return FailedCheck(check, *first, found, where[first[0]] if several else None)


def gaps_of(check: str, reports: Sequence[RankReport]) -> Iterator[Gap]:
    """What the ranks of one stage did not look at, or could not have seen, by one check."""
    views = {report.rank: report.checks.get(check, CheckReport()) for report in reports}
    places = dict.fromkeys(where for view in views.values() for where in (*view.compared, *view.control))
    for where in places:
        had = {rank: view.compared.get(where) for rank, view in views.items()}
        fired = {rank: view.control.get(where, {}) for rank, view in views.items()}
        for rank, names in had.items():
            if names is None:
                yield Gap(GapKind.not_looked_at, where, rank=rank)
        compared = [names for names in had.values() if names]
        if not compared:
            yield Gap(GapKind.not_compared, where)
        for name in dict.fromkeys(name for names in compared for name in names):
            here = [rank for rank, names in had.items() if names and names.get(name)]
            if not here:
                yield Gap(GapKind.not_compared, where, name)
            for rank in here:
                if name not in fired[rank]:
                    yield Gap(GapKind.not_controlled, where, name, rank)
        for name in sorted({name for control in fired.values() for name in control}):
            if not any(control.get(name) for control in fired.values()):
                yield Gap(GapKind.not_reported, where, name)


def _named(name: str | None, where: str) -> str:
    return f"{name} {where}".strip()


def _not_reported(stages: Sequence[Sequence[RankReport]], worlds: Sequence[int]) -> Iterator[str]:
    """Ranks, and whole stages, of which there is no report."""
    for number, world_size in enumerate(worlds):
        reported = {report.rank for report in stages[number]} if number < len(stages) else set()
        missing = [rank for rank in range(world_size) if rank not in reported]
        if missing:
            yield f"stage {number}: no report of rank {rank_numbers(missing)}"


def _worst(seen: Sequence[tuple[int, CheckReport]]) -> list[dict[str, Any]]:
    """The worst mismatches of all ranks: of each piece of state at each checkpoint what the rank has on which
    it is worst, and on which ranks it differs."""
    found = [(mismatch, rank) for rank, view in seen for mismatch in view.worst]
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for mismatch, rank in sorted(found, key=lambda item: badness(item[0]), reverse=True):
        one = worst.setdefault(
            (mismatch.name, mismatch.where), {**mismatch.plain(), "rank": rank, "ranks": []}
        )
        one["ranks"] = sorted({*one["ranks"], rank})
    return list(worst.values())[:_KEPT]


def _with_known_failures(known: Sequence[KnownFailure], verdict: Verdict) -> Verdict:
    """An `xfail` of what is listed, an `xpass` of a cell that passed though it is listed.

    What is listed excuses no check that could not have failed: such a cell is `vacuous`. One in which
    anything is found, or any rank raises, that is not listed for it stays what it is, and says that first.
    """
    missed = [failure for failure in known if failure.always] if verdict.status == "pass" else []
    if missed:
        reason = f"known failure {missed[0].id} did not happen ({missed[0].reason})"
        return replace(verdict, status="xpass", reason=reason)
    failed = {one.check: one.mismatches for one in verdict.failed}
    if verdict.status not in ("fail", "error"):
        return verdict
    explanation = explaining(known, failed, verdict.raised)
    if not explanation.by:
        return verdict
    if not explanation.whole:
        beside = [f"{check}: {finding_sentence(mismatch)}" for check, mismatch in explanation.found]
        beside += [cause_sentence(error) for error in explanation.raised]
        reason = beside_known_sentence([one.id for one in explanation.by], beside, str(verdict.reason))
        return replace(verdict, reason=reason)
    listed = [(one.id, one.reason, one.link) for one in explanation.by]
    reason = known_sentence(listed, str(verdict.reason))
    if verdict.powerless:
        return replace(verdict, status="vacuous", reason=f"{'; '.join(verdict.powerless)} ({reason})")
    return replace(verdict, status="xfail", reason=reason)


def _with_fault(fault: FaultConfig, world_size: int, verdict: Verdict) -> Verdict:
    """Whether an injected fault was seen as it has to be: by a check, or by a loader that refused."""
    failing = verdict.status in ("fail", "error")
    expects = [_of_world(expect, world_size) for expect in fault.expects]
    if failing and any(_is_as_expected(expect, verdict) for expect in expects):
        return replace(verdict, fault_seen=True)
    wanted = " or ".join(map(_expectation, expects))
    reason = f"fault={fault.name} was not seen as {wanted}: {verdict.reason or 'nothing was'}"
    return replace(verdict, fault_seen=False, reason=reason)


def _of_world(expect: Expect, world_size: int) -> Expect:
    """With the rank that it is in a world of this size."""
    return expect if expect.rank is None else replace(expect, rank=rank_of(expect.rank, world_size))


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
