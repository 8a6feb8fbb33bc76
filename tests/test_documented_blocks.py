"""Every block of YAML that the pages say to save as an experiment is planned as it is written."""

import os
import re
import sys
from pathlib import Path

import pytest

from support.commands import program

DOCS = Path(__file__).parents[1] / "docs"
_FILE = re.compile(r"<!-- file: (\S+) -->\n```(?:yaml|python)\n(.*?)```", re.DOTALL)
PAGES = {
    place: page
    for page in sorted(DOCS.rglob("*.md"))
    for place, _ in _FILE.findall(page.read_text())
    if "/experiment/" in place
}


def test_experiments_are_found() -> None:
    assert "my_conf/experiment/gate.yaml" in PAGES


@pytest.mark.slow
@pytest.mark.parametrize("place", PAGES)
def test_documented_experiment_is_planned(place: str, tmp_path: Path) -> None:
    pages = (DOCS / "tutorials" / "resume-exact.md", PAGES[place])
    for name, text in (file for page in pages for file in _FILE.findall(page.read_text())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    conf, experiment = place.split("/experiment/")
    words = ("--config-dir", conf, f"experiment={experiment.removesuffix('.yaml')}", "device=cpu")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = program(
        *(sys.executable, "-m", "dcpbench", "plan", *words),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 0, ended.stderr
    if place.endswith("gate.yaml"):  # the block with the repeats has the cells of both
        assert "4 cells in 12 runs: 12 would run" in ended.stdout
