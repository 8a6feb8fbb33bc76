"""Train runs without saves, and compare each step of a run with that of an unwrapped twin. Only this module
imports `dcpbench.twin`."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from dcpbench.cell import steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import attribute, defects_at
from dcpbench.cell.steps import ReferenceRun, other_seed
from dcpbench.core.mismatch import TWIN, Place
from dcpbench.runs import build_run
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import Run, TrainingEndedError
from dcpbench.twin import lockstep
from dcpbench.twin.lockstep import Lockstep


def build_without_saves(cell: Cell, reference: ReferenceRun) -> Run:
    """Build a run that never saves; `reference` says what it has to keep."""
    cell.report.during = Place("without a save")
    with cell.phase("build"):
        run = steps.build_cell_run(cell, cell.config.seed, reference.exclusions)
        run.comes_after = cell.report.during
        cell.measure("twin_bytes", run.twin_bytes)
    if why := run.exclusions.why_no_twin:
        checks = (check for check in lockstep.TRAINING_CHECKS if check != lockstep.REPLICAS)
        cell.leave_out(checks, why)
    return run


def train_without_saves(
    cell: Cell, reference: ReferenceRun, until: int, prepare: Callable[[Run], None] | None = None
) -> Run:
    """Train a run that never saves up to and including step `until`, and compare each step with the unwrapped
    twin's."""
    run = build_without_saves(cell, reference)
    if prepare:
        with cell.phase("build"):
            prepare(run)
    if run.exclusions.why_no_twin:
        steps.train(cell, run, until)
        verify_replicas(cell, run)
    else:
        where, seed = Place("uninterrupted"), cell.config.seed
        losses = train_with_twin(cell, run, reference, until, where, seed, copies=prepare is not None)
        cell.report.losses["twin"] = losses[1]
    return run


def verify_replicas(cell: Cell, run: Run) -> None:
    """Check that the copies of parameters have the same bits on all ranks, if training has to keep them
    equal."""
    with cell.phase("verify", "training"):
        if reasons := [reason for reason in cell.world.gathered(run.exclusions.why_no_replicas) if reason]:
            cell.leave_out([lockstep.REPLICAS], reasons[0])
            return
        compared = lockstep.compare_parameters(run)
        if cell.world.any_rank(compared.names):
            cell.record(lockstep.REPLICAS, compared, Place("uninterrupted"))
        else:
            cell.leave_out([lockstep.REPLICAS], lockstep.NO_REPLICAS)


def train_with_twin(
    cell: Cell, run: Run, reference: ReferenceRun, until: int, where: Place, seed: int, copies: bool = True
) -> tuple[list[float], list[float]]:
    """Train a run up to and including step `until`, compare each step with that of a twin in the same state,
    and return the losses of both. `reference` gets why no resumed run can repeat them.

    Args:
        seed: the twin is built from it.
        copies: the twin gets the run's state; a run that was only built has the state of its seed.
    """
    assert isinstance(run, OwnRun), "a trainer has no twin"
    with cell.phase("build"):
        twin = build_run.build_twin(cell.config, cell.world, seed, run if copies else None)
    before = len(run.train_state.losses)
    with cell.phase("verify", "training"):
        explain = partial(attribute, cell, "twin", anywhere=True) if defects_at(cell, "twin") else None
        compared_steps = Lockstep(cell.config, cell.world, run, twin, explain)
    while run.train_state.step < until:
        with cell.training(run):
            uses = compared_steps.train(cell.batches)
        if compared_steps.follows:
            with cell.phase("verify", "training"):
                compared_steps.follow(cell.batches, uses)
    others = unrestored_losses(cell, reference)
    with cell.phase("verify", "training"):
        for check, compared in compared_steps.results(others).items():
            cell.record(check, compared, where, TWIN)
    if why := compared_steps.why_not_resumed:
        reference.exclusions = replace(reference.exclusions, why_not_resumed=why)
    if "gradient_bound" in compared_steps.bounds:
        cell.measure("gradient_bound_used", compared_steps.bound_used)
    for column, bound in compared_steps.bounds.items():
        cell.report.note("column", bound, name=column)
    for check, why in compared_steps.not_applied.items():
        cell.leave_out([check], why)
    return run.train_state.losses[before:], [*compared_steps.twin_losses.values()]


def unrestored_losses(cell: Cell, reference: ReferenceRun) -> list[float]:
    """Return the losses, from step 1 on, of a run from another seed on the same batches, which restores
    nothing; they are computed once. It trains only if no loss can be computed otherwise; a trainer as far as
    the first resume."""
    if not reference.unrestored:
        run = build_run.build_unrestored(cell.config, cell.world, other_seed(cell, 0))
        last = max(cell.window.last, len(reference.losses))
        if cell.config.own_trainer:
            last = cell.window.end_of(cell.window.saves[0])
        with suppress(TrainingEndedError):  # its losses until then can show a difference
            run.compute_losses(cell.batches, last)
        reference.unrestored = run.train_state.losses
    return reference.unrestored
