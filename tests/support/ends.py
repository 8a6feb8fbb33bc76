"""Ends of stages as a test wants them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dcpbench.core.mismatch import RaisedError
from dcpbench.core.rank_report import RankReport
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
