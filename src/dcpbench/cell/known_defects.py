"""Find mismatches that are exactly the effect of a known defect of torch, which plug-ins recompute. They are
called only after a comparison has failed. A run gets the saved values of what they explain: a resume then
differs from the uninterrupted run only because of something else."""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.compare.leaves import Comparison
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.mismatch import Place
from dcpbench.core.plugins import plugins
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import CHECK_OF, Name, StatePart, text_of
from dcpbench.runs.put import put_saved
from dcpbench.runs.run import Run
from dcpbench.state.snapshot import State

Part = TypeVar("Part", bound=str)


@dataclass(frozen=True)
class LoadReference:
    """The reference after a load, or of a checkpoint's files.

    Args:
        comparisons: of each part with what was saved, by name; of files by their keys.
        before: the state of the load target before the load, if a defect needs that.
    """

    checkpoint: Checkpoint
    comparisons: Mapping[StatePart, Comparison]
    before: State = field(default_factory=State)

    @property
    def actual(self) -> State:
        """The compared state, by part."""
        return {part: {**comparison.actual} for part, comparison in self.comparisons.items()}

    @property
    def names(self) -> dict[StatePart, frozenset[Any]]:
        """The names of this rank's mismatches, by part."""
        return {part: comparison.wrong for part, comparison in self.comparisons.items()}


@dataclass(frozen=True)
class RaisedInLoad:
    """The reference of a load that raised: the checkpoint, the texts of the exceptions, and the run that it
    was loaded into."""

    checkpoint: Checkpoint
    texts: frozenset[str]
    target: Run


@cache
def _defects() -> dict[str, Defect]:
    targets = {by: target for plugin in plugins() for by, target in plugin.defects.items()}
    return {by: pkgutil.resolve_name(target) for by, target in targets.items()}


def defects_at(cell: Cell, moment: Moment) -> dict[str, Defect]:
    """Return the defects that can affect a cell at a moment; the same ones on every rank."""
    return {
        by: defect
        for by, defect in _defects().items()
        if moment in defect.moments and defect.applies(cell.config)
    }


def needs_copy(cell: Cell) -> bool:
    """Return whether a defect needs a copy of the run's state from before a load."""
    return any(defect.from_before and defect.applies(cell.config) for defect in _defects().values())


def has_mismatch(comparisons: Mapping[Any, Comparison]) -> bool:
    """Return whether this rank has a mismatch."""
    return any(comparison.compared.found for comparison in comparisons.values())


def attribute(
    cell: Cell,
    moment: Moment,
    comparisons: Mapping[Part, Comparison],
    reference: Any,
    anywhere: bool,
) -> dict[Part, Compared]:
    """Name in each mismatch the defect that causes it, if one can affect the cell; then collective.

    Args:
        comparisons: by part of the state or by check.
        reference: what defects get at this moment.
        anywhere: whether a rank has a mismatch.
    """
    comparisons = dict(comparisons)
    if anywhere:
        for by, defect in defects_at(cell, moment).items():
            for state in defect.expected(cell, moment, reference):
                for part in state.keys() & comparisons.keys():
                    comparison = comparisons[part]
                    comparisons[part] = comparison.attributed(by, comparison.names_equal_to(state[part]))
    return {part: comparison.compared for part, comparison in comparisons.items()}


def attribute_in_checkpoint(
    cell: Cell,
    moment: Moment,
    checkpoint: Checkpoint,
    comparisons: Mapping[StatePart, Comparison],
    anywhere: bool,
) -> dict[StatePart, Compared]:
    """Name the defects in mismatches with what a checkpoint has, as `attribute` does."""
    before = cell.unrestored.get(checkpoint.checkpoint_id, {})
    return attribute(cell, moment, comparisons, LoadReference(checkpoint, comparisons, before), anywhere)


def record_restored(
    cell: Cell, checkpoint: Checkpoint, comparisons: Mapping[StatePart, Comparison], where: Place
) -> None:
    """Record comparisons of what was loaded or read with what a checkpoint has, with the defects that cause
    mismatches."""
    anywhere = bool(defects_at(cell, "restored")) and cell.world.any_rank(has_mismatch(comparisons))
    (cell.unexplained.discard if anywhere else cell.unexplained.add)(checkpoint.place)
    by_part = attribute_in_checkpoint(cell, "restored", checkpoint, comparisons, anywhere)
    for part, compared in by_part.items():
        cell.record(CHECK_OF[part], compared, where)


def attribute_raised(cell: Cell, checkpoint: Checkpoint, target: Run, error: BaseException) -> None:
    """Report the defect that makes a load raise, if there is one. DCP raises the exceptions of all ranks on
    every rank, so a defect of which it raises the text can be collective."""
    wrapped = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
    about = RaisedInLoad(checkpoint, frozenset(str(cause) for cause, _ in wrapped), target)
    with cell.phase("verify", "known_defects"):
        defects = defects_at(cell, "raised").items()
        causes = (by for by, defect in defects if about.texts <= {*defect.expected(cell, "raised", about)})
        cell.report.raised_by = next(causes, None)
    cell.announce("load")


def names_by_defect(cell: Cell, part: StatePart, checkpoint: Checkpoint | None = None) -> dict[str, str]:
    """Return the names of a part that known defects alone made wrong on this rank, each with the defect, in a
    load of a checkpoint or in any load."""
    report = cell.report.checks.get(CHECK_OF[part])
    every = [*report.distinct.values()] if report else []
    mismatches = [mismatch for mismatch in every if checkpoint is None or mismatch.where == checkpoint.place]
    unexplained = {mismatch.name for mismatch in mismatches if not mismatch.by}
    return {
        mismatch.name: mismatch.by
        for mismatch in mismatches
        if mismatch.by and mismatch.name not in unexplained
    }


def repair(cell: Cell, target: Run, checkpoint: Checkpoint) -> str | None:
    """Give a run that has loaded a checkpoint the saved values of exactly what known defects made wrong.
    Return why that is not possible, if it is not; collective."""
    if checkpoint.place in cell.unexplained:
        return None
    parts: list[StatePart] = [part for part in checkpoint.state if part is not StatePart.flags]
    wrong = {part: names_by_defect(cell, part, checkpoint) for part in parts}
    if not cell.world.any_rank(any(wrong.values())):
        return None

    def read_saved(part: StatePart, name: Name) -> torch.Tensor | None:
        return checkpoint.reader_of(part, cell.checkpointer)(name)

    left = put_saved(target, checkpoint.state, wrong, read_saved)
    causes = [(text_of(name), wrong[part][text_of(name)]) for part, leaves in left.items() for name in leaves]
    first = next((of_rank[0] for of_rank in cell.world.gathered(causes) if of_rank), None)
    return first and f"{first[0]} was not restored ({first[1]}), and its saved value cannot be set"
