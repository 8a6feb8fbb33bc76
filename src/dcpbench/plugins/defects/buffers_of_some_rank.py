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
from dcpbench.verify.snapshot import DigestedLeaf, Leaves, TensorLeaf, digested, persistent_buffers
from dcpbench.workloads import build_run
from dcpbench.workloads.run_state import State, buffers_of, live_state

_BY, _CHECK = "buffers_of_some_rank", "model_equal"


def _expected(cell: Cell, moment: Moment, reference: Restored | StoredFiles | Resumed) -> Iterator[State]:
    if isinstance(reference, Restored):
        buffers = digested(buffers_of(reference.checkpoint.state.get(_CHECK, {})))
        wrong = reference.names.get(_CHECK, frozenset())
        yield from _of_each_rank(cell, _CHECK, buffers, wrong)
        yield from _of_ranks_that_saved(buffers)
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


def _of_ranks_that_saved(buffers: Leaves) -> Iterator[State]:
    """Yield the buffers of each rank of an earlier stage."""
    differing = _differing(buffers)
    for rank in range(max((len(leaf.of_ranks) for leaf in differing.values()), default=0)):
        here = {name: leaf for name, leaf in differing.items() if rank < len(leaf.of_ranks)}
        yield {_CHECK: {name: replace(leaf, blocks=(leaf.of_ranks[rank],)) for name, leaf in here.items()}}


def _resumed(cell: Cell, reference: Resumed) -> Iterator[State]:
    """Load and train on again: with the saved buffers of each rank and, if these are not copied or come from
    a run that was itself restored, with those of the uninterrupted run. Once one is exact, yield the states
    of these runs, and of one as loaded."""
    found = names_by(cell, _CHECK, _BY) | _differing(reference.checkpoint.state.get(_CHECK, {})).keys()
    names = frozenset[str]().union(*cell.world.gathered(found))
    states = []
    for buffers in _buffers(cell, reference, names) if names else ():
        run = load_again(cell, reference)
        with torch.no_grad():
            for name, buffer in persistent_buffers(run.model).items():
                if name in buffers:
                    buffer.copy_(buffers[name])
        is_exact = resumes_exactly(cell, run, reference)
        states.append(as_resumed(cell, reference, live_state(run)))
        if is_exact:
            yield from states
            yield from as_loaded(cell, reference)
            return


def _buffers(cell: Cell, reference: Resumed, names: frozenset[str]) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the buffers of these names that a run is resumed with; the same number on every rank."""
    leaves = {name: reference.checkpoint.state.get(_CHECK, {}).get(name) for name in names}
    saved = {name: leaf.local for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}
    if all(cell.world.gathered(len(saved) == len(names))):
        yield saved
    run = build_run.build(cell.config, cell.world, cell.config.seed)
    run.train(reference.data, reference.checkpoint.step)
    yield {name: buffer for name, buffer in persistent_buffers(run.model).items() if name in names}


defect = Defect(("restored", "stored", "resumed"), loads_by_dcp, _expected, from_before=False)
