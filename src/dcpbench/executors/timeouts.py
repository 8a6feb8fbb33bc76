"""How long a cell and each of its phases may take."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dcpbench.config.groups import TimeoutsConfig
from dcpbench.executors.rank_handle import Rank

UPLOAD = "upload"


@dataclass(frozen=True)
class Limit:
    """A limit of the configuration and when it is reached (`time.monotonic`); `phase` is None for the
    whole cell's."""

    at: float
    key: str
    limit_s: float
    phase: str | None = None

    def concerns(self, rank: Rank) -> bool:
        """Whether a rank is still at what took too long."""
        if not rank.waiting:
            return False
        return self.phase in (None, rank.phase) or (self.phase == UPLOAD and bool(rank.uploads))


def nearest(timeouts: TimeoutsConfig, began: float, ranks: Iterable[Rank]) -> Limit:
    """The limit that is reached first if no rank gets any further; `began` is when the cell did."""
    cell = Limit(began + timeouts.cell_s, "timeouts.cell_s", timeouts.cell_s)
    return min([cell, *_of_phases(timeouts, ranks)], key=lambda limit: limit.at)


def _of_phases(timeouts: TimeoutsConfig, ranks: Iterable[Rank]) -> Iterator[Limit]:
    limits = timeouts.of_phases()
    for rank in ranks:
        clocks = [(rank.phase, rank.since), *((UPLOAD, since) for since in rank.uploads)]
        for phase, since in clocks if rank.waiting else ():
            if (limit_s := limits.get(phase)) is not None:
                yield Limit(since + limit_s, f"timeouts.{phase}_s", limit_s, phase)
