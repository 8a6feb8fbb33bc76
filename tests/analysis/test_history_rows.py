"""The rows of many sweeps: the quick copies and the whole ones tell the same."""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.nights import METRICS, night, three_cells
from dcpbench.analysis.cell_history import history
from dcpbench.analysis.history_rows import read_history
from dcpbench.records.store import RESULTS_CSV, RESULTS_JSONL, append_row, write_csv
from dcpbench.report.__main__ import main
from report.sweeps import cell, folder_with


@pytest.fixture
def nights(tmp_path: Path) -> Path:
    return three_cells(tmp_path / "nights")


def test_sweeps_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for folder, started_at in (("a", "2026-11-03"), ("b", "2026-11-01"), ("c", "2026-11-02")):
        write_csv(folder_with(tmp_path / folder, cell(started_at=started_at)))
    assert history(read_history([tmp_path], METRICS), METRICS).sweeps["name"].tolist() == ["b", "c", "a"]


def marked(sweep: Path) -> None:
    """Have the flat copy of a sweep tell other costs than its rows, to see which of them was read."""
    path = sweep / RESULTS_CSV
    path.write_text(path.read_text().replace(",0.25,", ",0.75,"))


def late(sweep: Path) -> None:
    os.utime(sweep / RESULTS_CSV, ns=(0, 0))


def missing(sweep: Path) -> None:
    (sweep / RESULTS_CSV).unlink()


def of_before(sweep: Path) -> None:
    """The copy of a folder whose driver was killed after it had gone on."""
    when = (sweep / RESULTS_CSV).stat().st_mtime_ns
    append_row(sweep, cell("hsdp", save_s=0.25))
    os.utime(sweep / RESULTS_JSONL, ns=(when, when))


def edited(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(sweep: Path) -> None:
        path = sweep / RESULTS_CSV
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))

    return change


def cut(sweep: Path) -> None:
    path = sweep / RESULTS_CSV
    path.write_bytes(path.read_bytes()[:-30])


def without_a_line(sweep: Path) -> None:
    path = sweep / RESULTS_CSV
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def header_alone(sweep: Path) -> None:
    path = sweep / RESULTS_CSV
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (late, "results.csv is older than results.jsonl"),
        (missing, "no results.csv"),
        (of_before, "results.csv does not end with the row that results.jsonl ends with"),
        (without_a_line, "results.csv does not end with the row"),
        (header_alone, "results.csv does not end with the row"),
        (cut, "results.csv is damaged"),
        (edited(b"save_load", b'"save_load'), "results.csv is damaged"),
        (edited(b"save_load", b"\0"), "results.csv is damaged"),
        (edited(b"save_load", b"\xff"), "results.csv is damaged"),
        (edited(b"0.75", b"no number"), "results.csv is damaged"),
        (edited(b"save_load,", b""), "results.csv is damaged"),
        (edited(b"save_load", b"save_load," * 60), "results.csv is damaged"),
        (edited(b"pass", b""), "results.csv is damaged"),
        (edited(b"cell,status", b"cell,cell"), "results.csv is damaged"),
        (edited(b"schema_version", b"schema"), "results.csv is damaged"),
    ],
)
def test_a_flat_copy_that_is_not_surely_the_same_is_not_read(
    damage: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    """And no other sweep is the worse for it."""
    for number in range(3):
        sweep = night(tmp_path, number, cell("ddp", save_s=0.25), cell("fsdp", save_s=0.25))
        marked(sweep)
        if number == 1:
            damage(sweep)
    rows = read_history([tmp_path], METRICS)
    (remark,) = rows.remarks
    assert remark.startswith(f"{tmp_path / 'night-01'}: {why}")
    assert "read from results.jsonl, which takes longer" in rows.remarks[0]
    cells = [one for one in history(rows, METRICS).cells if len(one.seen) == 3]
    assert [one.costs[0].medians.tolist() for one in cells] == [[0.75, 0.25, 0.75]] * 2


def test_both_files_tell_the_same(nights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["history", str(nights), "--format", "json", "--where", "compile=false", "--where", "parallel!=x"]
    assert main(asked) == 0
    flat = json.loads(capsys.readouterr().out)
    for path in nights.glob(f"*/{RESULTS_CSV}"):
        path.unlink()
    assert main(asked) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [len(flat.pop("remarks")), len(whole.pop("remarks"))] == [0, 1]
    assert flat == whole
    assert [len(one["costs"]["load_s"]["changes"]) for one in flat["cells"]] == [0, 1, 0]


def test_older_rows_without_some_columns(tmp_path: Path) -> None:
    """Their copies have another header."""
    night(tmp_path, 1, cell(save_s=0.5, disk_bytes=7))
    old = night(tmp_path, 0, cell(save_s=0.25, schema_version=2))
    with (old / RESULTS_CSV).open(newline="") as read:
        lines = list(csv.reader(read))
    known = lines[0].index("schema_version") + 1
    lines = [line[:known] for line in lines]
    with (old / RESULTS_CSV).open("w", newline="") as out:
        csv.writer(out).writerows(lines)
    rows = read_history([tmp_path], ["save_s", "disk_bytes"])
    assert rows.remarks == []
    (made,) = history(rows, ["save_s", "disk_bytes"]).cells
    save_s, disk_bytes = made.costs
    assert save_s.medians.tolist() == [0.25, 0.5]
    assert np.array_equal(disk_bytes.medians, [np.nan, 7], equal_nan=True)
    assert len(made.kinds) == 2
