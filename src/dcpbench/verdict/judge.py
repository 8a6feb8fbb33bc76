"""Judges the reports of all ranks: which checks passed, and which could have failed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Gap, GapKind, Mismatch, Place
from dcpbench.core.rank_report import CheckReport, RankReport, badness
from dcpbench.core.sentences import mismatch_sentence, place_sentence
from dcpbench.verdict.sentences import failed_sentence, gap_sentence, rank_numbers
from dcpbench.verdict.verdict import FailedCheck, Verdict

_KEPT = 20
"""Number of mismatches that a row's details list for each check."""
_NUMBER = re.compile(r"\d{1,15}")


def judge(stages: Sequence[Sequence[RankReport]], worlds: Sequence[int]) -> Verdict:
    """Return the verdict of these reports.

    A check passes if it passed on every rank. It could have failed if every rank compared at every place,
    some rank compared each name, each of these ranks had a control for the name, and some rank's control
    reported it. One rank is enough, because a shard of zeros can equal its perturbed counterpart, and an
    empty shard cannot differ.

    >>> from dcpbench.core.rank_report import Compared
    >>> report = RankReport(0, {"model_equal": CheckReport()})
    >>> report.checks["model_equal"].record(Compared((), {"net1.weight": True}, {"net1.weight": True}), "")
    >>> judge([[report]], [1]).status
    'pass'
    >>> judge([[report]], [2]).reason
    'stage 0: no report of rank 1'

    Args:
        stages: the reports of each stage that ran.
        worlds: the number of ranks of each stage that have to report.
    """
    ranks = sorted((report for reports in stages for report in reports), key=lambda report: report.rank)
    results = {
        check: _result(check, stages, ranks)
        for check in CHECKS
        if any(check in report.checks for report in ranks)
    }
    failed = [result.failed for result in results.values() if result.failed]
    gaps = [gap_sentence(check, result.gaps) for check, result in results.items() if result.gaps]
    not_compiled = [f"rank {report.rank}: {report.not_compiled}" for report in ranks if report.not_compiled]
    if not_compiled:
        gaps.append(f"compile: {not_compiled[0]}")
    gaps += _not_reported(stages, worlds)
    if not results:
        gaps.append("no check applied")
    of_resume, of_training = (
        [check.sentence for check in failed if CHECKS[check.check].training is training]
        for training in (False, True)
    )
    resumes = _passed(results, training=False)
    has_resumed = not {"loss_resume_equal", "loss_resume_close"}.isdisjoint(results)
    reason = failed_sentence(of_resume, of_training, resumes and has_resumed) if failed else "; ".join(gaps)
    return Verdict(
        status="fail" if failed else "vacuous" if gaps else "pass",
        reason=reason or None,
        checks=dict.fromkeys(CHECKS) | {check: result.failed is None for check, result in results.items()},
        failed=tuple(failed),
        gaps=tuple(gaps),
        powered=not gaps,
        resume=resumes,
        training=_passed(results, training=True),
        max_abs_diff=max((result.max_abs_diff for result in results.values()), default=None),
        first_mismatch=first_mismatch_of(failed[0]) if failed else None,
        details={
            "checks": {check: result.details for check, result in results.items()},
            "ranks": [report.plain() for report in ranks],
        },
    )


def first_mismatch_of(failed: FailedCheck) -> str:
    """Return the first mismatch of a check with its rank."""
    return f"{failed.on_rank}: {mismatch_sentence(failed.first)}"


class _Result(NamedTuple):
    """The result of one check on all ranks. `gaps` are empty if it could have failed."""

    failed: FailedCheck | None
    gaps: list[Gap]
    max_abs_diff: float
    details: dict[str, Any]


def _passed(results: Mapping[str, _Result], training: bool) -> bool | None:
    """Return whether the checks of training, or all others, passed and could have failed; None if there are
    none."""
    some = [result for check, result in results.items() if CHECKS[check].training is training]
    return all(result.failed is None and not result.gaps for result in some) if some else None


def _result(check: str, stages: Sequence[Sequence[RankReport]], ranks: Sequence[RankReport]) -> _Result:
    views = _views(check, ranks)
    failed = failed_check(check, ranks)
    gaps = [gap for reports in stages for gap in gaps_of(check, reports)]
    missed = {(gap.name, gap.where) for gap in gaps if gap.kind is GapKind.not_reported}
    controls: dict[str, bool] = {}
    for where, of in (control for _, view in views for control in view.control.items()):
        place = str(where)
        controls |= {f"{name} {place}".strip(): (name, where) not in missed for name in of}
    details = {
        "held": failed is None,
        "control": controls,
        "control_missed": sorted(name for name, caught in controls.items() if not caught),
        "worst": _listed(views, failed) if failed else [],
        "mismatch_count": sum(view.count for _, view in views),
    }
    gaps = gaps if controls else [Gap(GapKind.no_control)]
    return _Result(failed, gaps, max(view.max_abs_diff for _, view in views), details)


