"""Pass checkpoints and the reference run to the processes of a later stage, which may have another layout,
by files in the folder of the cell. So a resume is a restart: what a user's code keeps anywhere in its
process, such as a counter of a module, is gone."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dcpbench.cell import checkpoint_files, checks
from dcpbench.cell.cell import Cell, KnownFiles
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.checkpoint_files import without_shared
from dcpbench.cell.known_defects import record_restored
from dcpbench.cell.steps import ReferenceRun
from dcpbench.compare.across_layouts import compare_ranks
from dcpbench.compare.leaves import Comparison
from dcpbench.config.groups import Verify
from dcpbench.core.mismatch import Place
from dcpbench.core.state import StatePart, names_with_texts
from dcpbench.runs.run import Exclusions
from dcpbench.state.layout import whole
from dcpbench.state.snapshot import PLAIN, State, TensorLeaf

_ANY_LAYOUT, _OF_RANK = "handover.pt", "handover-rank{}.pt"


def write_reference(cell: Cell, reference: ReferenceRun, any_layout: bool = False) -> None:
    """Write the reference run for a new process of each rank or, as digests of full tensors, for ranks of
    `any_layout`; collective."""
    checkpoints = reference.checkpoints
    if cell.config.restarts and reference.run:
        for checkpoint in checkpoint_files.not_removed(cell, checkpoints)[-1:]:
            checks.load_beside(cell, reference, checkpoint)
    with cell.phase("verify", "handover"):
        if any_layout:
            of_any = partial(replace, by_content=True, as_saved={})
            plain = [
                of_any(checkpoint, state=_in_full(cell, checkpoint.state, checkpoint))
                for checkpoint in checkpoints
            ]
            states = {step: _in_full(cell, state) for step, state in reference.states.items()}
            reference = replace(reference, checkpoints=plain, states=states)
        else:
            reference = replace(reference, window=cell.trainer_steps)
        if cell.config.verify is Verify.deep and cell.world.rank == 0:
            for checkpoint in checkpoints:
                cell.checkpointer.drop_cached(checkpoint.checkpoint_id)
    known = (
        (checkpoint.checkpoint_id, cell.files.get(checkpoint.checkpoint_id)) for checkpoint in checkpoints
    )
    files = {
        checkpoint_id: (
            files.where,
            files.digests and without_shared(files.checkpointer, checkpoint_id, files.digests),
        )
        for checkpoint_id, files in known
        if files
    }
    if not any_layout or cell.world.rank == 0:
        torch.save(replace(reference, run=None, files=files), cell.folder / _name(cell, any_layout))


def read_reference(cell: Cell, any_layout: bool = False) -> tuple[Cell, ReferenceRun]:
    """Read the reference run of the stage before, and let the end of this stage compare the files of its
    checkpoints with those of when they were complete. Return it with the cell, which gets its steps and, in
    `any_layout` of a scenario that converts, the layout of loads. The file may contain any class, such as
    arrays, if the workload is a user's, or for the same rank of another process."""
    config, ranks = cell.config, cell.world.size
    converts = any_layout and config.scenario.converts
    same_layout = not converts or (config.loading, ranks) == (config.parallel, config.world_size)
    if converts:
        cell = cell.vary(parallel=config.loading, world_size=ranks)
    any_class = config.workload.target is not None or config.restarts
    safe: list[Any] = [ReferenceRun, Checkpoint, Place, Exclusions, StatePart, *PLAIN]
    with cell.phase("verify", "handover"), torch.serialization.safe_globals(safe):
        reference: ReferenceRun = torch.load(
            cell.folder / _name(cell, any_layout), weights_only=not any_class
        )
    cell = replace(cell, trainer_steps=reference.window)
    for checkpoint_id, known in reference.files.items():
        cell.files[checkpoint_id] = KnownFiles(*known, cell.checkpointer)
        cell.checkpointer.note_removed(checkpoint_id, known[1] or ())
    reference.exactly = same_layout and reference.torch_version == torch.__version__
    if not same_layout:  # a resume under this layout draws other random numbers
        reference.exclusions = replace(reference.exclusions, generators=frozenset())
        for state in (
            *reference.states.values(),
            *(checkpoint.state for checkpoint in reference.checkpoints),
        ):
            state.pop(StatePart.random, None)
    return cell, reference


def _name(cell: Cell, any_layout: bool) -> str:
    return _ANY_LAYOUT if any_layout else _OF_RANK.format(cell.world.rank)


def _in_full(cell: Cell, state: State, saved: Checkpoint | None = None) -> State:
    """Return digests of full tensors, which any layout can compare with; collective. Ranks that disagree on a
    value that was `saved` are reported; a defect explains this if it explains what the checkpoint has."""
    full: State = {}
    for part, leaves in state.items():
        full[part], compared = compare_ranks(leaves, cell.world.group)
        if compared.found and saved:
            wrong = names_with_texts(leaves, {mismatch.name for mismatch in compared.found})
            read_saved = saved.reader_of(part, cell.checkpointer)
            tensors = {name: tensor for name in wrong if (tensor := read_saved(name)) is not None}
            stored = {name: TensorLeaf(tensor, whole(tensor), None) for name, tensor in tensors.items()}
            record_restored(cell, saved, {part: Comparison(leaves, stored, compared)}, saved.place)
    return full
