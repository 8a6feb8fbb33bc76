"""What a save and a load do beside saving and loading: nothing may come of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from dcpbench.cell.cell import Cell
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.process_state import OpenFiles, snapshot_process
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import State, live_gradients, live_state, retained_gradients, retained_state
from dcpbench.workloads.training_run import TrainingRun


@contextmanager
def unchanged(cell: Cell, run: TrainingRun | None, where: str, state: State | None = None) -> Iterator[None]:
    """Within, neither the live state of a training run, if there is one, nor that of the process changes;
    `state` is what the run's is now, if that is retained already."""
    with cell.phase("verify", "beside"):
        before = _observed(cell, state or (retained_state(run) if run else {}))
    yield
    with cell.phase("verify", "beside"):
        _verify(cell, before, _observed(cell, live_state(run) if run else {}), where)


@contextmanager
def gradients_unchanged(cell: Cell, target: TrainingRun, where: str) -> Iterator[None]:
    """Within, gradients of the target of a load stay what they are, if it is to have any. After that they are
    cleared, as a trainer has to."""
    if not cell.config.load_into.gradients:
        yield
        return
    with cell.phase("verify", "beside"):
        before = retained_gradients(target)
    yield
    with cell.phase("verify", "beside"):
        _verify(cell, before, live_gradients(target), where)
        target.model.zero_grad()


def open_before(cell: Cell, again: bool) -> OpenFiles:
    """What is open now. What the first save or load opens to keep it, as sockets, is its own to decide:
    threads and descriptors are counted from the second one on, done `again`; and not those of the client of a
    store, which closes connections that it has not used for a while and opens others."""
    config = cell.config
    return OpenFiles(cell.folder, again and not config.overlap_saves and not config.storage.url)


def verify_nothing_left_open(cell: Cell, before: OpenFiles, where: str) -> None:
    """No more may be open than was before, once all has ended that was under way."""
    cell.record("side_effect_free", before.compare(), where)


def _observed(cell: Cell, state: State) -> Leaves:
    leaves = {name: leaf for part in state.values() for name, leaf in part.items()}
    return leaves | snapshot_process(cell.world.device)


def _verify(cell: Cell, before: Leaves, after: Leaves, where: str) -> None:
    cell.record("side_effect_free", compare_controlled(before, after), where)
