"""Which rows of a resumed sweep stand, and for which reasons other cells run again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpbench.code.sources import Source
from dcpbench.plan.plan import PlannedCell
from dcpbench.records.row import Row
from dcpbench.records.store import append_row, read_lines
from dcpbench.sweep.valid_rows import valid_rows
from dcpbench.verdict.verdict import OUTSIDE
from support import jobs
from support.alone import config
from support.rows import row

A, B = "a" * 40, "b" * 40
DIRTY = f"{A}-dirty"
OURS = {commit: Source(commit, "0") for commit in (A, B)}
MINE = Source(A, "1", {"my_gpt.py": "1", "layers.py": "1"})
KNOWN = {"expected_digest": "e", "code_digest": "c", "torch_version": "2.13", "dcpbench_commit": A}
"""Columns of the cells as they are planned now."""


def planned(name: str, **values: Any) -> PlannedCell:
    one = jobs.job(config(**values))
    return replace(one, name=name, folder=Path(name), columns={**one.columns, "cell": name, **KNOWN})


def row_of(job: PlannedCell, **values: Any) -> Row:
    """The row of a cell that ended with these columns."""
    about = {"cell": job.name, "repeat": job.config.repeat, "config_digest": job.key.digest}
    return row(**{**about, "config": dict(job.key.values), **KNOWN, **values})


DDP, FSDP2 = planned("ddp", parallel="ddp"), planned("fsdp2", parallel="fsdp2")


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"cell": "an earlier name"}, ""),
        ({"torch_version": "2.11"}, "torch was 2.11 and is 2.13"),
        ({"load_torch_version": "2.11"}, "torch of load_python was 2.11 and is None"),
        ({"code_digest": "0"}, "its code has changed"),
        ({"repeat": 1}, "its configuration has changed: repeat was 1 and is 0"),
        ({"expected_digest": "f"}, "its known failures, or what has to detect its fault, have changed"),
        ({"status": "skip", "reason": "no GPU"}, "the reason to skip it no longer applies"),
        ({"status": "error", "details": {OUTSIDE: "a host was lost"}},
         "it failed for a reason outside it (a host was lost)"),
        ({"status": "error"}, ""),
    ],
)  # fmt: skip
def test_a_row_stands_unless_what_decides_it_has_changed(
    written: dict[str, Any], why: str, tmp_path: Path
) -> None:
    append_row(tmp_path, row_of(DDP, **written))
    found = valid_rows(read_lines(tmp_path, kept=OUTSIDE), [DDP], False, {})
    assert [*found.reasons] == ([why] if why else [])
    assert len(found.lines) == (not why)


def test_changed_keys_of_a_cell_are_named(tmp_path: Path) -> None:
    """Whose name it has still; a row of no cell is moved away."""
    now = planned("grown", parallel="fsdp2", seed=3, save_at=0)
    append_row(tmp_path, row_of(planned("grown", parallel="ddp", seed=3, saves=2)))
    append_row(tmp_path, row_of(DDP, cell="elsewhere", config_digest="of no cell"))
    found = valid_rows(read_lines(tmp_path), [now], False, {})
    assert found.sentences(1)[1:] == [
        "resume: 1 cell again: its configuration has changed: "
        "parallel was ddp and is fsdp2, saves was 2 and is 3, save_at was null and is 0",
        "resume: 1 row of no cell of this sweep; moved away",
    ]


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (
            {"dcpbench": OURS[A], "my_gpt": MINE},
            {"dcpbench": OURS[B], "my_gpt": Source(A, "2", {"my_gpt.py": "2", "layers.py": "2"})},
            "the source of layers.py, my_gpt.py has changed",
        ),
        (
            {"dcpbench": OURS[A], "my_gpt": MINE},
            {"dcpbench": Source(DIRTY, "1"), "my_gpt": Source(B, "2", {"my_gpt.py": "2"})},
            "the source of layers.py (removed), my_gpt.py has changed "
            "(commit aaaaaaaaaaaa, now bbbbbbbbbbbb), and "
            "dcpbench's source has changed (commit aaaaaaaaaaaa, now with uncommitted changes)",
        ),
    ],
)
def test_changed_source_is_named(
    before: dict[str, Source], now: dict[str, Source], why: str, tmp_path: Path
) -> None:
    append_row(tmp_path, row_of(DDP, code_digest="0"))
    environment = {"code": {name: vars(one) for name, one in before.items()}}
    found = valid_rows(read_lines(tmp_path), [replace(DDP, code=now)], False, environment)
    assert [*found.reasons] == [why]


@pytest.mark.parametrize("rerun_failed", [False, True])
def test_retry_is_as_valid_as_its_run(tmp_path: Path, rerun_failed: bool) -> None:
    append_row(tmp_path, row_of(FSDP2, status="fail"), row_of(FSDP2, repeat=1, retry_of=0))
    found = valid_rows(read_lines(tmp_path), [FSDP2], rerun_failed, {})
    kept = not rerun_failed
    assert [len(found.lines), len(found.superseded)] == ([2, 0] if kept else [0, 2])
    assert found.sentences(1)[0] == f"resume: {int(kept)} of 1 cells are done"
    assert [*found.reasons] == ([] if kept else ["its row is not ok (--rerun-failed)"])
    assert found.foreign == 0
