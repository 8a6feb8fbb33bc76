"""Mismatches, and other reasons why a cell does not pass, as values. Known failures and injected faults are
matched against these, never against sentences, which `dcpbench.core.sentences` makes of them last."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Problem(StrEnum):
    """How a value is wrong."""

    differs = "differs"  # a tensor's elements
    nan = "nan"  # not a number, where there was one
    digests_differ = "digests_differ"  # of a tensor of which only digests are known
    value = "value"  # of what is no tensor
    missing = "missing"  # after a load
    unexpected = "unexpected"  # after a load
    dtype = "dtype"
    shape = "shape"
    local_shape = "local_shape"
    placements = "placements"
    extent = "extent"
    replicas = "replicas"  # ranks hold other bits of one part
    ranks_disagree = "ranks_disagree"  # about a value, a shape or a dtype
    uncovered = "uncovered"  # elements that no rank, or no chunk, holds
    far = "far"  # from a twin or a loss, beyond the tolerance
    only_twin = "only_twin"  # the parallel model does not have it
    only_parallel = "only_parallel"  # the twin does not have it
    not_stored = "not_stored"  # to be saved, but not in the checkpoint
    not_asked_for = "not_asked_for"  # in the checkpoint, but not to be saved
    chunks = "chunks"  # of a checkpoint: overlapping, beyond their tensor, or stored nowhere
    files = "files"  # of a checkpoint: missing, or of another length
    ranges = "ranges"  # of bytes in a file of a checkpoint: of two entries, of none, or not as many as needed
    stray = "stray"  # a file of a checkpoint that none of its entries names
    not_synced = "not_synced"  # a file of a checkpoint that was to be synced
    unreadable = "unreadable"  # bytes of a file that cannot be decoded
    unclaimed = "unclaimed"  # stored in a checkpoint, but under no key
    file_changed = "file_changed"  # after its save had reported success: it came, went, or has other bytes
    contract = "contract"  # of what a scenario asks beside equality


AS_HELD = "checkpoint"
"""What a finding is `by` where what was restored is what the checkpoint holds."""


@dataclass(frozen=True)
class Mismatch:
    """A difference that a check found in one piece of state, on one rank.

    Args:
        name: FQN, or another name (a step's loss, a file, an object).
        problem: the kind of mismatch.
        kind: the kind of state: param, buffer, exp_avg, step, lr, ….
        max_abs_diff: the largest difference of two elements, if it can be computed.
        facts: more plain data, by the names in the templates of `dcpbench.core.sentences`: `saved`,
            `restored`, `index`, `saved_bits`, `differing`, `elements`, ….
        where: the checkpoint or the moment, in words.
        by: the known defect of torch that makes exactly this of the state, if one does, or the checkpoint,
            where what it holds is not what was saved and came back as it is.
    """

    name: str
    problem: Problem
    kind: str | None = None
    max_abs_diff: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    by: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return it for JSON, without unknown values."""
        own = {"name": self.name, "problem": self.problem.value, "kind": self.kind}
        known = {
            **own,
            "max_abs_diff": self.max_abs_diff,
            **self.facts,
            "where": self.where or None,
            "by": self.by,
        }
        return {key: value for key, value in known.items() if value is not None}


class GapKind(StrEnum):
    """Reason why a check was not able to fail somewhere."""

    no_control = "no_control"  # at all
    not_reported = "not_reported"  # by the control, on any rank
    not_looked_at = "not_looked_at"  # a place, by one rank
    not_compared = "not_compared"  # a name, by any rank
    not_controlled = "not_controlled"  # a name that one rank compared


@dataclass(frozen=True)
class Gap:
    """State that a check did not compare, or could not have found different: a name, or all names of a place
    (`where`), on one rank."""

    kind: GapKind
    where: str = ""
    name: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class RaisedError:
    """An exception of a rank.

    Args:
        rank, phase: the rank that reported it, and its phase.
        type: the name of the exception's class; where DCP has wrapped it, of the one inside.
        message: its text, on one line.
        wrapped: the class in which DCP passed it on to every rank, if it did.
        origin: of a wrapped one, the rank on which it was raised.
        note: a sentence about the circumstances (a full disk).
        not_injected: whether it means that the cell's fault cannot be injected (`NothingToInjectError`).
    """

    rank: int
    phase: str
    type: str
    message: str
    wrapped: str | None = None
    origin: int | None = None
    note: str | None = None
    not_injected: bool = False


@dataclass(frozen=True)
class LimitReached:
    """A time limit that a cell or one of its phases exceeded.

    Args:
        key: of the configuration, such as `timeouts.load_s`.
        limit_s: seconds.
        phase: the phase that it is about; None for the whole cell.
        late: the phase of each rank that was late, by rank.
        others: the phase of each other rank that had yet to end.
        doing: where each rank was, as far as that could be found out.
        hosts: the host of each rank that was late, where there may be several.
    """

    key: str
    limit_s: float
    phase: str | None
    late: Mapping[int, str]
    others: Mapping[int, str]
    doing: Mapping[int, str]
    hosts: Mapping[int, str] = field(default_factory=dict)
