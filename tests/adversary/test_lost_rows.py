"""A row that was written counts, whatever becomes of the file that it was written to."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dcpbench.records.store import ResultsError, RowLog, read_lines
from report.sweeps import cell, line

CELLS = ["a", "b", "c"]


def deleted(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"fail"', b'"pass"'))


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def log_of(folder: Path) -> RowLog:
    folder.mkdir()
    log = RowLog(folder)
    for name in reversed(CELLS):
        log.append(cell(name, cell=name, status="fail" if name == "a" else "pass"))
    return log


def names(folder: Path, name: str = "results.jsonl") -> list[str]:
    return [json.loads(one.content)["cell"] for one in read_lines(folder, name)]


@pytest.mark.parametrize(
    ("harm", "lost"), [(deleted, 3), (truncated, 1), (emptied, 3), (changed, 1), (link, 3), (pipe, 3)]
)
def test_missing_rows_are_rewritten_and_reported(
    harm: Callable[[Path], None], lost: int, tmp_path: Path
) -> None:
    log = log_of(tmp_path / "sweep")
    harm(tmp_path / "sweep/results.jsonl")
    rows = f"{lost} row{'s' if lost > 1 else ''}"
    were = "were" if lost > 1 else "was"
    message = f"{rows} of results.jsonl {were} missing or changed; rewritten from memory"
    assert log.settle(CELLS) == message
    assert names(tmp_path / "sweep") == CELLS
    assert [one.row.status for one in read_lines(tmp_path / "sweep") if one.row] == ["fail", "pass", "pass"]
    assert log.settle(CELLS) is None


def test_foreign_rows_are_moved_to_superseded(tmp_path: Path) -> None:
    log = log_of(tmp_path / "sweep")
    with (tmp_path / "sweep/results.jsonl").open("ab") as file:
        file.write(line(cell="foreign") + line(cell="a"))
    assert log.settle(CELLS) is None, "nothing is lost"
    assert names(tmp_path / "sweep") == CELLS
    assert names(tmp_path / "sweep", "superseded.jsonl") == ["foreign", "a"]


def test_rows_of_a_resumed_sweep_are_rewritten(tmp_path: Path) -> None:
    log_of(tmp_path / "sweep").settle(CELLS)
    lines = {line.row.cell: line for line in read_lines(tmp_path / "sweep") if line.row}
    again = RowLog(tmp_path / "sweep", lines)
    deleted(tmp_path / "sweep/results.jsonl")
    assert again.settle(CELLS)
    assert names(tmp_path / "sweep") == CELLS


def test_rows_that_cannot_be_rewritten_raise(tmp_path: Path) -> None:
    log = log_of(tmp_path / "sweep")
    deleted(tmp_path / "sweep/results.jsonl")
    (tmp_path / "sweep/results.jsonl").mkdir()
    with pytest.raises(ResultsError, match="cannot be written to"):
        log.settle(CELLS)
