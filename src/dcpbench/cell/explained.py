"""Find mismatches that are exactly the effect of a known defect of torch, which plug-ins recompute. They are
called only after a comparison has failed."""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.plugins import plugins
from dcpbench.core.rank_report import Compared
from dcpbench.workloads.run import Run
from dcpbench.workloads.run_state import State, equal_names


@dataclass(frozen=True)
class Restored:
    """The reference after a load: the checkpoint, the live state of the target, its state before the load (if
    a defect needs that), and the names of this rank's mismatches by check."""

    checkpoint: Checkpoint
    actual: State
    before: State
    names: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class StoredFiles:
    """The reference of a checkpoint's files: the tensors stored in them, and the keys of this rank's
    mismatches."""

    checkpoint: Checkpoint
    stored: Mapping[str, Any]
    names: frozenset[str]


@dataclass(frozen=True)
class RaisedInLoad:
    """The reference of a load that raised: the checkpoint, the texts of the exceptions, and the run that it
    was loaded into."""

    checkpoint: Checkpoint
    texts: frozenset[str]
    target: Run


def explained_restored(
    cell: Cell,
    checkpoint: Checkpoint,
    compared: Mapping[str, Compared],
    actual: State,
    before: State | None = None,
) -> dict[str, Compared]:
    """Name the defects in mismatches between a saved state and the `actual` one, which comes from the
    checkpoint; collective as `explained`. `before` is as in `Restored`."""

    def about() -> Restored:
        names = {check: frozenset(one.name for one in wrong.found) for check, wrong in compared.items()}
        return Restored(checkpoint, actual, before or {}, names)

    return explained(cell, "restored", compared, about, equal_names(actual))


@cache
def _defects() -> dict[str, Defect]:
    targets = {by: target for plugin in plugins() for by, target in plugin.defects.items()}
    return {by: pkgutil.resolve_name(target) for by, target in targets.items()}


def defects_at(cell: Cell, moment: Moment) -> dict[str, Defect]:
    """Return the defects that can affect a cell at a moment; the same ones on every rank."""
    return {by: one for by, one in _defects().items() if moment in one.moments and one.applies(cell.config)}


def needs_copy(cell: Cell) -> bool:
    """Return whether a defect needs a copy of the run's state from before a load."""
    return any(one.from_before for one in defects_at(cell, "restored").values())


def explained(
    cell: Cell,
    moment: Moment,
    compared: Mapping[str, Compared],
    reference: Callable[[], Any],
    equal: Callable[[str, Any], Iterable[str]],
) -> dict[str, Compared]:
    """Name in each mismatch the defect that causes it, if there is one; collective if a defect can affect the
    cell.

    Args:
        compared: what was compared with the reference, by check.
        reference: builds the reference that defects get.
        equal: returns the names of a check that are equal in a state which a defect expects.
    """
    found = {check: [*one.found] for check, one in compared.items()}
    defects = defects_at(cell, moment)
    if defects and any(cell.world.gathered(any(found.values()))):
        about = reference()
        for by, defect in defects.items():
            for state in defect.expected(cell, moment, about):
                for check, wrong in found.items():
                    names = {*equal(check, state)}
                    found[check] = [replace(one, by=by) if one.name in names else one for one in wrong]
    return {check: replace(one, found=found[check]) for check, one in compared.items()}


def explain_raised(cell: Cell, checkpoint: Checkpoint, target: Run, error: BaseException) -> None:
    """Report the defect that makes a load raise, if there is one. DCP raises the exceptions of all ranks on
    every rank, so a defect of which it raises the text can be collective."""
    wrapped = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
    about = RaisedInLoad(checkpoint, frozenset(str(cause) for cause, _ in wrapped), target)
    with cell.phase("verify", "known_defects"):
        defects = defects_at(cell, "raised").items()
        causes = (by for by, one in defects if about.texts <= {*one.expected(cell, "raised", about)})
        cell.report.raised_by = next(causes, None)
    cell.announce("load")
