"""Rows are read without trust: what is damaged is told, and hides nothing that is not."""

import io
import json
import re
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import Command
from dcpbench.analysis.cell_identity import add_cell_keys, identity_keys, names_of_cells
from dcpbench.analysis.frame import dtypes, plain_rows, short_names
from dcpbench.records.row import columns
from dcpbench.records.store import ResultsError, read_lines, read_rows
from dcpbench.report import read_sweeps
from dcpbench.report.document import first_sentences, markdown, render
from dcpbench.report.junit import junit
from dcpbench.report.page import page
from dcpbench.report.show import report_content
from dcpbench.report.tables import summary
from report.sweeps import cell, folder_of_lines, folder_with, line


def test_frame_is_tidy_and_typed(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path / "s", cell(save_s=0.5, checkpoint_bytes=10), cell("fsdp", model_equal=False)
    )
    frame = read_sweeps(str(folder)).frame
    assert list(frame.columns) == ["sweep", *columns(), "config", "details"]
    assert plain_rows(read_sweeps(folder).frame) == plain_rows(read_sweeps([folder]).frame)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {"sweep": "string", **dtypes()}
    assert [str(frame[name].dtype) for name in ("compile", "seed", "save_s", "reason")] == [
        "boolean",
        "Int64",
        "float64",
        "string",
    ]
    assert frame.groupby("parallel")["save_s"].median()["ddp"] == 0.5
    assert pd.isna(frame["checkpoint_bytes"][1])
    assert plain_rows(frame)[1]["model_equal"] is False
    assert plain_rows(frame)[0]["model_equal"] is None


def test_rows_without_new_columns_are_complete(tmp_path: Path) -> None:
    old = json.loads(line())
    for name in ("disk_bytes", "flaky", "details", "reason"):
        del old[name]
    folder = folder_of_lines(tmp_path / "s", [json.dumps(old).encode() + b"\n"])
    sweeps = read_sweeps([folder])
    assert sweeps.left_out == []
    assert sweeps.frame["flaky"].isna().all()
    (read,) = read_lines(folder)
    assert read.row is not None
    assert read.row.reason is None


def test_sweep_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder_of_lines(tmp_path / "old", [line(schema_version=4)] * 9)
    expected = f"{tmp_path / 'old'}: all of its rows have schema version 4, this dcpbench reads 5"
    with pytest.raises(ResultsError, match=f"^{re.escape(expected)}$"):
        read_sweeps(tmp_path / "old")
    folder_of_lines(tmp_path / "new", [line()])
    assert read_sweeps(tmp_path).left_out == [expected]


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        (b'{"cell": "torn", "sta', "whose write was interrupted"),
        (b"[1, 2]\n", "a list of 2, expected a row"),
        (b'"a row"\n', '"a row", expected a row'),
        (b"{}\n", "schema version null, this dcpbench reads 5; ignored"),
        (line(schema_version=4), "schema version 4, this dcpbench reads 5; ignored"),
        (line()[:-40] + b"\0" * 40 + b"\n", "not JSON: Expecting property"),
        (b"__import__('os')\n", "not JSON: Expecting value: line 1 column 1 (char 0); ignored"),
        (b'{"a": 1\n', "not JSON: Expecting ',' delimiter: line 2 column 1 (char 8); ignored"),
    ],
)
def test_invalid_lines_are_reported_and_skipped(tmp_path: Path, damaged: bytes, told: str) -> None:
    lines = [line(cell="one"), damaged, line(cell="two", parallel="fsdp")]
    if not damaged.endswith(b"\n"):
        lines = [lines[0], lines[2], damaged]
    folder = folder_of_lines(tmp_path / "s", lines)
    at = lines.index(damaged)
    rows, left_out = read_rows(folder)
    assert [row["cell"] for row in rows] == ["one", "two"]
    assert len(left_out) == 1
    assert f"results.jsonl:{at + 1}: " in left_out[0]
    assert told in left_out[0]
    assert [number for number, read in enumerate(read_lines(folder)) if read.row is None] == [at]


INVALID: list[tuple[dict[str, object], str]] = [
    ({"save_s": "fast"}, 'save_s is "fast", expected a finite number; ignored'),
    ({"save_s": True}, "save_s is true"),
    ({"save_s": float("nan")}, "not JSON: NaN is no number; ignored"),
    ({"save_s": float("-inf")}, "-Infinity is no number"),
    ({"save_s": 10**400}, "save_s is 1000000000"),
    ({"seed": 2**64}, "seed is 18446744073709551616, expected an integer of 64 bits"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"model_equal": 1}, "model_equal is 1, expected true or false"),
    ({"status": None}, "status is null"),
    ({"cell": ["a"]}, "cell is a list of 1, expected a text"),
    ({"details": [1]}, "details is a list of 1, expected an object"),
    ({"parallel": {"a": 1}}, "parallel is an object of 1"),
    ({"reason": "\ud800"}, "surrogates not allowed; ignored"),
]


def test_lines_with_invalid_values_are_named_and_ignored(tmp_path: Path) -> None:
    short = json.loads(line(cell="short"))
    del short["save"]
    damaged = [line(**{"cell": str(number), **damage}) for number, (damage, _) in enumerate(INVALID)]
    for name in ("repeat", "config_digest"):
        damaged.append(json.dumps({**json.loads(line(cell=name)), name: None}).encode() + b"\n")
    damaged += [json.dumps(short).encode() + b"\n", line(cell="caf\xe9").replace(b"\\u00e9", b"\xe9")]
    folder = folder_of_lines(tmp_path / "s", [line(cell="one"), *damaged, line(status="fine")])
    rows, left_out = read_rows(folder)
    assert [row["status"] for row in rows] == ["pass", "fine"]
    reasons = [reason for _, reason in INVALID]
    reasons += ["repeat is null, expected an integer", "config_digest is null, expected a text"]
    reasons += ["no save, expected a text", "can't decode byte 0xe9"]
    reasons += ['status "fine" is not one of crash, timeout']
    for number, (reason, sentence) in enumerate(zip(reasons, left_out, strict=True), start=2):
        assert f"results.jsonl:{number}: " in sentence
        assert reason in sentence
    assert [bool(each.row) for each in read_lines(folder)] == [True, *[False] * len(damaged), True]
    assert every_format(folder)


