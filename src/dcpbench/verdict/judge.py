"""Judges the reports of all ranks: which checks held, and which were able to fail."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Gap, GapKind
from dcpbench.core.rank_report import CheckReport, RankReport, badness
from dcpbench.core.sentences import mismatch_sentence, place_sentence
from dcpbench.verdict.sentences import failed_sentence, powerless_sentence, rank_numbers
from dcpbench.verdict.verdict import FailedCheck, Verdict

_KEPT = 10
"""How many mismatches a row's details have for each check."""


def judge(stages: Sequence[Sequence[RankReport]], worlds: Sequence[int]) -> Verdict:
    """Return the verdict of these reports.

    A check holds if it held on every rank. It was able to fail if every rank compared at every place, each
    name was compared on some rank, with a control wherever it was compared, and some rank's control reported
    it.

    Some rank, not every rank: a shard of zeros may equal its perturbed counterpart, and an empty shard cannot
    differ.

    Args:
        stages: the reports of each stage that ran.
        worlds: the number of ranks of each stage that have to report.
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
        first_mismatch=f"{failed[0].on_rank}: {mismatch_sentence(failed[0].first)}" if failed else None,
        details={
            "checks": {check: one.details for check, one in judged.items()},
            "ranks": [report.plain() for report in ranks],
        },
    )


class _Judged(NamedTuple):
    """Results of one check on all ranks: whether it failed, and where it was not able to fail."""

    failed: FailedCheck | None
    gaps: list[Gap]
    max_abs_diff: float
    details: dict[str, Any]


def _held(judged: Mapping[str, _Judged], training: bool) -> bool | None:
    """Return whether the checks of training, or all others, held and were able to fail; None if none ran."""
    some = [one for check, one in judged.items() if CHECKS[check].training is training]
    return all(one.failed is None and not one.gaps for one in some) if some else None


def _judged(check: str, stages: Sequence[Sequence[RankReport]], ranks: Sequence[RankReport]) -> _Judged:
    seen = [(report.rank, report.checks[check]) for report in ranks if check in report.checks]
    failed = failed_check(check, ranks)
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


def failed_check(check: str, reports: Sequence[RankReport]) -> FailedCheck | None:
    """Return the mismatches of all ranks by a check; None if it held."""
    seen = [(report.rank, report.checks[check]) for report in reports if check in report.checks]
    found = tuple(mismatch for _, view in seen for mismatch in view.distinct.values())
    firsts = [(rank, view.first) for rank, view in seen if view.first]
    # In the order in which places were compared: a second save carries a defect to other ranks.
    places = [*(place for _, view in seen for place in view.compared), *(one.where for _, one in firsts)]
    first = min(firsts, key=lambda one: places.index(one[1].where), default=None)
    if first is None:
        return None
    where = {report.rank: place_sentence(report.local_rank, report.host) for report in reports}
    several = len({report.host for report in reports}) > 1
    return FailedCheck(check, *first, found, where[first[0]] if several else None)


def gaps_of(check: str, reports: Sequence[RankReport]) -> Iterator[Gap]:
    """Yield what the ranks of one stage did not compare, or could not have found different, by one check."""
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
    """Yield a sentence for each stage without the report of some rank."""
    for number, world_size in enumerate(worlds):
        reported = {report.rank for report in stages[number]} if number < len(stages) else set()
        missing = [rank for rank in range(world_size) if rank not in reported]
        if missing:
            yield f"stage {number}: no report of rank {rank_numbers(missing)}"


def _worst(seen: Sequence[tuple[int, CheckReport]]) -> list[dict[str, Any]]:
    """Return the worst mismatches of all ranks: for each piece of state at each checkpoint the worst rank's,
    and the ranks on which it differs."""
    found = [(mismatch, rank) for rank, view in seen for mismatch in view.worst]
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for mismatch, rank in sorted(found, key=lambda item: badness(item[0]), reverse=True):
        one = worst.setdefault(
            (mismatch.name, mismatch.where), {**mismatch.plain(), "rank": rank, "ranks": []}
        )
        one["ranks"] = sorted({*one["ranks"], rank})
    return list(worst.values())[:_KEPT]
