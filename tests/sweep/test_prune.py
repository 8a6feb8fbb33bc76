"""Old sweeps are thinned as asked: what goes, what stays, and what that frees on a real disk."""

import datetime
import json
import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from conftest import SMALL, run, start, words_of
from dcpbench.records import lock
from dcpbench.records.store import append_row, write_json
from dcpbench.report.__main__ import main
from dcpbench.sweep.folder.manifest import held
from dcpbench.sweep.folder.prune import RUBBISH, StoredSweep, freed_by, kept
from support.rows import row

NOW = datetime.datetime.now(datetime.UTC)


def made(folder: Path, days_ago: float, status: str = "pass", **record: object) -> Path:
    """A sweep of two cells with logs, checkpoints and a note of its owner's."""
    at = (NOW - datetime.timedelta(days=days_ago)).isoformat(timespec="seconds")
    folder.mkdir(parents=True)
    asked = {"arguments": [], "cwd": "/", "cells": ["a", "b"], "storage": [], **record}
    write_json(folder / "sweep.json", asked)
    write_json(folder / "environment.json", {"torch": "2.13.0"})
    for cell in ("a", "b"):
        append_row(folder, row(cell=cell, status=status, started_at=at))
        checkpoints = folder / cell / "checkpoints" / "step-2"
        checkpoints.mkdir(parents=True)
        (checkpoints / "__0_0.distcp").write_bytes(os.urandom(70_000))
        (folder / cell / "rank-0.log").write_text("said\n")
    (folder / "notes").mkdir()
    (folder / "notes" / "why.txt").write_text("mine\n")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def du(folder: Path) -> int:
    told = subprocess.run(["du", "-s", "--block-size=1", folder], capture_output=True, text=True, check=True)
    return int(told.stdout.split()[0])


def test_nothing_goes_unless_it_is_asked_for_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = made(tmp_path / "old", 40), made(tmp_path / "new", 1)
    before = du(tmp_path)
    assert main(["thin", str(tmp_path)]) == 0
    assert "add --yes" in capsys.readouterr().out
    assert du(tmp_path) == before
    assert main(["thin", str(tmp_path), "--yes"]) == 0
    assert names(old) == {"sweep.json", "environment.json", "results.jsonl", "notes", ".lock"}
    assert {"a", "b"} <= names(new)
    assert (old / "notes/why.txt").exists(), "what its owner put there is not ours to remove"
    capsys.readouterr()
    assert main(["thin", str(tmp_path), "--yes"]) == 0
    assert "thinned already" in capsys.readouterr().out


def test_rows_are_the_same_before_and_after(tmp_path: Path) -> None:
    old = made(tmp_path / "old", 40)
    made(tmp_path / "new", 1)
    before = (old / "results.jsonl").read_bytes()
    assert main(["thin", str(tmp_path), "--yes"]) == 0
    assert (old / "results.jsonl").read_bytes() == before


def test_what_the_cells_of_its_parts_have_left_goes_and_a_part_at_work_keeps_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = made(tmp_path / "old", 40)
    part = made(old / "old-part-1-of-2", 40)
    made(tmp_path / "new", 1)
    with held(part):
        assert main(["thin", str(tmp_path), "--yes"]) == 0
    assert "running" in capsys.readouterr().out
    assert {"a", "b"} <= names(old) & names(part)
    assert main(["thin", str(tmp_path), "--yes"]) == 0
    assert names(part) == {"sweep.json", "environment.json", "results.jsonl", "notes", ".lock"}
    assert names(old) == names(part) | {part.name}


def test_with_remove_a_sweep_goes_altogether(tmp_path: Path) -> None:
    made(tmp_path / "old", 40)
    made(tmp_path / "new", 35)
    assert main(["thin", str(tmp_path), "--remove", "--yes"]) == 0
    assert names(tmp_path) == {"new"}, "the newest stays, however old"


def test_the_bytes_are_those_that_du_misses_afterwards(tmp_path: Path) -> None:
    """Sparse files, names of one file that all go, and one of which a name stays."""
    old, new = made(tmp_path / "old", 40), made(tmp_path / "new", 1)
    older = made(tmp_path / "older", 50)
    with (old / "a/sparse").open("wb") as out:
        out.truncate(50_000_000)
    os.link(old / "a/checkpoints/step-2/__0_0.distcp", older / "b/the-same")
    os.link(old / "b/checkpoints/step-2/__0_0.distcp", new / "b/kept")
    fates = [old / "a", old / "b", older / "a", older / "b"]
    names_seen: Counter[tuple[int, int]] = Counter()
    told = sum(freed_by([folder], names_seen) for folder in fates)
    for folder in (old, older):
        os.close(lock.take(folder))
    before = du(tmp_path)
    assert main(["thin", str(tmp_path), "--yes"]) == 0
    assert told == before - du(tmp_path)
    assert 150_000 < told < 1_000_000


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    outside = made(tmp_path / "elsewhere", 90)
    old = made(folder / "old", 40)
    made(folder / "new", 1)
    (folder / "link").symlink_to(outside)
    shutil.rmtree(old / "a")
    (old / "a").symlink_to(outside / "a")
    (old / "b" / "out").symlink_to(outside)
    before = du(outside)
    assert main(["thin", str(folder), "--yes"]) == 0
    assert main(["thin", str(folder), "--remove", "--yes"]) == 0
    assert names(folder) == {"new", "link"}
    assert du(outside) == before


