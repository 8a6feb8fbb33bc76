"""Find mismatches that are exactly the effect of a known defect of torch. Plug-ins recompute it, and are
asked only after a comparison has failed."""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.plugins import plugins
from dcpbench.core.rank_report import Compared
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.run_state import State
from dcpbench.workloads.training_run import TrainingRun


@dataclass(frozen=True)
class Restored:
    """The reference of a load: the checkpoint, the target's live state, and what that was before the load.
    `names` are the mismatches of this rank, by check."""

    checkpoint: Checkpoint
    actual: State
    before: State
    names: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class StoredFiles:
    """The reference of a checkpoint's files: what they hold, and the mismatches of this rank, by key."""

    checkpoint: Checkpoint
    stored: Mapping[str, Any]
    names: frozenset[str]


@dataclass(frozen=True)
class Resumed:
    """The reference of a resumed run: an unwrapped run in the state that was restored, which may be trained,
    and the last step."""

    restored: TrainingRun
    data: Batches
    until: int


@cache
def _defects() -> dict[str, Defect]:
    named = [one for plugin in plugins() for one in plugin.defects.items()]
    return {by: pkgutil.resolve_name(target) for by, target in named}


def defects_at(cell: Cell, moment: Moment) -> dict[str, Defect]:
    """Return the defects that a cell may be subject to at a moment, the same ones on every rank."""
    return {by: one for by, one in _defects().items() if moment in one.moments and one.applies(cell.config)}


def explained(
    cell: Cell,
    moment: Moment,
    compared: Mapping[str, Compared],
    reference: Callable[[], Any],
    equal: Callable[[str, Any], Iterable[str]],
) -> dict[str, Compared]:
    """Say of mismatches by which defect they are; collective where there is one for the cell.

    Args:
        compared: what was compared with the reference, by the check.
        reference: makes what the defects are asked about.
        equal: compares again: the names of a check that are exactly those of a state.
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
