"""Mismatches, and the other reasons why a cell does not pass, as values. Known failures and injected faults
match these values; `dcpbench.core.sentences` turns them into text last, and nothing matches the text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Problem(StrEnum):
    """The kind of a mismatch."""

    differs = "differs"  # elements of a tensor
    nan = "nan"  # not a number, where a number was expected
    digests_differ = "digests_differ"  # of a tensor of which only digests were kept
    value = "value"  # of anything but a tensor
    missing = "missing"  # on the actual side
    unexpected = "unexpected"  # on the actual side
    dtype = "dtype"
    shape = "shape"
    local_shape = "local_shape"
    placements = "placements"
    extent = "extent"
    replicas = "replicas"  # ranks have different bits for the same part
    ranks_disagree = "ranks_disagree"  # about a value, a shape or a dtype
    uncovered = "uncovered"  # elements that no rank has, or no chunk
    far = "far"  # from a twin or a loss, beyond the tolerance
    only_twin = "only_twin"  # the parallel model does not have it
    only_parallel = "only_parallel"  # the twin does not have it
    not_stored = "not_stored"  # to be saved, but not in the checkpoint
    not_asked_for = "not_asked_for"  # in the checkpoint, but not to be saved
    chunks = "chunks"  # of a checkpoint: overlapping, beyond their tensor, or not stored
    files = "files"  # of a checkpoint: missing, or of the wrong length
    ranges = "ranges"  # bytes of a checkpoint's file: of two entries, of none, or the wrong number
    stray = "stray"  # a file of a checkpoint that no entry names
    not_synced = "not_synced"  # a file of a checkpoint that should have been synced
    unreadable = "unreadable"  # bytes of a file that cannot be decoded
    unclaimed = "unclaimed"  # stored in a checkpoint, but not under any key
    file_changed = "file_changed"  # after its save reported success: appeared, disappeared or changed
    contract = "contract"  # required by a scenario in addition to equality


Sides = tuple[str, str]
"""Phrases for the expected and the actual side of a comparison, with `{}` where a sentence has the value."""

SAVED: Sides = ("saved {}", "restored {}")
RESUMED: Sides = ("{} in the uninterrupted run", "{} in the resumed run")
TWIN: Sides = ("twin {}", "here {}")

AS_STORED = "checkpoint"
"""Value of `Mismatch.by` if the state was restored as the checkpoint has it, and the checkpoint is wrong."""

SECOND_DERIVATIVES = "second_derivatives"
"""Value of `Mismatch.by` for gradients under `fully_shard`, in a step with second derivatives or the next."""


MOMENTS = {
    "checkpoint": "in the checkpoint of step {step}",
    "uninterrupted": "in the uninterrupted run",
    "saved": "after the save of step {step}",
    "save_ended": "once the save of step {step} had ended",
    "save_beside": "of a save that cannot be written, beside another",
    "loaded": "after the load of step {step}",
    "absent_key": "of a load of an absent key in the checkpoint of step {step}",
    "first_step": "one step after the checkpoint of step {step}",
    "resumed": "after the checkpoint of step {step}",
    "tuned": "after the fine-tuning",
    "restarted": "after the restart from step {step}",
}
"""The moments of cells at which checks compare, with their phrases."""


class Place(NamedTuple):
    """A moment of a cell at which a check compares. Equal places are the same one.

    >>> str(Place("checkpoint", 4, ", saved again"))
    'in the checkpoint of step 4, saved again'

    Args:
        moment: one of `MOMENTS`, or a scenario's own phrase.
        step: of the checkpoint, save or load, if there is one.
        how: ends the phrase if something is unusual about it.
    """

    moment: str
    step: int | None = None
    how: str = ""

    def __str__(self) -> str:
        phrase = MOMENTS.get(self.moment, self.moment)
        return f"{phrase.replace('{step}', str(self.step))}{self.how}"


NOWHERE = Place("")
"""The place of what was found without a cell."""

DISK_FULL = "the disk of its checkpoints is full"
"""Begins `RaisedError.note` if it is."""


@dataclass(frozen=True)
class Mismatch:
    """One difference that a check found in one piece of state, on one rank.

    >>> facts = {"expected": "0.1", "actual": "0.2"}
    >>> one = Mismatch("param_groups.0.lr", Problem.value, "lr", 0.1, facts, Place("checkpoint", 4))
    >>> one.plain()["actual"]
    '0.2'

    Args:
        name: FQN, or another name (the loss of a step, a file, an object).
        problem: the kind of mismatch.
        kind: the kind of state: param, buffer, exp_avg, step, lr, ….
        max_abs_diff: largest absolute difference of two elements, if it can be computed.
        facts: JSON data by the names in the templates of `dcpbench.core.sentences`: `expected`, `actual`,
            `index`, `expected_bits`, `differing`, `elements`, ….
        where: the place.
        by: the known defect of torch that produces exactly this state, if one does, `AS_STORED`
            or `SECOND_DERIVATIVES`.
        sides: what was compared; None means `SAVED`.
    """

    name: str
    problem: Problem
    kind: str | None = None
    max_abs_diff: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    where: Place = NOWHERE
    by: str | None = None
    sides: Sides | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as a flat dict for JSON, without null values."""
        written = {
            "where": str(self.where) or None,
            "of_step": self.where.step,
            "by": self.by,
            "sides": self.sides,
        }
        flat = {**vars(self), "problem": self.problem.value, **self.facts, **written}
        return {key: value for key, value in flat.items() if value is not None and key != "facts"}


