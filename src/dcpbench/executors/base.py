"""The contract of what starts ranks and runs stages of cells on them; nothing else knows where ranks live."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dcpbench.config.schema import TimeoutsConfig
from dcpbench.records.findings import Cause, RaisedError
from dcpbench.records.rank_report import RankReport
from dcpbench.worker.messages import CellSpec, WorldKind

OnPhase = Callable[[int, str], None]
"""Called with a rank and the phase that it begins."""


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: with a report of every rank, or with a `status` and its `cause`.

    `raised` is what each rank raised that raised by itself; `before` is what those that raised had reported
    until then; `details` is more for the row's details; `dropped` tells of messages that came meanwhile and
    were not about the stage. Where no rank could be started, `status` is `error` and `problem` says why.
    """

    reports: list[RankReport]
    status: str | None = None
    cause: Cause | None = None
    problem: str | None = None
    raised: tuple[RaisedError, ...] = ()
    before: list[RankReport] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


class Executor(Protocol):
    """Ranks of several kinds, kept from stage to stage until something went wrong on them."""

    interrupted: bool

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> Outcome:
        """Run a stage on ranks of this kind, fresh ones if there are none, and wait for its end."""

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """Have the ranks of other kinds leave: they would only take up room, or are to be fresh again."""

    def interrupt(self) -> None:
        """End what runs in another thread: its stage ends at once, and no other begins."""

    def end(self) -> None:
        """End all ranks, and wait until they and whatever they started are gone."""
