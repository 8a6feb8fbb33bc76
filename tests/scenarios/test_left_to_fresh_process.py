"""The state that a cell leaves to a fresh process, and its comparison, on one rank in this process."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpbench.cell import handover, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import SavedCheckpoint
from dcpbench.cell.handover import Saved
from dcpbench.config.groups import Verify
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.scenarios import fresh_process
from dcpbench.verify import compare_layouts, plain_read
from dcpbench.verify.snapshot import snapshot_nested
from dcpbench.workloads.run_state import FLAGS
from support.alone import bare_cell, config, world

pytestmark = pytest.mark.cell

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}


def newest(tmp_path: Path, *keys: str) -> tuple[Cell, SavedCheckpoint]:
    """Return a cell with a complete checkpoint of these keys."""
    cell = bare_cell(tmp_path, config(**SMALL, verify="deep"))
    leaves = snapshot_nested({"first": torch.zeros(2), "middle": torch.ones(2), "last": torch.ones(3)})
    state = {"model_equal": leaves, "extra_equal": {"number": 3, "other": 4}, FLAGS: {"number": True}}
    saved: Any = mock.Mock(SavedCheckpoint, step=7, state=state, checkpoint_id=str(tmp_path), numbers={})
    saved.overlapping, saved.named = [], state
    saved.checkpointer = mock.Mock()
    saved.keys = dict.fromkeys(keys)
    saved.source = mock.Mock(options=StateDictOptions(), numbers={})
    saved.source.is_left_out.return_value = False
    cell.complete.append(saved)
    return cell, saved


def dropped_by(saved: SavedCheckpoint) -> list[str]:
    """Return a list that records the checkpoints whose page cache is dropped."""
    dropped: list[str] = []
    saved.checkpointer.drop_cached = dropped.append  # type: ignore[method-assign]
    return dropped


def left(cell: Cell) -> dict[str, set[str]]:
    (newest,) = handover.take(cell, "newest.pt").checkpoints
    place = newest.checkpoint(cell, mock.Mock()).checkpoint_id
    assert (newest.step, place) == (7, str(cell.folder))
    return {check: set(leaves) for check, leaves in newest.state.items()}


ALL = ("model.first", "model.middle", "model.last", "number", "other")


@pytest.mark.parametrize("missing", ["", *ALL])
def test_fresh_process_gets_the_checkpoint_contents(missing: str, tmp_path: Path) -> None:
    cell, _ = newest(tmp_path, *(key for key in ALL if key != missing))
    handover.leave_newest(cell)
    names = {"model_equal": {"first", "middle", "last"}, "extra_equal": {"number", "other"}}
    assert left(cell) == {
        check: held - {missing.removeprefix("model.") if "model" in check else missing}
        for check, held in names.items()
    }


@pytest.mark.parametrize("differing", [{"first"}, {"first", "middle", "last"}, {"last", "number", "other"}])
def test_fresh_process_gets_only_agreed_values(
    differing: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = compare_layouts.digests

    def digests(leaves: Any, group: Any) -> Any:
        whole, _ = honest(leaves, group)
        return whole, [Mismatch(name, Problem.ranks_disagree) for name in leaves if name in differing]

    monkeypatch.setattr(compare_layouts, "digests", digests)
    cell, _ = newest(tmp_path, *ALL)
    handover.leave_newest(cell)
    agreed = {
        "model_equal": {"first", "middle", "last"} - differing,
        "extra_equal": {"number", "other"} - differing,
    }
    assert left(cell) == {check: names for check, names in agreed.items() if names}


@pytest.mark.parametrize("missing", ["", "model.middle", "number"])
def test_fresh_process_reports_missing_values(missing: str, tmp_path: Path) -> None:
    cell, saved = newest(tmp_path, *ALL)
    handover.leave_newest(cell)
    values = {
        **{f"model.{name}": leaf.local for name, leaf in saved.state["model_equal"].items()},
        **saved.state["extra_equal"],
    }
    dcp.save(
        {key: value for key, value in values.items() if key != missing}, checkpoint_id=saved.checkpoint_id
    )
    fresh_process.load_alone(cell)
    check = "model_equal" if missing.startswith("model.") else "extra_equal"
    reported = cell.report.checks
    found = {
        name: [(one.name, one.problem) for one in reported[name].distinct.values()]
        for name in ("model_equal", "extra_equal")
        if reported[name].distinct
    }
    assert found == ({check: [(missing.removeprefix("model."), Problem.missing)]} if missing else {})


def test_each_rank_leaves_a_file(tmp_path: Path) -> None:
    cell, checkpoint = newest(tmp_path)
    dropped = dropped_by(checkpoint)
    saved = Saved([checkpoint], steps.RunRecord([1.0]))
    handover.leave_to_ranks(cell.vary(verify=Verify.standard), saved)
    handover.leave_to_ranks(replace(cell, world=world(1, 2)), saved)
    assert dropped == []
    handover.leave_to_ranks(cell, saved)
    assert dropped == [str(tmp_path)]
    assert {path.name for path in tmp_path.iterdir()} == {"handover-rank0.pt", "handover-rank1.pt"}


def test_nothing_left_means_nothing_to_load(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**SMALL, verify="deep"))
    fresh_process.load_alone(cell)
    assert cell.report.checks == {}


def stream(value: Any) -> io.BytesIO:
    made = io.BytesIO()
    torch.save(value, made)  # which leaves it at its end
    return made


def test_loaded_value_is_compared_as_saved() -> None:
    losses = [1.0, 2.0]
    as_bytes = torch.frombuffer(bytearray(stream(losses).getvalue()), dtype=torch.uint8)
    seen = {
        "number": plain_read._plain(3),
        "scalar": plain_read._plain(torch.tensor(3)),
        "stream": plain_read._plain(stream(losses)),
        "bytes": plain_read._plain(as_bytes),
    }
    assert seen == {"number": 3, "scalar": 3, "stream": losses, "bytes": losses}
    assert type(seen["scalar"]) is int


def test_rank_0_drops_the_page_cache(tmp_path: Path) -> None:
    cell, saved = newest(tmp_path, *ALL)
    dropped = dropped_by(saved)
    handover.leave_newest(replace(cell, world=world(1, 2)))
    assert (dropped, (tmp_path / "newest.pt").exists()) == ([], False)
    for config_without in (replace(cell.config, verify=Verify.standard),):
        handover.leave_newest(replace(cell, config=config_without))
    handover.leave_newest(replace(cell, complete=[]))
    assert (dropped, (tmp_path / "newest.pt").exists()) == ([], False)
    handover.leave_newest(cell)
    assert dropped == [str(tmp_path)]
