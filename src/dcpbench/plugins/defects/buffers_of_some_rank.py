"""Buffers differ by rank; a checkpoint contains each from one rank (docs/findings/buffers-of-some-rank.md).

A resumed run is explained only if it is exact with the buffers of each rank, so nothing else is wrong."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed, StoredFiles
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import loads_by_dcp
from dcpbench.plugins.defects._loads import as_loaded, load_again, names_by, resumes_exactly
from dcpbench.plugins.defects._other_run import as_resumed
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.snapshot import DigestedLeaf, Leaves, TensorLeaf, digested, of_kind
from dcpbench.workloads import build_run
from dcpbench.workloads.run_state import State, buffers_of, live_state

_BY, _CHECKS = "buffers_of_some_rank", ("model_equal", "extra_equal")
"""The checks of a model, and of copies of it that are saved in addition."""


def _expected(cell: Cell, moment: Moment, reference: Restored | StoredFiles | Resumed) -> Iterator[State]:
    if isinstance(reference, Restored):
        for check in _CHECKS:
            buffers = digested(buffers_of(reference.checkpoint.state.get(check, {})))
            wrong = reference.names.get(check, frozenset())
            yield from _of_each_rank(cell, check, buffers, wrong)
            yield from _of_ranks_that_saved(check, buffers)
    elif isinstance(reference, StoredFiles):
        for check, leaves in reference.checkpoint.by_key.items():
            yield from _of_each_rank(cell, check, buffers_of(leaves), reference.names)
    else:
        yield from _resumed(cell, reference)


def _of_each_rank(cell: Cell, part: str, buffers: Leaves, wrong: frozenset[str]) -> Iterator[State]:
    """Yield the buffers of each rank, of those that are wrong on any rank; collective."""
    names = frozenset[str]().union(*gathered(wrong, cell.world.group))
    mine = {name: leaf for name, leaf in buffers.items() if name in names}
    yield from gathered({part: mine}, cell.world.group)


def _differing(leaves: Leaves) -> dict[str, DigestedLeaf]:
    """Return the leaves of an earlier stage that differed by rank."""
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, DigestedLeaf) and leaf.of_ranks}


def _of_ranks_that_saved(check: str, buffers: Leaves) -> Iterator[State]:
    """Yield the buffers of each rank of an earlier stage."""
    differing = _differing(buffers)
    for rank in range(max((len(leaf.of_ranks) for leaf in differing.values()), default=0)):
        here = {name: leaf for name, leaf in differing.items() if rank < len(leaf.of_ranks)}
        yield {check: {name: replace(leaf, blocks=(leaf.of_ranks[rank],)) for name, leaf in here.items()}}


def _resumed(cell: Cell, reference: Resumed) -> Iterator[State]:
    """Load and train on again: with the saved buffers of each rank and, if these are not copied or come from
    a run that was itself restored, with those of the uninterrupted run. Once one is exact, yield the states
    of these runs, and of one as loaded."""
    found = {name for check in _CHECKS for name in names_by(cell, check, _BY)}
    found |= _differing(_of_checks(reference.checkpoint.state)).keys()
    names = frozenset[str]().union(*cell.world.gathered(found))
    states = []
    for buffers in _buffers(cell, reference, names) if names else ():
        run = load_again(cell, reference)
        with torch.no_grad():
            for name, leaf in _of_checks(live_state(run)).items():
                if name in buffers:
                    leaf.local.copy_(buffers[name])
        is_exact = resumes_exactly(cell, run, reference)
        states.append(as_resumed(cell, reference, live_state(run)))
        if is_exact:
            yield from states
            yield from as_loaded(cell, reference)
            return


def _buffers(cell: Cell, reference: Resumed, names: frozenset[str]) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the buffers of these names that a run is resumed with; the same number on every rank."""
    leaves = _of_checks(reference.checkpoint.state)
    wrong = {name: leaves[name] for name in names & leaves.keys()}
    saved = {name: leaf.local for name, leaf in wrong.items() if isinstance(leaf, TensorLeaf)}
    if all(cell.world.gathered(len(saved) == len(names))):
        yield saved
    run = build_run.build(cell.config, cell.world, cell.config.seed)
    run.train(reference.data, reference.checkpoint.step)
    yield {name: leaf.local for name, leaf in _of_checks(live_state(run)).items() if name in names}


def _of_checks(state: State) -> Leaves:
    """Return the buffers of a model and of its copies."""
    return {name: leaf for check in _CHECKS for name, leaf in of_kind("buffer", state.get(check, {})).items()}


defect = Defect(("restored", "stored", "resumed"), loads_by_dcp, _expected, from_before=False)
