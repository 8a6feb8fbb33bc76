"""Folders from another user: reading one changes nothing outside it, and runs nothing."""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpbench.config.errors import ConfigError
from dcpbench.core.metrics import Measurement
from dcpbench.records import files, store
from dcpbench.sweep.folder import SweepFolder, SweepRecord
from dcpbench.sweep.valid_rows import ValidRows
from report.sweeps import cell, folder_of_lines, folder_with, line
from support.commands import main
from support.jobs import job

pytestmark = pytest.mark.timeout(60)

READ_BY = {
    "results.jsonl": ("", "show", "compare", "history"),
    "details.jsonl": ("", "show", "compare"),
    "environment.json": ("", "show", "compare"),
    "sweep.json": ("", "show"),
}
WRITTEN = (*READ_BY, "results.csv", "report.html", "junit.xml", "measurements.jsonl", "superseded.jsonl")


def link_to_file(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def folder(path: Path, _: Path) -> None:
    path.mkdir()


def dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("not-there"))


def nul_bytes(path: Path, _: Path) -> None:
    path.write_bytes(
        json.dumps({"schema_version": 2, "cwd": "/a\0b", "arguments": ["\0"]}).encode() + b"\0\n"
    )


RECORD = SweepRecord([], "/", {"a": []}, [])
PLANTED = (link_to_file, dangling_link, folder, nul_bytes)


def everything_in(root: Path) -> dict[str, tuple[int, object]]:
    """The mode of each thing below a folder, and what it says or points to."""
    found: dict[str, tuple[int, object]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        mode = path.lstat().st_mode
        content: object = path.readlink() if stat.S_ISLNK(mode) else None
        if stat.S_ISREG(mode):
            content = path.read_bytes()
        found[str(path)] = (mode, content)
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A file of the user's in a folder next to that of the sweeps, in which nothing changes."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").write_text("mine\n")
    (mine / "secret").write_text("mine too\n")
    (mine / "secret").chmod(0o600)
    before = everything_in(mine)
    yield mine / "thesis"
    assert everything_in(mine) == before


def hostile(sweeps: Path, name: str, plant: Callable[[Path, Path], None], outside: Path) -> Path:
    """One valid sweep, and one in which something replaces a file."""
    record = {"arguments": [], "cwd": "/", "cells": {"a": []}, "storage": []}
    for number, each in enumerate((sweeps / "good", sweeps / "bad")):
        folder_with(each, cell(started_at=f"2026-01-0{number + 1}T00:00:00+00:00"))
        store.write_json(each / "sweep.json", record)
    planted = sweeps / "bad" / name
    planted.unlink(missing_ok=True)
    plant(planted, outside)
    return sweeps / "bad"


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED)
def test_what_stands_in_place_of_a_file_is_told_in_a_line_and_never_followed(
    plant: Callable[[Path, Path], None], outside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, commands in READ_BY.items():
        sweeps = tmp_path / f"sweeps-{name}"
        bad = hostile(sweeps, name, plant, outside)
        for command in commands:
            places = {"": [bad], "show": [bad], "compare": [sweeps / "good", bad], "history": [sweeps]}
            words = [command, *map(str, places[command])] if command else [str(bad)]
            status = main(words)
            out, err = capsys.readouterr()
            where = (name, command, out, err)
            assert status in (0, 1, 2), where
            assert "Traceback" not in err, where
            assert err.count("\n") <= 1 if status == 2 else True, where
            if name == "results.jsonl" and command == "":
                assert status == 2 or "results.jsonl:1" in out, where
            if name in ("environment.json", "details.jsonl") and command == "":
                assert plant is dangling_link or name in out, where


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_driver_writes_never_goes_through_a_link(name: str, outside: Path, tmp_path: Path) -> None:
    """The link itself, one in place of a temporary file of a name that can be guessed, and a second name."""
    for number, plant in enumerate((link_to_file, Path.hardlink_to)):
        for planted in (name, f"{name}.tmp"):
            folder = tmp_path / f"{number}{planted}"
            folder.mkdir()
            plant(folder / planted, outside)
            with suppress(store.ResultsError):  # where it is refused
                if name in ("results.jsonl", "details.jsonl"):
                    store.append_row(folder, cell(details={"a": 1}))
                elif name == "measurements.jsonl":
                    store.append_measurements(folder, cell(), [Measurement("save_s", 1.0, 0)])
                else:
                    store.write_whole(folder / name, [b"x"])


def test_a_file_is_replaced_whole_with_the_modes_of_a_new_one(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.replace(tmp_path / "a", [b"one ", b"two"])
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == b"one two"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640

    def broken() -> Iterator[bytes]:
        yield b"three"
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        files.replace(tmp_path / "a", broken())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"one two"


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 10_000)
    sweep = folder_of_lines(tmp_path / "sweep", [line(cell="a"), b"x" * 20_000 + b"\n", line(cell="b")])
    rows, damaged = store.read_rows(sweep)
    assert [row["cell"] for row in rows] == ["a"]
    told = "longer than the 10,000 bytes of any row, and hides all lines after it; ignored"
    assert damaged == [f"{sweep / 'results.jsonl'}:2: {told}"]
    assert [one.row.cell for one in store.read_lines(sweep) if one.row] == ["a"]


def test_a_document_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 10_000)
    (tmp_path / "sweep.json").write_bytes(b"x" * 10_001)
    with pytest.raises(ConfigError, match="10,001 bytes are more than the 10,000 allowed"):
        SweepRecord.read(tmp_path)


