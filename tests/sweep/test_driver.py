"""The driver writes one row for every cell, whatever happens to a cell, its folder or the disk."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import run
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import KeepCheckpoints, StorageConfig
from dcpbench.core.metrics import Measurement
from dcpbench.records import store
from dcpbench.records.store import MEASUREMENTS_JSONL, ResultsError, append_row, stored_rows
from dcpbench.sweep.cell_runner import Finished
from dcpbench.sweep.folder import refuse_unusable
from support.pretended import jobs_in, sweep_of
from support.pretended_engine import PRETENDED
from support.rows import row

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("call", ["disk_usage", "stat", "mkdir"])
def test_a_stale_mount_is_an_error_of_its_cell(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = shutil if call == "disk_usage" else Path
    real = getattr(where, call)
    (tmp_path / "stale").mkdir()

    def stale(path: Path, *rest: Any, **more: Any) -> Any:
        if str(path).startswith(str(tmp_path / "stale")):
            raise STALE
        return real(path, *rest, **more)

    monkeypatch.setattr(where, call, stale)
    folder = tmp_path / "sweep"
    storage = StorageConfig(root=str(tmp_path / "stale"))
    jobs = [*jobs_in(folder, "a"), *jobs_in(folder, "b", storage=storage), *jobs_in(folder, "c")]
    sweep, _ = sweep_of(folder, jobs)
    sweep.run()
    ended = {each.cell: each for each in stored_rows(folder)}
    assert [ended[name].reason for name in "ac"] == ["no check applied"] * 2
    assert ended["b"].status == "error"
    assert "Stale file handle" in str(ended["b"].reason)


def test_a_stale_storage_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:
        raise STALE

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(ConfigError, match=r"^storage\.root=.*: cannot be used: Stale file handle$"):
        refuse_unusable(tmp_path / "new", "storage.root")


@pytest.mark.parametrize("reason", [None, "model_equal: a differs"])
@pytest.mark.parametrize("full", ["append_measurements", "append_row"])
def test_a_full_disk_writes_everything_once(
    reason: str | None, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_in(tmp_path, "a", keep_checkpoints=KeepCheckpoints.all)
    sweep, _ = sweep_of(tmp_path, [job])
    checkpoints = job.checkpoints
    checkpoints.mkdir(parents=True)
    real = getattr(store, full)

    def once(*values: Any) -> None:
        if checkpoints.exists():
            raise ResultsError("the disk is full")
        real(*values)

    monkeypatch.setattr(store, full, once)
    sweep._write([Finished(job, row(reason=reason, status="fail"), [Measurement("save_s", 1.0, 0)])])
    measured = (tmp_path / MEASUREMENTS_JSONL).read_text().splitlines()
    assert [json.loads(line)["value"] for line in measured] == [1.0]
    (written,) = stored_rows(tmp_path)
    note = "its checkpoints were removed to make room for this row"
    assert written.reason == (f"{reason}; {note}" if reason else note)


def test_rows_that_are_no_longer_in_the_file_do_not_count(tmp_path: Path) -> None:
    sweep, printed = sweep_of(tmp_path, jobs_in(tmp_path, "a", "b"))
    for name in ("a", "b"):
        append_row(tmp_path, row(cell=name))
        sweep.rows[name, 0] = row(cell=name)
    assert sweep.close(is_part=False, status=0, began=0.0) == 0
    results = tmp_path / "results.jsonl"
    results.write_bytes(results.read_bytes().splitlines(keepends=True)[0])
    assert sweep.close(is_part=False, status=0, began=0.0) == 1
    assert printed.getvalue().splitlines()[-1] == "1 of 2 runs done, 1 left"


@pytest.mark.slow
def test_every_end_of_a_stage_is_a_row(tmp_path: Path) -> None:
    """A run that does not end well is retried, except with a fault; no rank has a log."""
    lists = ("scenario=save_load,raises,kills_itself", "fault=none,weight_lowest_bit")
    every_pair = ("matrix=pairwise", "parallel=ddp", "device=cpu")
    ended = run(tmp_path / "sweep", "-m", *lists, *every_pair, PRETENDED)
    assert ended.err.startswith("matrix=pairwise: 6 of 6 cells have every pair of values"), ended.err
    seen = {(row["scenario"], row["fault"]): (row["status"], row["flaky"]) for row in ended.rows}
    assert seen == {
        ("save_load", None): ("pass", None),
        ("save_load", "weight_lowest_bit"): ("fail", None),
        ("raises", None): ("error", False),
        ("kills_itself", None): ("crash", False),
        ("raises", "weight_lowest_bit"): ("fail", None),
        ("kills_itself", "weight_lowest_bit"): ("fail", None),
    }
    assert ended.status == 1
    assert {path.parent.parent.name for path in ended.folder.glob("*/checkpoints*/step-0001")} == {
        row["cell"] for row in ended.rows if row["status"] != "pass"
    }
    assert list(ended.folder.rglob("rank*.log")) == []
