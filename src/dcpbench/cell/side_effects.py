"""Checks that a save or a load changes nothing else: the live run, the process, what it has open."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dcpbench.cell.cell import Cell
from dcpbench.compare.controls import compare_controlled
from dcpbench.core.mismatch import Place, Sides
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import StatePart
from dcpbench.runs.run import Run
from dcpbench.state.process_state import ProcessState
from dcpbench.state.snapshot import Leaves, State, retained
from dcpbench.workloads.generators import states_of_generators

SAVE: Sides = ("{} before the save", "{} after it")
LOAD: Sides = ("{} before the load", "{} after it")
LEFT_OPEN: Sides = ("nothing should stay open", "but {} did")


@contextmanager
def unchanged(
    cell: Cell, run: Run | None, where: Place, sides: Sides, state: State | None = None
) -> Iterator[None]:
    """Context manager: check that neither the process nor a training run changes; `state` is a copy of the
    run's state, if there is one already."""
    with cell.phase("verify", "side_effects"):
        before = _observed(cell, (state or run.retained_state()) if run else {})
    yield
    with cell.phase("verify", "side_effects"):
        after = _observed(cell, run.live_state() if run else {})
        compared = compare_controlled(before, after, proven=cell.proven("side_effect_free"))
        cell.record("side_effect_free", compared, where, sides)


@contextmanager
def gradients_unchanged(cell: Cell, target: Run, where: Place) -> Iterator[None]:
    """Context manager: check that gradients of a load target do not change, if the cell has any there. Then
    they are cleared, as a trainer has to."""
    if not cell.config.load_into.gradients:
        yield
        return
    with cell.phase("verify", "side_effects"):
        before = retained(target.live_gradients())
    yield
    with cell.phase("verify", "side_effects"):
        cell.record("side_effect_free", compare_controlled(before, target.live_gradients()), where, LOAD)
        target.model.zero_grad()


def open_before(cell: Cell, again: bool) -> Callable[[], Compared]:
    """Note what is open before a save or a load, and return the comparison with what is still open. The first
    one may open sockets and threads and keep them, so these are counted from the second one on (`again`); and
    not where saves overlap, as those of a trainer can, or for the client of an object store, which opens and
    closes connections at any time."""
    config = cell.config
    overlaps = config.overlap_saves or config.own_trainer
    counted = again and not overlaps and not config.storage.url
    kinds = ("open_files", "threads", "descriptors") if counted else ("open_files",)
    below = f"{cell.folder.resolve()}{os.sep}"
    before = ProcessState.now()

    def compared() -> Compared:
        left = before.left_open(kinds, below)
        names: Leaves = {("process", kind): left.get(kind, []) for kind in kinds}
        return compare_controlled({name: [] for name in names}, names)

    return compared


@contextmanager
def nothing_left_open(cell: Cell, where: Place) -> Iterator[None]:
    """Context manager around a load, which leaves nothing open. What a trainer's load opens may stay open as
    long as the trainer exists, such as a map of a file: that is a fact, and only what adds up is a leak."""
    still_open = open_before(cell, again=cell.times_measured("load_s") > 0)
    yield
    if not cell.config.own_trainer:
        cell.record("side_effect_free", still_open(), where, LEFT_OPEN)
        return
    for name in cell.checkpointer.kept_open:
        cell.report.note("left_out", "it stays open after the load", "side_effect_free", name)
    if left_open := cell.checkpointer.left_open:
        cell.record("side_effect_free", left_open, where)


def _observed(cell: Cell, state: State) -> Leaves:
    # A trainer may note its saves in its attributes.
    parts = state.keys() - ({StatePart.extra} if cell.config.own_trainer else set())
    leaves = {name: leaf for part in state if part in parts for name, leaf in state[part].items()}
    device = cell.world.device
    return leaves | ProcessState.leaves(states_of_generators(device), device)
