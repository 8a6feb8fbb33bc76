"""A save over a checkpoint of other ranks is restored, and nothing of theirs."""

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem

from dcpbench.cell.cell import Cell
from dcpbench.core.mismatch import Place
from dcpbench.scenarios.dcp_api import overwrite_ranks
from support.alone import ONCE, alone

pytestmark = pytest.mark.cell


@pytest.mark.parametrize("storage", ["file", "fsspec", "hf"])
def test_overwriting_checkpoint_is_restored(storage: str) -> None:
    verdict, report = alone(scenario="overwrite_ranks", storage=storage, **ONCE)
    assert verdict.status == "pass", verdict.reason
    assert Place("checkpoint", 1) in report.checks["model_equal"].compared


@pytest.mark.parametrize("fault", ["weight_lowest_bit", "lr_next_float"])
def test_defect_is_reported(fault: str) -> None:
    verdict, _ = alone(fault, scenario="overwrite_ranks", storage="file", **ONCE)
    assert (verdict.status, verdict.fault_seen) == ("fail", True), verdict.reason


@pytest.mark.parametrize(
    ("storage", "written", "left", "status"),
    [
        ("file", "__0_0.distcp", "__1_0.distcp", "pass"),
        ("hf_sharded", "shard-00001-{}", "shard-00002-{}", "fail"),
    ],
)
def test_unread_leftover_file_does_no_harm(
    storage: str, written: str, left: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP reads the files that have one tensor in the order in which it finds them."""
    save_first, ls = overwrite_ranks.save_first, FileSystem.ls

    def save_and_leave(cell: Cell) -> None:
        save_first(cell)
        name = "model-00001-of-00001.safetensors"
        (cell.folder / "checkpoint" / written.format(name)).rename(
            cell.folder / "checkpoint" / left.format(name)
        )

    monkeypatch.setattr(overwrite_ranks, "save_first", save_and_leave)
    monkeypatch.setattr(FileSystem, "ls", lambda self, path: sorted(ls(self, path)))
    verdict, _ = alone(scenario="overwrite_ranks", storage=storage, **ONCE)
    assert verdict.status == status, verdict.reason
    if status == "fail":
        assert verdict.failed[0].check == "model_equal"
