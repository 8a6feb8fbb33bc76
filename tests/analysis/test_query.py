"""Conditions of `--where`: which rows they select, and which are refused."""

import contextlib
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import Command
from dcpbench.analysis.frame import read_sweeps
from dcpbench.analysis.query import QueryError, parse_condition, select_rows
from dcpbench.records.row import Row, columns
from report.sweeps import cell, folder_with

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("asked", "cells"),
    [
        ("status!=pass", ["b", "c", "d"]),
        ("status==fail", ["b"]),
        (" save_s >= 0.2 ", ["b", "c"]),
        ("save_s<2E-1", ["a"]),
        ("save_s!=null", ["a", "b", "c"]),
        ("save_s!=0.1", ["b", "c", "d"]),
        ("world_size>3", ["a", "b", "c", "d"]),
        ("compile!=true", ["a", "b", "d"]),
        ("model_equal!=false", ["a", "c", "d"]),
        ("reason~rank [12]$", ["b"]),
        ("reason~(?i)RANK", ["b", "c"]),
        ("parallel<=ddp", ["a", "b"]),
        ('reason="null"', ["d"]),
        ("reason=", []),
    ],
)
def test_conditions_select_rows(tmp_path: Path, asked: str, cells: list[str]) -> None:
    rows: list[Row] = [
        cell(cell="a", save_s=0.1, model_equal=True),
        cell(cell="b", status="fail", save_s=0.2, model_equal=False, reason="rank 1"),
        cell("fsdp", cell="c", status="crash", save_s=0.3, compile=True, reason="rank 3 died"),
        cell("hsdp", cell="d", status="skip", reason="null"),
    ]
    frame = read_sweeps([folder_with(tmp_path / "s", *rows)]).frame
    assert list(select_rows(frame, [parse_condition(asked)])["cell"]) == cells


@pytest.mark.parametrize("asked", ["status=fail", "save_s>1e9", "model!=x", "parallel~hsdp", "reason=null"])
@pytest.mark.parametrize("format_", ["table", "csv"])
def test_valid_conditions_without_rows_are_reported(
    tmp_path: Path, asked: str, format_: str, command: Command
) -> None:
    """Also with no row: then it says so."""
    sweep = folder_with(tmp_path / "s", cell(cell="a"), cell("fsdp", cell="b"))
    has_rows = asked in ("model!=x", "reason=null")
    none = "" if has_rows else "dcpbench: --where: none of 2 rows meets every condition\n"
    assert command(sweep, "--where", asked, "--format", format_).err == none


@cache
def sample() -> pd.DataFrame:
    return read_sweeps([DOCS / "sample-sweep"]).frame.head(5)


@pytest.mark.slow
@settings(deadline=None)
@given(st.sampled_from(sorted(columns())), st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"]), st.text())
def test_any_condition_is_answered_or_refused(column: str, sign: str, value: str) -> None:
    with contextlib.suppress(QueryError):
        assert len(select_rows(sample(), [parse_condition(f"{column}{sign}{value}")])) <= 5
