"""What a stage leaves to the processes of a later one, and values that are read without the reader of their
writer."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dcpbench.cell import handover, steps
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.steps import ReferenceRun
from dcpbench.compare import stored
from dcpbench.compare.leaves import compare
from dcpbench.config.groups import Verify
from dcpbench.core.state import StatePart
from dcpbench.state.snapshot import PLAIN, TensorLeaf
from support.alone import bare_cell, config, world

pytestmark = pytest.mark.cell


def test_each_rank_leaves_a_file(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(model="short", verify="deep"))
    dropped: list[str] = []
    vars(cell)["checkpointer"] = mock.Mock(drop_cached=dropped.append)
    checkpoint = Checkpoint(7, str(tmp_path), {})
    saved = ReferenceRun([checkpoint], [1.0])
    handover.write_reference(cell.vary(verify=Verify.standard), saved)
    handover.write_reference(replace(cell, world=world(1, 2)), saved)
    assert dropped == [], "rank 0 drops it for all"
    handover.write_reference(cell, saved)
    assert dropped == [str(tmp_path)]
    assert {path.name for path in tmp_path.iterdir()} == {"handover-rank0.pt", "handover-rank1.pt"}


@pytest.mark.parametrize(("scenario", "dropped"), [("save_load", False), ("convert", True)])
def test_generators_are_dropped_where_another_layout_resumes(
    tmp_path: Path, scenario: str, dropped: bool
) -> None:
    """A stage that only reads values, as that of crash states does, compares them too."""
    cell = bare_cell(tmp_path, config(model="short", scenario=scenario))
    vars(cell)["checkpointer"] = mock.Mock()
    state = {StatePart.random: {("cpu",): 1}, StatePart.model: {}}
    handover.write_reference(cell, ReferenceRun([Checkpoint(7, str(tmp_path), state)]), any_layout=True)
    _, reference = handover.read_reference(cell.vary(world_size=2), any_layout=True)
    assert (StatePart.random not in reference.checkpoints[0].state) == dropped


def stream(value: Any) -> io.BytesIO:
    made = io.BytesIO()
    torch.save(value, made)  # which leaves it at its end
    return made


def test_loaded_value_is_compared_as_saved() -> None:
    losses = [1.0, 2.0]
    as_bytes = torch.frombuffer(bytearray(stream(losses).getvalue()), dtype=torch.uint8)
    seen = {
        "number": stored._plain(3),
        "scalar": stored._plain(torch.tensor(3)),
        "stream": stored._plain(stream(losses)),
        "bytes": stored._plain(as_bytes),
    }
    assert seen == {"number": 3, "scalar": 3, "stream": losses, "bytes": losses}
    assert type(seen["scalar"]) is int


def test_checkpoint_is_plain_data(tmp_path: Path) -> None:
    """It can be read without running code, so no live run and no checkpointer is in it."""
    cell = bare_cell(tmp_path, config(model="short", scheduler="step"))
    reference = steps.build_reference(cell)
    steps.train_reference(cell, reference, 1)
    saved = steps.finish(cell, steps.save(cell, reference.live_run))
    written = stream(saved)
    written.seek(0)
    with torch.serialization.safe_globals([Checkpoint, StatePart, TensorLeaf, *PLAIN]):
        read = torch.load(written, weights_only=True)
    assert (read.step, read.checkpoint_id, str(read)) == (1, saved.checkpoint_id, str(saved))
    assert read.state.keys() == saved.state.keys()
    for part, leaves in saved.by_key.items():
        assert compare(leaves, read.by_key[part]) == []
