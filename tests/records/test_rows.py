"""Rows: written whole, read without trust."""

import csv
import json
import math
from pathlib import Path

import pytest

from dcpbench.records.row import columns, exit_status
from dcpbench.records.store import ResultsError, append_row, read_rows, write_csv
from support.rows import row


def test_the_contract_of_columns() -> None:
    """A column is never renamed or moved: tools read these rows."""
    assert columns()[:4] == ("cell", "status", "reason", "scenario")
    assert columns()[37:41] == ("torch_version", "git_commit", "started_at", "schema_version")
    assert columns()[41:57] == (
        "load_parallel",
        "loss_resume_close",
        "contract_held",
        "checkpoint_whole",
        "save_harmless",
        "fault",
        "fault_seen",
        "flaky",
        "config_digest",
        "code_digest",
        "config_dir",
        "disk_bytes",
        "repeat",
        "raw_write_s",
        "raw_read_s",
        "shared_cell_s",
    )
    later = ("checkpointer", "load_world_size", "expected_digest")
    later = (
        *later,
        "state_resume_equal",
        "flags_equal",
        "side_effect_free",
        "files_unchanged",
        "files_equal",
        "random_equal",
        "cwd",
        "state_dict",
        "scheduler",
        "load_into",
        "optimizer_state",
        "activation_checkpointing",
        "clock_offset_s",
        "component",
        "python_version",
        "load_torch_version",
        "load_python_version",
        "resume",
        "training",
        "replicas_equal",
        "batch_loss_close",
        "gradient_bound",
        "step_bound",
        "gradient_bound_used",
    )
    assert columns()[57 : 57 + len(later)] == later, "those of plug-ins follow"
    assert columns()[18:20] == ("gradient_close", "step_equal"), "in the places of version 2's twin checks"


def test_rows_come_back(tmp_path: Path) -> None:
    append_row(tmp_path, row(cell="one", loss_twin=math.nan))
    append_row(tmp_path, row(cell="two", details={"a": [1.5, math.inf]}))
    rows, left_out = read_rows(tmp_path)
    assert [item["cell"] for item in rows] == ["one", "two"]
    assert rows[0]["loss_twin"] is None
    assert rows[1]["details"] == {"a": [1.5, None]}
    assert left_out == []


def test_rows_of_version_2_are_read_as_they_are(tmp_path: Path) -> None:
    """Their checks of training are none of today's, and stay with the row."""
    now = row(cell="one", status="fail", reason="state_twin_close: rank 0: far", config={"seed": 0}).flat()
    gone = {"loss_twin_close": True, "state_twin_close": False}
    since = ("gradient_close", "step_equal", "replicas_equal", "batch_loss_close", "resume", "training")
    old = {name: value for name, value in now.items() if name not in since} | gone | {"schema_version": 2}
    (tmp_path / "results.jsonl").write_text(json.dumps(old) + "\n")
    rows, left_out = read_rows(tmp_path)
    assert left_out == []
    assert rows == [old]
    write_csv(tmp_path)
    with (tmp_path / "results.csv").open(newline="") as read:
        (flat,) = csv.DictReader(read)
    assert flat.keys() == {*columns()}
    assert {name: flat[name] for name in since} == dict.fromkeys(since, "")
    assert (flat["schema_version"], flat["config_digest"]) == ("2", now["config_digest"])


def test_a_torn_line_and_another_schema_hide_no_other_row(tmp_path: Path) -> None:
    append_row(tmp_path, row(cell="one"))
    with (tmp_path / "results.jsonl").open("a") as out:
        out.write('{"cell": "torn", "sta\n')
        out.write(json.dumps({"cell": "newer", "schema_version": 99}) + "\n")
        out.write("__import__('os')\n[1]\n")
    append_row(tmp_path, row(cell="two"))
    rows, left_out = read_rows(tmp_path)
    assert [item["cell"] for item in rows] == ["one", "two"]
    assert len(left_out) == 4
    assert "results.jsonl:3: a row of schema version 99" in left_out[1]


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no sweep here"):
        read_rows(tmp_path)


def test_csv_is_flat(tmp_path: Path) -> None:
    append_row(tmp_path, row(reason='says "a, b"\nand more', details={"a": 1}))
    write_csv(tmp_path)
    with (tmp_path / "results.csv").open(newline="") as read:
        header, only = csv.reader(read)
    assert header == list(columns())
    assert only[:3] == ["a", "pass", 'says "a, b"\nand more']
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "results.jsonl"}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["pass", "xfail", "skip"], 0),
        (["skip", "skip"], 1),
        ([], 1),
        *[(["pass", bad], 1) for bad in ("fail", "vacuous", "error", "crash", "timeout", "xpass")],
    ],
)
def test_exit_status(statuses: list[str], expected: int) -> None:
    assert exit_status(row(status=status) for status in statuses) == expected
