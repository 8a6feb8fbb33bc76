"""Ends of stages as a test wants them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import NOWHERE, Mismatch, Place, Problem, RaisedError
from dcpbench.core.rank_report import CheckReport, RankReport
from dcpbench.core.stage_end import Failed, RankEnd, StageEnd


def reported(reports: Iterable[RankReport]) -> StageEnd:
    """A stage from which these ranks reported."""
    return StageEnd(tuple(replace(on(one.rank), report=one) for one in reports))


def raised(
    *errors: RaisedError, reports: Iterable[RankReport] = (), before: Sequence[RankReport] = ()
) -> StageEnd:
    """A stage in which ranks raised, one after the other, and others reported.

    Args:
        before: what those that raised had reported until then.
    """
    until = {report.rank: report for report in before}
    ends = [
        replace(on(error.rank), failed=Failed(at, error, False, until.get(error.rank)))
        for at, error in enumerate(errors)
    ]
    return StageEnd((*ends, *reported(reports).ranks))


def on(rank: int) -> RankEnd:
    """A rank that has yet to tell how its stage ends."""
    return RankEnd(rank, rank, "here", "load")


def reports(ranks: int = 2) -> list[RankReport]:
    return [RankReport(rank, {check: seen_at(NOWHERE) for check in CHECKS}) for rank in range(ranks)]


def seen_at(*places: Place) -> CheckReport:
    """A check of one name at these places, each with its control."""
    return CheckReport(
        compared={where: {"w": True} for where in places}, control={where: {"w": True} for where in places}
    )


def finding(name: str, text: str, distance: float | None = None, where: Place = NOWHERE) -> Mismatch:
    return Mismatch(name, Problem.contract, None, distance, {"text": text}, where)
