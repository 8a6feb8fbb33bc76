"""Runs from other seeds, which are never restored: the controls of losses compare with them."""

from collections.abc import Iterator
from dataclasses import replace

from dcpbench.cell.cell import Cell
from dcpbench.cell.steps import RunRecord, other_seed
from dcpbench.verify.losses import ResumedRule
from dcpbench.workloads import build_run


def unrestored_losses(cell: Cell, record: RunRecord, taken: range) -> Iterator[list[float]]:
    """Yield the losses in these steps of runs from other seeds, trained on the same batches from step 1."""
    for number in range(record.unrestored_runs):
        known = record.unrestored.get(number, [])
        if len(known) < taken.stop - 1:
            run = build_run.build_unrestored(cell.config, cell.world, other_seed(cell, number))
            known = run.train(cell.batches, max(taken.stop - 1, cell.config.last_step))
            record.unrestored[number] = known
        yield known[taken.start - 1 : taken.stop - 1]


def with_unrestored(cell: Cell, record: RunRecord) -> RunRecord:
    """Return a record with the unrestored runs that the controls of its losses need, and no others."""
    record = replace(record, unrestored={})
    taken = range(cell.config.save_steps[0] + 1, len(record.losses) + 1)
    exactly, tolerance = not cell.config.scenario.converts, cell.config.tolerance.value
    losses = record.losses[taken.start - 1 :]
    rule = ResumedRule.of(losses, taken.start, exactly, tolerance, record.computes_in)
    rule.compare(losses, [True] * len(losses), unrestored_losses(cell, record, taken))
    return replace(record, unrestored_runs=len(record.unrestored))