def test_only_sweeps_are_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "new", 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.jsonl").write_text('{"of": "another program"}\n')
    foreign = made(tmp_path / "foreign", 90)
    (foreign / "sweep.json").write_text('{"cells": 3}')
    of_no_date = made(tmp_path / "undated", 90)
    (of_no_date / "results.jsonl").write_text(json.dumps({"schema_version": 99, "cell": "a"}) + "\n")
    assert main(["thin", str(tmp_path), "--remove", "--yes"]) == 0
    assert names(tmp_path) == {"new", "other", "foreign", "undated"}
    told = capsys.readouterr().out
    assert "foreign: sweep.json is not what a sweep writes" in told
    assert "undated: no row of this version says when it ran" in told


def test_a_folder_that_is_a_sweep_or_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = made(tmp_path / "old", 40)
    assert main(["thin", str(sweep), "--yes"]) == 2
    assert "is a sweep itself" in capsys.readouterr().err
    assert main(["thin", str(tmp_path / "none"), "--yes"]) == 2
    assert "cannot be looked into" in capsys.readouterr().err


def test_a_removal_that_broke_off_is_ended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of a removal is where the process might be killed: no cell is ever half there, and the
    next run comes to the same end."""
    for remove in ([], ["--remove"]):
        for step in range(6):
            folder = tmp_path / f"{step}{''.join(remove)}"
            old = made(folder / "old", 40)
            made(folder / "new", 1)
            whole = {cell: sorted(path.name for path in (old / cell).rglob("*")) for cell in ("a", "b")}
            with monkeypatch.context() as patch:
                _killed_after(step, patch)
                assert main(["thin", str(folder), "--yes", *remove]) == 130
            for cell in ("a", "b"):
                if (old / cell).exists():
                    assert sorted(path.name for path in (old / cell).rglob("*")) == whole[cell]
            assert main(["thin", str(folder), "--yes", *remove]) == 0
            assert names(folder) == ({"new"} if remove else {"new", "old"})
            assert remove or not {"a", "b", RUBBISH} & names(old)


def _killed_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Every change to the disk that a removal makes is one step; it dies before the next one."""
    done = 0

    def counted(real: object) -> object:
        def act(*words: object, **named: object) -> object:
            nonlocal done
            if done == steps:
                raise KeyboardInterrupt
            done += 1
            return real(*words, **named)  # type: ignore[operator]

        return act

    for name in ("rename", "unlink", "rmdir", "mkdir"):
        patch.setattr(os, name, counted(getattr(os, name)))


def test_the_policy_is_days_then_weeks_then_failures() -> None:
    now = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)  # a Saturday

    def at(days: int, well: bool = True) -> StoredSweep:
        return StoredSweep(Path(str(days)), now - datetime.timedelta(days=days), (), (), well)

    sweeps = [at(days, well=days != 50) for days in range(60)]

    def stays(days: int, **policy: int) -> list[int]:
        return sorted(int(str(folder)) for folder in kept(sweeps, now, days, **policy))

    assert stays(days=3) == [0, 1, 2, 3]
    assert stays(days=0) == [0]
    # Day 4 is a Tuesday, whose week has days left that are no sweep's; the Sundays before it are 6 and 13.
    assert stays(days=3, weeks=3) == [0, 1, 2, 3, 4, 6, 13]
    assert stays(days=3, failed=True) == [0, 1, 2, 3, 50]


@pytest.mark.parametrize("words", [["--keep-days", "-1"], ["--keep-days", "some"], ["--keep-weekly", "1.5"]])
def test_days_and_weeks_are_numbers(words: list[str], tmp_path: Path) -> None:
    assert main(["thin", str(tmp_path), *words]) == 2


@pytest.mark.slow
def test_a_sweep_that_runs_is_left_alone_and_a_thinned_one_is_resumed(tmp_path: Path) -> None:
    kept = ("saves=1", "keep_checkpoints=all", *SMALL)
    asked = ("parallel=none", "world_size=1", "device=cpu", *kept, "seed=1,2,3")
    done = run(tmp_path / "old", *asked)
    assert done.status == 0, done.err
    run(tmp_path / "newer", *asked)
    first = done.rows[0]["cell"]
    assert (done.folder / first / "checkpoints").exists()
    lines = (done.folder / "results.jsonl").read_text().splitlines(keepends=True)
    (done.folder / "results.jsonl").write_text(lines[0] + lines[1])  # as if broken off before the third
    thin = ["thin", str(tmp_path), "--keep-days", "0", "--yes"]

    driver = start(*words_of(tmp_path / "old", *asked, "resume=" + str(tmp_path / "old")), cwd=tmp_path)
    try:
        for _ in range(600):
            if lock.is_held(done.folder):
                break
            assert driver.poll() is None
            time.sleep(0.05)
        assert main(thin) == 0
        assert (done.folder / first / "checkpoints").exists(), "it is at work there"
    finally:
        driver.communicate(120)
    assert (done.folder / "results.jsonl").read_text().splitlines(keepends=True)[:2] == lines[:2]

    (done.folder / "results.jsonl").write_text(lines[0] + lines[1])
    assert main(thin) == 0
    assert not (done.folder / first).exists()
    again = run(tmp_path / "old", *asked, f"resume={tmp_path / 'old'}")
    assert again.status == 0, again.err
    assert "2 of 3 cells are done" in again.err
    assert [row["seed"] for row in again.rows] == [1, 2, 3]
    assert (done.folder / "results.jsonl").read_text().splitlines(keepends=True)[:2] == lines[:2]
