"""A load without the metadata of all ranks: only the chunks that a rank has saved itself are restored, and
the rest is unchanged (docs/findings/load-without-collectives.md)."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.checkpointers.dcp import stored_chunks
from dcpbench.compare.stored import StoredChunk, read_part
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import key_of
from dcpbench.plugins.defects._cells import loads_alone
from dcpbench.state.snapshot import State, TensorLeaf


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    checkpoint, state = reference.checkpoint, State()
    stored = stored_chunks(Path(checkpoint.checkpoint_id), cell.world.rank)
    for part, names in reference.names.items():
        state[part] = {}
        for name in names:
            was = reference.before.get(part, {}).get(name)
            leaf = reference.actual[part].get(name)
            if isinstance(was, TensorLeaf) and isinstance(leaf, TensorLeaf):
                own_chunks = stored.get(key_of(part, name), ())
                state[part][name] = loaded_alone(was, leaf, own_chunks)
    yield state


def loaded_alone(was: TensorLeaf, part: TensorLeaf, own_chunks: Sequence[StoredChunk]) -> TensorLeaf:
    """Return a part before the load, with the chunks that this rank has stored itself."""
    expected = was.local.reshape(-1).cpu().clone()
    for chunk in own_chunks:
        here = replace(chunk, read=partial(torch.ones, chunk.sizes, dtype=torch.bool))
        with suppress(ValueError):  # it has no element of this part
            stored = read_part(was.extent, [here])
            expected[stored] = read_part(was.extent, [chunk])[stored]
    return replace(part, local=expected.reshape(part.local.shape))


defect = Defect(("restored",), loads_alone, _expected, from_before=True)
