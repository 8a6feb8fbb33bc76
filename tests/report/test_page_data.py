"""The data of the page: its names are those that the scripts read, and runs have names."""

import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dcpbench.analysis.frame import read_sweeps
from dcpbench.report.page.data import PageData, distinguishing, page_data, run_names
from report.sweeps import folder_with
from support.pages import four_cells

_DRAWN = {"index", "kind", "text", "place"}
"""What the scripts add to a run."""


@pytest.mark.parametrize(
    ("axes", "names", "numbers"),
    [
        (
            {"save": ["sync", "async", "async"], "seed": [1, 2, 2], "parallel": ["ddp", "ddp", "fsdp"]},
            ["ddp \u00b7 sync", "ddp \u00b7 async", "fsdp \u00b7 async"],
            ["", "", ""],
        ),
        ({"parallel": ["ddp", "ddp"], "seed": [1, None]}, ["seed=1", "cell (1)"], ["", ""]),
        ({"parallel": ["ddp", "ddp"], "seed": [1, 1]}, ["ddp", "ddp"], ["repeat 0", "repeat 1"]),
        (
            {"parallel": ["x", None, "x"], "save": [None, "x", "y"]},
            ["x (1)", "x (2)", "x \u00b7 y"],
            [""] * 3,
        ),
    ],
)
def test_names_tell_what_varies(axes: dict[str, list[Any]], names: list[str], numbers: list[str]) -> None:
    named_by = distinguishing(axes, [name for name in ("parallel", "save") if name in axes])
    assert run_names(axes, named_by, [f"repeat {n}" for n in range(len(names))]) == (names, numbers)


def test_scripts_read_the_fields_of_the_data(tmp_path: Path) -> None:
    scripts = [it for it in files("dcpbench.report.page").iterdir() if it.name.endswith(".js")]
    text = "\n".join(script.read_text(encoding="ascii") for script in scripts)
    assert set(re.findall(r"\bdata\.(\w+)", text)) == {field.name for field in fields(PageData)}
    several = [folder_with(tmp_path / name, *four_cells()) for name in "ab"]
    made = page_data(read_sweeps(several), [], 4000)
    assert set(re.findall(r"\brun\.(\w+)", text)) - _DRAWN - made.columns.keys() == set()
    assert {len(of_runs) for of_runs in made.columns.values()} == {made.rows}
