"""A storage that fails, and how the failure is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from conftest import Finished, run
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.formats.audit import Chunk, Entry, Manifest, audit, controls
from dcpbench.plugins.crash.failing import storage
from support.alone import config, world

ORDER = ("raised async", "complete", "writer thread", "load raised", "load of other", "not met")


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("failing") / "sweep", "experiment=failing")


def row_of(failing: Finished, name: str) -> dict[str, Any]:
    return failing.rows[ORDER.index(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raised async", "complete", "load raised"])
def test_failure_raises_on_all_ranks_or_is_harmless(failing: Finished, name: str) -> None:
    row = row_of(failing, name)
    assert (row["status"], row["reason"]) == ("pass", None)
    checks = ("contract_held", "checkpoint_whole", "model_equal", "optim_equal", "extra_equal")
    assert all(row[check] is True for check in checks)


@pytest.mark.slow
def test_incomplete_save_with_success_fails(failing: Finished) -> None:
    row = row_of(failing, "writer thread")
    assert (row["status"], row["checkpoint_whole"], row["contract_held"]) == ("xfail", False, True)
    problems = {one["problem"] for one in row["details"]["checks"]["checkpoint_whole"]["worst"]}
    assert "chunks" in problems, "no missing chunk is reported"


@pytest.mark.slow
def test_loading_a_file_of_another_save_fails(failing: Finished) -> None:
    row = row_of(failing, "load of other")
    assert (row["status"], row["model_equal"], row["checkpoint_whole"]) == ("xfail", False, True)


@pytest.mark.slow
def test_failure_that_never_happens_is_a_skip(failing: Finished) -> None:
    row = row_of(failing, "not met")
    assert (row["status"], row["reason"]) == ("skip", "failing: no rank made the operation that fails")


STATE = {"weight": torch.arange(2000.0), "step": 1}


def made(folder: Path, **options: Any) -> Any:
    given = config(storage="failing")
    given.storage.options |= options
    return storage(folder, given.storage, given.save)


@pytest.mark.parametrize(
    ("operation", "files", "nth"),
    [("mkdir", "*", 1), ("open", "*.distcp", 1), ("write", "*", 2), ("fsync", "*", 2), ("rename", "*", 1)],
)
@pytest.mark.parametrize("failure", ["eio", "enospc"])
def test_every_operation_of_a_save_can_fail(
    tmp_path: Path, operation: str, files: str, nth: int, failure: str
) -> None:
    by = made(tmp_path, operation=operation, files=files, nth=nth, failure=failure)
    with pytest.raises(CheckpointException):
        dcp.save(STATE, storage_writer=by.writer, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert not (tmp_path / "saved" / ".metadata").exists()
    assert (tmp_path / "saved.failed-0").exists()


@pytest.mark.parametrize("options", [{"failure": "short"}, {"failure": "slow", "bytes_per_s": 1e9}])
def test_short_and_slow_writes_are_harmless(tmp_path: Path, options: dict[str, Any]) -> None:
    by = made(tmp_path, **options)
    dcp.save(STATE, storage_writer=by.writer, checkpoint_id=tmp_path / "saved", no_dist=True)
    loaded = {"weight": torch.zeros(2000), "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert torch.equal(loaded["weight"], STATE["weight"])
    assert (tmp_path / "saved.failed-0").exists()


def test_flipped_failure_changes_one_bit(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "saved", no_dist=True)
    by = made(tmp_path, failure="flipped", of="load", operation="open", files="*.distcp")
    loaded = {"weight": torch.zeros(2000)}
    dcp.load(loaded, storage_reader=by.reader(str(tmp_path / "saved")), no_dist=True)
    assert (loaded["weight"] != STATE["weight"]).sum() == 1


def test_audit_reports_entries_that_are_not_stored(tmp_path: Path) -> None:
    nowhere = Manifest({"weight": Entry((4,), "torch.float32", (Chunk((0,), (4,), None),))}, {}, {})
    assert [one.name for one in audit(nowhere, nowhere.entries)] == ["weight"]
    assert controls(nowhere, nowhere.entries) == {}
    (tmp_path / "empty").mkdir()
    checkpointer = DcpCheckpointer(tmp_path, config(), world())
    assert checkpointer.manifest(str(tmp_path / "empty")).entries == {}
