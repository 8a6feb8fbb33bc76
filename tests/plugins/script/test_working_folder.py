"""Copies of working folders."""

import os
from pathlib import Path

from dcpbench.plugins.script.working_folder import WorkingFolder


def write(path: Path, size: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def test_what_is_copied(tmp_path: Path) -> None:
    work, copy = tmp_path / "work", tmp_path / "copy"
    copied = {"train.py", "data/outputs/x", "pkg/mod.py", "venv/notes", ".env"}
    left_out = {
        ".git/config",
        "outputs/x",
        "results/x",
        "env/pyvenv.cfg",
        "env/bin/python",
        "sub/env2/pyvenv.cfg",
        "sub/env2/lib",
        "pkg/__pycache__/mod.pyc",
        ".mypy_cache/x",
        "pkg/.cache/x",
    }
    for path in copied | left_out:
        write(work / path)
    write(tmp_path / "elsewhere" / "data")
    (work / "inner").symlink_to("data")
    (work / "outer").symlink_to("../elsewhere")
    (work / "pkg" / "python").symlink_to("../env/bin/python")
    (work / "dangling").symlink_to("nowhere")
    folder = WorkingFolder(work, work / "results")
    folder.copy(copy)
    found = {
        str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file() and not path.is_symlink()
    }
    assert found == copied
    assert folder.size == 10 * len(copied)
    links = {path.name: os.readlink(path) for path in copy.rglob("*") if path.is_symlink()}  # noqa: PTH115
    assert links["inner"] == "data"
    assert links["dangling"] == "nowhere"
    assert (copy / "outer" / "data").samefile(tmp_path / "elsewhere" / "data")
    assert (copy / "pkg" / "python").samefile(work / "env" / "bin" / "python")


def test_words_that_name_files_that_were_not_copied(tmp_path: Path) -> None:
    write(tmp_path / "work" / ".venv" / "pyvenv.cfg")
    write(tmp_path / "work" / ".venv" / "bin" / "python")
    write(tmp_path / "work" / "train.py")
    folder, copy = WorkingFolder(tmp_path / "work", tmp_path / "results"), tmp_path / "copy"
    folder.copy(copy)
    words = ["env", "A=1", ".venv/bin/python", "train.py", "--lr", "", ".", "last.pt", "x" * 5000]
    python = str(tmp_path / "work" / ".venv" / "bin" / "python")
    assert folder.words(words, copy) == [*words[:2], python, *words[3:]]
