"""The ways that docs/architecture.md describes are those of a real run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dcpbench

PAGE = Path(__file__).parents[1] / "docs/architecture.md"
PACKAGE = Path(dcpbench.__file__).parent


def text_of(section: str) -> str:
    [text] = re.findall(
        rf"^## {re.escape(section)}\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return str(text)


def files_of(text: str) -> list[str]:
    """The files that a text names, in its order; a name without a folder is in that of the one before."""
    files, folder = [], ""
    for name in re.findall(r"`([\w/]+\.py)`", text):
        folder = name.rpartition("/")[0] or folder
        files.append(name if "/" in name else f"{folder}/{name}")
    return files


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The files that the driver and the ranks of two cells entered: a pass, and a fault that is caught."""
    folder = tmp_path_factory.mktemp("entered")
    words = ["run", "parallel=fsdp2", "fault=none,weight_lowest_bit", "saves=1", "device=cpu", "world_size=2"]
    subprocess.run(
        [sys.executable, "-m", "dcpbench", *words, f"hydra.sweep.dir={folder}/sweep"],
        env={
            **os.environ,
            "ENTERED_FILES": str(folder),
            "DCPBENCH_PLUGINS": "support.entered_files",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        },
        cwd=folder,
        check=False,
        capture_output=True,
    )
    return {process: (folder / process).read_text().split() for process in ("driver", "rank")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "section", ["The way of `parallel=fsdp2`", "The way of one weight", "The way of a mismatch"]
)
def test_named_files_are_entered(section: str, entered: dict[str, list[str]]) -> None:
    files = files_of(text_of(section))
    assert len(files) > 2
    missing = [file for file in files if file not in entered["driver"] and file not in entered["rank"]]
    assert missing == []


@pytest.mark.slow
def test_steps_follow_each_other_as_on_the_page(entered: dict[str, list[str]]) -> None:
    steps = re.split(r"^\d+\. ", text_of("The way of `parallel=fsdp2`"), flags=re.MULTILINE)[1:]
    firsts = [files_of(step)[0] for step in steps]
    for process, names in entered.items():
        inside = [file for file in firsts if file.startswith(("rank/", "cell/")) == (process == "rank")]
        assert len(inside) > 1
        assert sorted(inside, key=names.index) == inside


def test_named_files_exist() -> None:
    sections = re.findall(r"^## (The way of .*)$", PAGE.read_text(), re.MULTILINE)
    assert len(sections) == 3
    assert [
        file for section in sections for file in files_of(text_of(section)) if not (PACKAGE / file).exists()
    ] == []
