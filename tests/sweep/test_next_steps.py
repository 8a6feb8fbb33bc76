"""What a sweep that has ended says of its page and of the next command."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from conftest import ONE_STEP, run
from dcpbench.cli.commands import main
from dcpbench.sweep.folder import next_steps
from dcpbench.sweep.folder.manifest import Record


def made(folder: Path, at: float, *cells: str) -> Path:
    """A sweep of cells of these names that ended then."""
    folder.mkdir(parents=True)
    Record([], str(folder), [*cells], []).write(folder)
    for name in ("results.jsonl", "report.html"):
        (folder / name).touch()
        os.utime(folder / name, (at, at))
    return folder


@pytest.fixture(autouse=True)
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dcpbench"])


def test_the_sweep_before_is_the_newest_with_cells_in_common(tmp_path: Path) -> None:
    made(tmp_path / "oldest", 1e9, "a", "b")
    made(tmp_path / "old one", 1.1e9, "a", "b")
    made(tmp_path / "other", 1.2e9, "c")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.jsonl").touch()
    new = made(tmp_path / "new", 1.3e9, "b", "d")
    assert next_steps.sweep_before(new, ["b", "d"]) == tmp_path / "old one"
    told = ["page: new/report.html", "next: dcpbench compare 'old one' new"]
    assert [*next_steps.sentences(new, ["b", "d"], whole=True)] == told
    assert [*next_steps.sentences(new, ["d"], whole=True)] == told[:1]
    assert [*next_steps.sentences(new, ["b"], whole=False)] == [told[0], "next: dcpbench resume new"]
    (new / "report.html").unlink()
    assert [*next_steps.sentences(new, ["b"], whole=True)] == told[1:]


def test_it_is_said_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/dcpbench/__main__.py"])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "dcpbench", "x=y"])
    assert next_steps.command("resume", Path("/a b")) == ".venv/bin/python -m dcpbench resume '/a b'"
    below = tmp_path / "gone"
    below.mkdir()
    monkeypatch.chdir(below)
    below.rmdir()
    assert next_steps.command("resume", tmp_path) == f".venv/bin/python -m dcpbench resume {tmp_path}"


@pytest.mark.slow
def test_what_two_sweeps_say_at_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["scenario=no_dist", "parallel=none", "device=cpu", "saves=1", "world_size=1", *ONE_STEP]
    first = run(tmp_path / "first", *asked)
    assert first.status == 0, first.err
    assert first.err.splitlines()[-1] == "page: first/report.html"
    second = run(tmp_path / "second", *asked)
    page, after = second.err.splitlines()[-2:]
    assert page == "page: second/report.html"
    words = shlex.split(after.removeprefix("next: "))
    assert words[-3:] == ["compare", "first", "second"]
    assert main(words[-3:]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "No cell was repeated, so costs cannot be compared: run both sides again with repeats=5"
    )
    lines = (tmp_path / "second" / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["status"] == "pass"
