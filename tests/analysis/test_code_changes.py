"""Comparisons name the code that changed: the user's, with its commits, and dcpbench's."""

from pathlib import Path
from typing import Any

import pytest

from dcpbench.analysis.comparison import code_changes
from dcpbench.analysis.frame import read_sweeps
from dcpbench.records.row import Row
from dcpbench.records.store import append_row, write_json
from support.commands import main
from support.rows import row

A, B = "a" * 40, "b" * 40
SHORT_A, SHORT_B = A[:12], B[:12]
SAME = "The environments are the same."


def sweep(folder: Path, *rows: Row, code: dict[str, Any] | None = None, **environment: Any) -> Path:
    folder.mkdir()
    for one in rows or (row(),):
        append_row(folder, one)
    if code:
        environment["code"] = {"dcpbench": {"commit": A, "digest": "0", "files": {}}, **code}
    write_json(folder / "environment.json", {"torch": "2.13", **environment})
    return folder


def mine(commit: str | None, **files: str) -> dict[str, Any]:
    return {
        "commit": commit,
        "digest": "".join(files.values()),
        "files": {f"{name}.py": of for name, of in files.items()},
    }


def compared(capsys: pytest.CaptureFixture[str], *folders: Path, **options: str) -> str:
    assert (
        main(["compare", *map(str, folders), *(f"--{name}={value}" for name, value in options.items())]) == 0
    )
    return " ".join(capsys.readouterr().out.split())


def test_changed_files_of_the_user_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = sweep(tmp_path / "old", target_commit=A, code={"my_gpt": mine(A, my_gpt="1")})
    new = sweep(tmp_path / "new", target_commit=f"{A}-dirty", code={"my_gpt": mine(f"{A}-dirty", my_gpt="2")})
    other = {"my_gpt": mine(B, my_gpt="3", more="4"), "dcpbench": {"commit": B, "digest": "1"}}
    newer = sweep(tmp_path / "newer", target_commit=B, dcpbench_commit=B, code=other)
    text = compared(capsys, old, new)
    assert text.startswith(f"Your code changed: my_gpt.py (commit {SHORT_A}, now with uncommitted changes).")
    assert f"target commit {SHORT_A} {SHORT_A}-dirty" in text
    assert SAME not in text
    text = compared(capsys, old, new, newer, format="markdown")
    assert "new: your code changed: my_gpt.py" in text
    assert f"newer: your code changed: more.py (new), my_gpt.py (commit {SHORT_A}, now {SHORT_B})." in text
    assert f"newer: the code of dcpbench changed (commit {SHORT_A}, now {SHORT_B})." in text
    assert f"dcpbench commit | - | - | {SHORT_B}" in text
    assert SAME in compared(capsys, old, old)
    # A folder of sweeps that differ among themselves is compared as a whole.
    sides = [read_sweeps([old, new]), read_sweeps([new, old]), read_sweeps([newer])]
    assert code_changes(sides[0], sides[1]) == []
    assert code_changes(sides[0], sides[2])[0] == "your code changed: more.py (new), my_gpt.py"
