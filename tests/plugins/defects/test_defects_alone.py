"""Cells with a known defect, on one rank in this process: the defect explains every mismatch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpbench.cell import checks
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import Comparison, same_leaves
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name, StatePart, text_of
from dcpbench.plugins.defects import own_chunks
from dcpbench.runs.build_run import build
from dcpbench.state.snapshot import TensorLeaf, snapshot_nested
from support.alone import bare_cell, config

pytestmark = pytest.mark.cell

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 3}


@pytest.mark.parametrize("save", ["sync", "sync_no_collectives"])
def test_state_before_a_load_is_retained(save: str, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**SMALL, save=save))
    run = build(cell.config, cell.world, 0)
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "1", use_collectives=save == "sync")
    leaves = snapshot_nested({"w": torch.ones(2)})
    checkpoint = Checkpoint(1, str(tmp_path / "1"), {StatePart.model: leaves})
    checks.perturb_target(cell, run, checkpoint)
    before = cell.unrestored[checkpoint.checkpoint_id]
    assert bool(before) == (save != "sync")
    if not before:
        return
    was = {StatePart.model: snapshot_nested({"w": torch.zeros(2), "other": torch.zeros(2)})}
    actual = snapshot_nested({"w": torch.ones(2), "other": torch.zeros(2)})
    wrong = Compared([Mismatch(text_of(name), Problem.differs) for name in actual], {}, {})

    def explained() -> set[Name]:
        about = LoadReference(checkpoint, {StatePart.model: Comparison(leaves, actual, wrong)}, was)
        (state,) = own_chunks.defect.expected(cell, "restored", about)
        return same_leaves(state[StatePart.model], actual)

    assert explained() == {("w",), ("other",)}
    assert isinstance(actual["w",], TensorLeaf)
    actual["w",].local[1] = 0  # which was not restored, though this rank has saved it
    assert explained() == {("other",)}
