"""Cells with a known defect, on one rank in this process: the defect explains every mismatch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conftest import tiered
from dcpbench.cell import checks
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.explained import Differences
from dcpbench.config.schema import conf_folder
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name, StatePart, text_of
from dcpbench.plugins.defects import other_save, own_chunks
from dcpbench.sweep.known_failures import read
from dcpbench.verdict.known_failures import KnownFailure, explaining
from dcpbench.verify.compare import Comparison, same_leaves
from dcpbench.verify.snapshot import TensorLeaf, snapshot_nested
from dcpbench.workloads.build_run import build
from support.alone import STAGES_ONCE, Ran, bare_cell, config, group_of_one, run_alone, world

pytestmark = pytest.mark.cell

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 3}


stages_again = pytest.mark.skipif(bool(STAGES_ONCE), reason=STAGES_ONCE)


def overlapping(save: str, fault: str = "none") -> Ran:
    with group_of_one() as group:
        return run_alone(fault, **SMALL, save=save, overlap_saves=True, seen_by=world(group=group))


def listed(name: str) -> KnownFailure:
    return next(one for one in read(conf_folder() / "known_failures.yaml") if one.id == name)


@stages_again
def test_shared_stager_is_explained() -> None:
    ran = overlapping("async_shared_stager")
    failed = {one.check: one.mismatches for one in ran.verdict.failed}
    assert failed.keys() == {"model_equal", "optim_equal", "extra_equal", "files_equal"}
    for check, findings in failed.items():
        assert {one.by for one in findings} == {"other_save"}, check
    steps = {one.where for one in failed["files_equal"]}
    assert steps == {"in the checkpoint of step 1", "in the checkpoint of step 2"}, "the last is right"
    assert explaining([listed("shared-stager")], failed, []).is_complete


@stages_again
@pytest.mark.parametrize("fault", tiered(["weight_lowest_bit", "second_step_wrong"], "weight_lowest_bit"))
def test_other_fault_is_not_explained(fault: str) -> None:
    failed = {one.check: one.mismatches for one in overlapping("async_shared_stager", fault).verdict.failed}
    assert not explaining([listed("shared-stager")], failed, []).is_complete


@stages_again
def test_file_of_no_save_is_not_explained() -> None:
    failed = {
        one.check: one.mismatches for one in overlapping("async_shared_stager", "file_bit").verdict.failed
    }
    assert None in {one.by for one in failed["files_equal"]}
    assert not explaining([listed("shared-stager")], failed, []).is_complete


def test_shared_writer_is_explained() -> None:
    """The first checkpoint is loaded last, and is empty."""
    with pytest.raises(dcp.CheckpointException, match="metadata is None"):
        overlapping("async_shared_writer")


def test_states_of_saves_in_flight_are_expected(tmp_path: Path) -> None:
    other = Checkpoint(2, "", {StatePart.model: snapshot_nested({"w": torch.ones(2)})})
    mine = replace(other, step=1, overlapping=[other])
    cell = bare_cell(tmp_path, config(**SMALL, save="async_shared_writer"))
    states = other_save.defect.expected(cell, "restored", Differences(mine, {}))
    assert [*states] == [other.state]


@pytest.mark.parametrize("save", ["sync", "sync_no_collectives"])
def test_state_before_a_load_is_retained(save: str, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**SMALL, save=save))
    run = build(cell.config, cell.world, 0)
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "1", use_collectives=save == "sync")
    leaves = snapshot_nested({"w": torch.ones(2)})
    checkpoint = Checkpoint(1, str(tmp_path / "1"), {StatePart.model: leaves})
    checks.make_different(cell, run, checkpoint)
    before = cell.unrestored[checkpoint.checkpoint_id]
    assert bool(before) == (save != "sync")
    if not before:
        return
    was = {StatePart.model: snapshot_nested({"w": torch.zeros(2), "other": torch.zeros(2)})}
    actual = snapshot_nested({"w": torch.ones(2), "other": torch.zeros(2)})
    wrong = Compared([Mismatch(text_of(name), Problem.differs) for name in actual], {}, {})

    def explained() -> set[Name]:
        about = Differences(checkpoint, {StatePart.model: Comparison(leaves, actual, wrong)}, was)
        (state,) = own_chunks.defect.expected(cell, "restored", about)
        return same_leaves(state[StatePart.model], actual)

    assert explained() == {("w",), ("other",)}
    assert isinstance(actual["w",], TensorLeaf)
    actual["w",].local[1] = 0  # which was not restored, though this rank has saved it
    assert explained() == {("other",)}
