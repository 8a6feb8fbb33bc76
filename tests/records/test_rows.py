"""Rows: written atomically, read without trust."""

import csv
import json
import math
from importlib.resources import files
from pathlib import Path

import pytest

from dcpbench.core.axes import AXES
from dcpbench.records.row import columns, exit_status
from dcpbench.records.store import (
    ResultsError,
    append_row,
    keep_beside,
    read_rows,
    write_csv,
)
from dcpbench.sweep.row_builder import Attempt, row_of
from dcpbench.verdict.verdict import Verdict
from support.jobs import job
from support.rows import row


def test_columns_keep_their_order() -> None:
    """The shipped schema has them in the order in which they are declared, those of a registry together."""
    shipped = [*json.loads((files("dcpbench") / "results.schema.json").read_text())["properties"]]
    assert [*columns()] == [name for name in shipped if name in columns()]
    assert columns()[:4] == ("cell", "status", "reason", "scenario")
    at = columns().index("scenario")
    assert columns()[at : at + len(AXES)] == (*AXES,)


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    written = [row(cell="one", reason="\u4e00\n\0"), row(cell="two", seed=1, details={"a": [1.5, None]})]
    for one in written:
        append_row(tmp_path, one)
    assert read_rows(tmp_path) == (written, [])


def test_rows_are_made_of_what_json_has(tmp_path: Path) -> None:
    details = {"a": [1.5, math.inf], "b": {"c\udcff": math.nan}}
    verdict = Verdict("fail", "no file a\udcff", max_abs_diff=math.nan, details=details)
    made = row_of(job(repeat=0, config_digest="d"), Attempt(verdict, "2026-11-28"))
    append_row(tmp_path, made)
    assert read_rows(tmp_path) == ([made], [])
    assert (made.reason, made.max_abs_diff) == ("no file a?", None)
    assert made.details == {"a": [1.5, None], "b": {"c?": None}}


def test_details_are_read_by_attempt(tmp_path: Path) -> None:
    """And of each attempt: that of a row is the one that started when the row says."""
    for moment in ("1", "2"):
        append_row(tmp_path, row(cell="a", repeat=0, started_at=moment, details={"of": moment}))
        append_row(tmp_path, row(cell="a", repeat=1, started_at=moment))
    results, details = tmp_path / "results.jsonl", tmp_path / "details.jsonl"
    assert "details" not in json.loads(results.read_text().splitlines()[0])
    results.write_bytes(b"".join(results.read_bytes().splitlines(keepends=True)[2:]))
    rows, damaged = read_rows(tmp_path)
    assert ([one.details for one in rows], damaged) == ([{"of": "2"}, {}], [])
    assert [one.details for one in read_rows(tmp_path, details=False)[0]] == [{}, {}]
    details.unlink()
    rows, damaged = read_rows(tmp_path)
    assert ([one.details for one in rows], damaged) == ([{}, {}], [])


def test_details_are_written_before_their_row(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(ResultsError, match=r"results\.jsonl cannot be written to"):
        append_row(tmp_path, row(cell="a", details={"a": 1}))
    assert json.loads((tmp_path / "details.jsonl").read_text())["cell"] == "a"
    (tmp_path / "results.jsonl").rmdir()
    append_row(tmp_path, row(cell="b"))
    (only,), damaged = read_rows(tmp_path)
    assert (only.cell, only.details, damaged) == ("b", {}, []), "details without a row are none"


def test_damaged_details_hide_no_row(tmp_path: Path) -> None:
    append_row(tmp_path, row(cell="a", details={"a": 1}))
    path = tmp_path / "details.jsonl"
    whole = path.read_bytes()
    damage = [b"no json\n", b'{"cell": "a", "details": {}}\n', b"[1]\n", whole.replace(b'{"a": 1}', b"[]")]
    damage += [whole.replace(b'"cell": "a"', b'"cell": ["a"]'), whole[:-9]]
    path.write_bytes(whole + b"".join(damage))
    (only,), damaged = read_rows(tmp_path)
    assert only.details == {"a": 1}
    assert damaged == [f"{path}:{number}: not the details of a row; ignored" for number in range(2, 8)]
    keep_beside(tmp_path, {"a"})
    assert len(read_rows(tmp_path)[1]) == len(damage) - 1, "an interrupted line is cut off"
    path.unlink()
    path.symlink_to(tmp_path / "results.jsonl")
    assert read_rows(tmp_path)[1] == [f"{path} cannot be read: it is a link, which is not followed"]


def test_csv_has_the_columns_only(tmp_path: Path) -> None:
    append_row(tmp_path, row(reason='says "a, b"\nand more', details={"a": 1}))
    append_row(tmp_path, row(reason='=cmd|"/c calc"!A1', save_s=-1.5))
    write_csv(tmp_path)
    with (tmp_path / "results.csv").open(newline="") as read:
        header, only, formula = csv.reader(read)
    assert formula[2] == '\'=cmd|"/c calc"!A1', "a spreadsheet would run it"
    assert formula[header.index("save_s")] == "-1.5"
    assert header == list(columns())
    assert only[:3] == ["a", "pass", 'says "a, b"\nand more']
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "results.jsonl", "details.jsonl"}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["pass", "xfail", "skip"], 0),
        (["skip", "skip"], 1),
        ([], 1),
        *[(["pass", bad], 1) for bad in ("fail", "vacuous", "error", "crash", "timeout", "xpass")],
    ],
)
def test_exit_status_follows_the_rows(statuses: list[str], expected: int) -> None:
    assert exit_status(row(status=status) for status in statuses) == expected
