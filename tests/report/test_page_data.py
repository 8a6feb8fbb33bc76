"""The data of the page: its names are those that the scripts read, and runs have names."""

import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

from dcpbench.analysis.frame import read_sweeps
from dcpbench.report.page.data import PageData, page_data
from report.sweeps import folder_with
from support.pages import four_cells

_DRAWN = {"index", "kind", "text", "place"}
"""What the scripts add to a run."""
_OF_SCRIPT = {"verdict"}
"""A column of the plug-in script: runs of others have none, nor has any where it is absent."""


def test_scripts_read_the_fields_of_the_data(tmp_path: Path) -> None:
    scripts = [it for it in files("dcpbench.report.page").iterdir() if it.name.endswith(".js")]
    text = "\n".join(script.read_text(encoding="ascii") for script in scripts)
    assert set(re.findall(r"\bdata\.(\w+)", text)) == {field.name for field in fields(PageData)}
    several = [folder_with(tmp_path / name, *four_cells()) for name in "ab"]
    made = page_data(read_sweeps(several), [], 4000)
    assert set(re.findall(r"\brun\.(\w+)", text)) - _DRAWN - _OF_SCRIPT - made.columns.keys() == set()
    assert {len(of_runs) for of_runs in made.columns.values()} == {made.rows}