class GapKind(StrEnum):
    """The reason why a check could not have failed."""

    no_control = "no_control"  # nowhere
    not_reported = "not_reported"  # a name: no rank's control reported it
    not_looked_at = "not_looked_at"  # a place: one rank did not compare there
    not_compared = "not_compared"  # a name: no rank compared it
    not_controlled = "not_controlled"  # a name: one rank compared it without a control


@dataclass(frozen=True)
class Gap:
    """State that a check did not compare, or could not have found different.

    >>> Gap(GapKind.not_reported, Place("checkpoint", 4), "net1.weight").rank is None
    True

    Args:
        where: the place, as in `Mismatch`.
        name: None for every name at the place.
        rank: None for all ranks together.
    """

    kind: GapKind
    where: Place = NOWHERE
    name: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class RaisedError:
    """An exception on a rank.

    >>> RaisedError(2, "load", "KeyError", "'net1.weight'").phase
    'load'

    Args:
        rank, phase: the rank that reported it, and the phase that the rank was in.
        type: name of the exception's class; of the original exception if DCP wrapped it.
        message: its text, on one line.
        wrapped: the class in which DCP passed it on to every rank, if it did.
        origin: the rank that raised the original exception, if it was wrapped.
        note: a sentence about the circumstances (a full disk).
        line: file and line of the user's code that it comes from, if there is any.
        when: in a build or in training, whether that was before or after a save or a load.
        by: the known defect of torch that raises exactly this, if one does.
        code: the code of that line, or its place if that cannot be read.
        in_torch: True if torch raised it, not code that torch calls.
        of: what torch was given: names of the classes of the innermost module and optimizer, with their
            bases, names of submodules that have several, `state[CLASS]` for each key of the optimizer's state
            that is not a parameter, and `parameter without state`.
    """

    rank: int
    phase: str
    type: str
    message: str
    wrapped: str | None = None
    origin: int | None = None
    note: str | None = None
    line: str | None = None
    when: Place | None = None
    by: str | None = None
    code: str | None = None
    in_torch: bool = False
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class LimitReached:
    """A time limit that a cell or one of its phases exceeded.

    >>> LimitReached("timeouts.load_s", 60.0, "load", late={1: "load"}, others={0: "verify"}, doing={}).key
    'timeouts.load_s'

    Args:
        key: the configuration key of the limit.
        limit_s: seconds.
        phase: the phase that it applies to; None for the complete cell.
        late: by rank, the phase of each rank that exceeded it.
        others: by rank, the phase of each other rank that had not finished.
        doing: by rank, the code that it was running, if that is known.
        hosts: by rank, the host of each late rank, if there can be several hosts.
    """

    key: str
    limit_s: float
    phase: str | None
    late: Mapping[int, str]
    others: Mapping[int, str]
    doing: Mapping[int, str]
    hosts: Mapping[int, str] = field(default_factory=dict)