def _views(check: str, reports: Sequence[RankReport]) -> list[tuple[int, CheckReport]]:
    """Return the ranks that made a check, each with its results."""
    return [(report.rank, report.checks[check]) for report in reports if check in report.checks]


def failed_check(check: str, reports: Sequence[RankReport]) -> FailedCheck | None:
    """Return the mismatches of all ranks by a check; None if it passed."""
    views = _views(check, reports)
    mismatches = tuple(mismatch for _, view in views for mismatch in view.distinct.values())
    firsts = [(rank, view.first) for rank, view in views if view.first]
    # In the order in which places were compared: a second save carries a defect to other ranks.
    places = [
        *(place for _, view in views for place in view.compared),
        *(view_first.where for _, view_first in firsts),
    ]
    first = min(firsts, key=lambda rank_and_first: places.index(rank_and_first[1].where), default=None)
    if first is None:
        return None
    place_of = {report.rank: place_sentence(report.local_rank, report.host) for report in reports}
    several = len({report.host for report in reports}) > 1
    return FailedCheck(check, *first, mismatches, place_of[first[0]] if several else None)


def gaps_of(check: str, reports: Sequence[RankReport]) -> Iterator[Gap]:
    """Yield everything that one check did not compare, or could not have found different, in one stage."""
    views = {report.rank: report.checks.get(check, CheckReport()) for report in reports}
    places = dict.fromkeys(where for view in views.values() for where in (*view.compared, *view.control))
    for where in places:
        compared = {rank: view.compared.get(where) for rank, view in views.items()}
        controls = {rank: view.control.get(where, {}) for rank, view in views.items()}
        for rank, names in compared.items():
            if names is None:
                yield Gap(GapKind.not_looked_at, where, rank=rank)
        if not any(compared.values()):
            yield Gap(GapKind.not_compared, where)
        for name in dict.fromkeys(name for names in compared.values() for name in names or ()):
            ranks = [rank for rank, names in compared.items() if names and names.get(name)]
            if not ranks:
                yield Gap(GapKind.not_compared, where, name)
            for rank in ranks:
                if name not in controls[rank]:
                    yield Gap(GapKind.not_controlled, where, name, rank)
        for name in sorted({name for control in controls.values() for name in control}):
            if not any(control.get(name) for control in controls.values()):
                yield Gap(GapKind.not_reported, where, name)


def _not_reported(stages: Sequence[Sequence[RankReport]], worlds: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each stage in which a rank did not report."""
    for number, world_size in enumerate(worlds):
        reported = {report.rank for report in stages[number]} if number < len(stages) else set()
        missing = [rank for rank in range(world_size) if rank not in reported]
        if missing:
            yield f"stage {number}: no report of rank {rank_numbers(missing)}"


def _listed(views: Sequence[tuple[int, CheckReport]], failed: FailedCheck) -> list[dict[str, Any]]:
    """Return mismatches in order of steps: the one that the reason quotes, and the worst of the others. Each
    is that of the worst rank, with all `ranks` on which its name differs at its place."""
    same = {_place_of(failed.first): [(failed.first, failed.rank)]}
    for rank, view in views:
        for mismatch in view.distinct.values():
            same.setdefault(_place_of(mismatch), []).append((mismatch, rank))
    quoted, *others = [
        (*max(places, key=lambda place: badness(place[0])), sorted({rank for _, rank in places}))
        for places in same.values()
    ]
    worst = sorted(others, key=lambda row: badness(row[0]), reverse=True)[: _KEPT - 1]
    chosen = [(failed.first, failed.rank, quoted[2]), *(row for row in others if row in worst)]
    return [
        {**mismatch.plain(), "rank": rank, "ranks": ranks}
        for mismatch, rank, ranks in sorted(chosen, key=lambda row: _steps(row[0]))
    ]


def _place_of(mismatch: Mismatch) -> tuple[str, str, Place]:
    return mismatch.name, mismatch.problem, mismatch.where


def _steps(mismatch: Mismatch) -> tuple[int, list[int]]:
    """Return the step of a mismatch's place, and the numbers in its name, such as a step of training."""
    step = mismatch.where.step
    return -1 if step is None else step, [*map(int, _NUMBER.findall(mismatch.name))]