def test_duplicate_cells_are_shown_twice(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "s", cell(), cell("fsdp"), cell())
    sweeps = read_sweeps([folder])
    assert "results.jsonl:3: repeats the run of line 1; both are shown" in sweeps.left_out[0]
    assert [*report_content(sweeps).sections[0].table["runs"]] == ["2", "1"]


def test_damaged_lines_are_summarized(tmp_path: Path, command: Command) -> None:
    folder = folder_of_lines(tmp_path / "s", [line(), *[b"?\n"] * 100])
    said = command(folder).out.splitlines()
    assert len([sentence for sentence in said if "not JSON: " in sentence]) == 5
    assert "and 95 more damaged lines" in said
    assert len(first_sentences(["?"] * 6)) == 6
    shown = command(folder, "--format", "csv")
    assert len(shown.out.splitlines()) == 2
    assert len(shown.err.splitlines()) == 6, "where there is no place for them, they are told beside"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (b'{"torch": ', "not JSON: Expecting value"),
        (b"[]", "expected a JSON object"),
        (b'{"torch": "2.13", "free": NaN}', "NaN is no number"),
    ],
)
def test_broken_environments_are_reported(tmp_path: Path, environment: bytes, told: str) -> None:
    folder = folder_with(tmp_path / "s", cell())
    (folder / "environment.json").write_bytes(environment)
    sweeps = read_sweeps([folder])
    assert f"{folder / 'environment.json'}: " in sweeps.left_out[0]
    assert told in sweeps.left_out[0]
    assert len(sweeps.frame) == 1


NO_NAME = "Expecting property name enclosed in double quotes: line 2 column 1 (char 2)"


@pytest.mark.parametrize(
    ("lines", "begun", "told"),
    [
        ([], False, ""),
        ([], True, ": 2 cells to run"),
        (
            [b"{\n"],
            False,
            ": {folder}/results.jsonl:1: not JSON: " + NO_NAME + "; ignored",
        ),
    ],
)
def test_report_without_rows_exits_with_2(
    lines: list[bytes], begun: bool, told: str, tmp_path: Path, command: Command
) -> None:
    folder = folder_of_lines(tmp_path / "s", lines)
    if begun:
        (folder / "sweep.json").write_text('{"arguments": [], "cells": {"a": [], "b": []}}')
    for options in ([], ["--format", "csv"], ["--where", "status=pass"]):
        line = f"dcpbench: {folder}: no row yet{told.format(folder=folder)}\n"
        assert command(folder, *options, status=2).refusal() == line
    assert not (folder / "report.html").exists()


def test_several_sweeps_are_one_frame(tmp_path: Path) -> None:
    for name in ("a/matrix", "b/matrix", "b/seeds"):
        folder_with(tmp_path / name, cell(), cell("fsdp"))
    sweeps = read_sweeps([tmp_path / "a", tmp_path / "b", tmp_path / "b" / "seeds"])
    assert len(sweeps.frame) == 6, "a sweep that is named twice is read once"
    assert list(short_names(sweeps.environments).values()) == ["a/matrix", "b/matrix", "seeds"]
    assert list(report_content(sweeps).sections[0].table["sweep"])[::2] == ["a/matrix", "b/matrix", "seeds"]
    with pytest.raises(ResultsError):
        read_sweeps([tmp_path / "a", tmp_path / "c"])


def test_custom_workloads_appear_once_as_the_model(tmp_path: Path) -> None:
    rows = [
        cell(model=own, optimizer=None, overrides=f"parallel=ddp workload.target={own}", cell=own)
        for own in ("mine.build", "other.build")
    ]
    frame = read_sweeps([folder_with(tmp_path / "s", *rows)]).frame
    assert list(summary(frame).table.columns[:2]) == ["model", "status"]
    named = names_of_cells(add_cell_keys(frame, identity_keys(frame)))
    assert named == ["parallel=ddp model=mine.build", "parallel=ddp model=other.build"]


def every_format(folder: Path) -> str:
    """Every kind of report; none may raise."""
    sweeps = read_sweeps([folder])
    said = report_content(sweeps)
    return render(said, io.StringIO()) + markdown(said) + junit(sweeps) + page(sweeps, "title")


CLEAN = line(cell="one"), line(cell="two", repeat=1, status="fail", reason="model_equal: net.0.weight")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_random_damage_hides_no_other_line(data: st.DataObject) -> None:
    text = line(cell="damaged", repeat=77_777)
    first = data.draw(st.integers(0, len(text) - 2))
    last = data.draw(st.integers(first, len(text) - 1))
    damaged = text[:first] + data.draw(st.binary(max_size=9)).replace(b"\n", b"") + text[last:]
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of_lines(Path(scratch) / "s", [CLEAN[0], damaged, CLEAN[1]])
        rows, left_out = read_rows(folder)
    assert [rows[0]["cell"], rows[-1]["cell"]] == ["one", "two"]
    remarks = ("is not one of", "repeats the run of line")
    assert (len(rows) == 3) is (not left_out or any(remark in left_out[0] for remark in remarks))
