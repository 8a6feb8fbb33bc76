"""Checks that a save or a load changes nothing else: the live run, the process, what it has open."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dcpbench.cell.cell import Cell
from dcpbench.core.mismatch import Mismatch, Problem, Sides
from dcpbench.core.rank_report import Compared
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.process_state import open_descriptors, snapshot_process, watched
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.generators import states_of_generators
from dcpbench.workloads.run_state import (
    CHANGING,
    State,
    live_gradients,
    live_state,
    retained_gradients,
    retained_state,
)
from dcpbench.workloads.training_run import TrainingRun

SAVE: Sides = ("{} before the save", "{} after it")
LOAD: Sides = ("{} before the load", "{} after it")


@contextmanager
def unchanged(
    cell: Cell, run: TrainingRun | None, where: str, sides: Sides, state: State | None = None
) -> Iterator[None]:
    """Context manager: check that neither the process nor a training run changes; `state` is a copy of the
    run's state, if there is one already."""
    with cell.phase("verify", "side_effects"):
        before = _observed(cell, state or (retained_state(run) if run else {}))
    yield
    with cell.phase("verify", "side_effects"):
        after = _observed(cell, live_state(run) if run else {})
        # Controls of a state cost as much as its comparison: one of each name is enough in a cell.
        compared = compare_controlled(before, after, proven=cell.proven("side_effect_free"))
        cell.record("side_effect_free", compared, where, sides)


@contextmanager
def gradients_unchanged(cell: Cell, target: TrainingRun, where: str) -> Iterator[None]:
    """Context manager: check that gradients of a load target do not change, if the cell has any there. Then
    they are cleared, as a trainer has to."""
    if not cell.config.load_into.gradients:
        yield
        return
    with cell.phase("verify", "side_effects"):
        before = retained_gradients(target)
    yield
    with cell.phase("verify", "side_effects"):
        cell.record("side_effect_free", compare_controlled(before, live_gradients(target)), where, LOAD)
        target.model.zero_grad()


def open_before(cell: Cell, again: bool) -> Callable[[], Compared]:
    """Note what is open before a save or a load, and return the comparison with what is still open. The first
    one may open sockets and threads and keep them, so these are counted from the second one on (`again`); and
    not where saves overlap, as those of a trainer can, or for the client of an object store, which opens and
    closes connections at any time."""
    config = cell.config
    overlaps = config.overlap_saves or config.own_trainer
    return watched(cell.folder, again and not overlaps and not config.storage.url)


@contextmanager
def load_of_own(cell: Cell, where: str) -> Iterator[None]:
    """Context manager around a load of a run of dcpbench, which leaves nothing open."""
    still_open = open_before(cell, again=cell.measured("load_s") > 0)
    yield
    cell.record("side_effect_free", still_open(), where, LOAD)


@contextmanager
def load_of_trainer(cell: Cell, where: str) -> Iterator[None]:
    """Context manager around a load of a trainer. What it opens may stay open as long as its trainer exists,
    as a map of its checkpoint does; of two earlier loads whose trainers are gone, both must not have left
    something open."""
    gc.collect()
    before = open_descriptors()
    if len(cell.opened) > 1:
        always = {number: before[number] for number in [*before][:1]}
        found, control = _adding_up(cell.opened), _adding_up([always, always])
        cell.record("side_effect_free", Compared.of(found, control, ["process.descriptors"]), where)
    yield
    gc.collect()
    opened = {number: name for number, name in open_descriptors().items() if before.get(number) != name}
    cell.opened.append(opened)
    for name in opened.values():
        if name.startswith(str(cell.folder.resolve())):
            cell.report.not_applied[f"side_effect_free of {Path(name).name}"] = "it stays open after the load"


def _adding_up(opened: Iterable[Mapping[int, str]]) -> list[Mismatch]:
    """Return a mismatch if something that each of several loads has opened is still open."""
    now = open_descriptors()
    left = [[name for number, name in of_load.items() if now.get(number) == name] for of_load in opened]
    names = [of_load[0] for of_load in left if of_load]
    facts = {
        "expected": "closed with its trainer",
        "actual": f"left open by {len(names)} loads: {names[-1:]}",
    }
    sides = ("{}", "{}")
    return (
        [Mismatch("process.descriptors", Problem.value, facts=facts, sides=sides)] if len(names) > 1 else []
    )


def _observed(cell: Cell, state: State) -> Leaves:
    # A trainer may note its saves in its attributes.
    left_out = ("extra_equal", CHANGING) if cell.config.own_trainer else ()
    leaves = {name: leaf for part in state for name, leaf in state[part].items() if part not in left_out}
    device = cell.world.device
    return leaves | snapshot_process(states_of_generators(device), device)
