"""The page and the next command that a sweep prints at its end."""

import os
import sys
from pathlib import Path

import pytest

from dcpbench.analysis.cell_identity import sweep_before
from dcpbench.analysis.frame import read_sweeps
from dcpbench.config.text import command_text
from dcpbench.records.store import append_row, write_csv
from dcpbench.sweep.driver import next_steps
from support.rows import row


def made(folder: Path, at: int, *parallels: str, **columns: str | None) -> Path:
    """A sweep of cells of these parallelisms that began in this second and ended with it."""
    folder.mkdir(parents=True)
    for name in parallels:
        known = {"parallel": name, "overrides": f"parallel={name}", **columns}
        append_row(folder, row(cell=f"{name} {at}", started_at=f"2026-11-22T02:00:{at}+00:00", **known))
    write_csv(folder)
    (folder / "report.html").touch()
    for item in folder.iterdir():
        os.utime(item, (at, at))
    return folder


@pytest.fixture(autouse=True)
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dcpbench"])


def test_earlier_sweep_has_at_least_half_the_cells(tmp_path: Path) -> None:
    made(tmp_path / "oldest", 10, "ddp", "fsdp")
    old = made(tmp_path / "old one", 11, "ddp", "fsdp")
    made(tmp_path / "other", 12, "hsdp")
    made(tmp_path / "one's own", 12, "fsdp", "none", model="mine.build", optimizer=None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.csv").touch()
    os.utime(tmp_path / "broken" / "results.csv", (12, 12))
    (made(tmp_path / "not ended", 12, "ddp", "fsdp") / "results.csv").unlink()
    new = made(tmp_path / "new", 13, "fsdp", "none")
    made(tmp_path / "later", 14, "fsdp", "none")
    assert sweep_before(new, read_sweeps(new).frame) == old
    few = made(tmp_path / "few", 13, "fsdp", "none", "fsdp2")
    assert sweep_before(few, read_sweeps(few).frame) is None


def test_page_and_next_command_are_printed(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old one", 11, "ddp"), made(tmp_path / "new", 13, "ddp")
    told = ["page: new/report.html", "next: dcpbench compare 'old one' new"]
    assert next_steps(new, old, complete=True) == told
    assert next_steps(new, None, complete=True) == told[:1]
    assert next_steps(new, old, complete=False) == [told[0], "next: dcpbench resume new"]
    again = "to run failed cells again: dcpbench resume new --rerun-failed"
    assert next_steps(new, old, complete=True, failed=True) == [*told, again]
    (new / "report.html").unlink()
    assert next_steps(new, old, complete=True) == told[1:]


def test_command_is_printed_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/dcpbench/__main__.py"])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "dcpbench", "x=y"])
    assert command_text("resume", Path("/a b")) == ".venv/bin/python -m dcpbench resume '/a b'"
    below = tmp_path / "gone"
    below.mkdir()
    monkeypatch.chdir(below)
    below.rmdir()
    assert command_text("resume", tmp_path) == f".venv/bin/python -m dcpbench resume {tmp_path}"