def test_removing_a_folder_changes_nothing_that_it_points_to(outside: Path, tmp_path: Path) -> None:
    for number, locked in enumerate((False, True)):
        folder = tmp_path / f"cell{number}"
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "link").symlink_to(outside.parent)
        (folder / "part" / "file").symlink_to(outside)
        if locked:
            (folder / "part").chmod(0)
            folder.chmod(0o500)
        assert files.remove(folder, tmp_path) is None
        assert not folder.exists()
    link = tmp_path / "link"
    link.symlink_to(outside.parent)
    assert files.remove(link, tmp_path) is None
    assert not link.is_symlink()


def test_the_rest_of_a_folder_is_removed(tmp_path: Path) -> None:
    """Where one thing in it cannot be: here what a file is mounted on, or else what is not empty again."""
    folder = tmp_path / "cell"
    for number in range(3):
        (folder / str(number) / "inside").mkdir(parents=True)
        (folder / str(number) / "inside" / "file").write_text("")
    real = os.rmdir
    busy: list[str] = []

    def rmdir(name: str | Path, **options: Any) -> None:
        if str(name) in ("0", "1", "2") and not busy:
            busy.append(str(name))
        if name in busy:
            raise OSError(errno.EBUSY, "busy", name)
        real(name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        sentence = files.remove(folder, folder.parent)
    assert sentence == f"{folder} could not be removed: [Errno {errno.EBUSY}] busy: '{busy[0]}'"
    assert [str(path.relative_to(folder)) for path in folder.rglob("*")] == busy
    assert files.remove(folder, folder.parent) is None


def test_going_on_removes_no_file_that_is_not_its_own(outside: Path, tmp_path: Path) -> None:
    sweep = folder_with(tmp_path / "sweep", cell())
    (sweep / "notes.tmp").write_text("somebody's")
    (sweep / "results.jsonl.tmp").write_text("somebody's")
    (sweep / f"{files.temporary_name()}").write_text("ours")
    (sweep / f"{files.temporary_name()}").symlink_to(outside)
    (sweep / f"{files.temporary_name()}").mkdir()
    SweepFolder(sweep, RECORD).keep([], ValidRows())
    names = {path.name for path in sweep.iterdir()}
    assert {"notes.tmp", "results.jsonl.tmp", "results.jsonl"} <= names
    assert [name for name in names if files.is_temporary(name) and (sweep / name).is_file()] == []


def test_going_on_clears_no_cell_that_lies_elsewhere(outside: Path, tmp_path: Path) -> None:
    sweep = folder_with(tmp_path / "sweep", cell())
    (sweep / "a").symlink_to(outside.parent)
    one = replace(job(), folder=sweep / "a")
    with pytest.raises(Exception, match="and is not removed"):
        SweepFolder(sweep, RECORD).keep([one], ValidRows())


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_documents_that_no_sweep_wrote_are_refused_in_a_line(
    plant: Callable[[Path, Path], None], outside: Path, tmp_path: Path
) -> None:
    bad = hostile(tmp_path / "sweeps", "sweep.json", plant, outside)
    with pytest.raises(ConfigError) as refused:
        SweepRecord.read(bad)
    assert str(bad) in str(refused.value)
    assert "\n" not in str(refused.value)
    bad = hostile(tmp_path / "others", "environment.json", plant, outside)
    with pytest.raises(ConfigError, match=r"environment\.json"):
        SweepFolder(bad, RECORD).earlier_machines({})
