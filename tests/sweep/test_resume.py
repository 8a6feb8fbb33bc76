"""An interrupted and resumed sweep equals an uninterrupted one: cell for cell, row for row."""

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from conftest import SMALL, TESTS, Finished, alive_in, dcpbench, resume, run, start, words_of
from dcpbench.config.groups import ExecutorConfig, ModelConfig, ScenarioConfig, StorageConfig
from dcpbench.config.schema import Config
from dcpbench.plan.plan import expected_digest, identity_of
from dcpbench.records.store import append_row, keep_lines, read_lines
from dcpbench.sweep.folder import SweepRecord
from dcpbench.verdict.known_failures import KnownFailure
from support.pretended_engine import PRETENDED
from support.rows import measured, row

MATRIX = (
    "-m",
    "parallel=ddp,none",
    "save=sync,async,async_cached",
    "fault=none,weight_lowest_bit",
    "fault.expects=[{check: extra_equal}]",
    "saves=1",
    "device=cpu",
    *SMALL,
)
CELLS = 12
"""4 pass, 4 are skips, and in 4 a fault is not seen as it is expected to be."""
ON_RANKS = ("-m", "parallel=none", *MATRIX[2:], "world_size=1")
"""Half of them."""


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same sweep without ranks."""
    ended = run(tmp_path_factory.mktemp("pretended") / "unbroken", *MATRIX, PRETENDED)
    assert len(ended.rows) == CELLS
    return ended


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep whose checkpoints go to `root` beside it."""
    place = tmp_path_factory.mktemp("resume")
    ended = run(place / "unbroken", *ON_RANKS, f"storage.root={place / 'root'}")
    assert len(ended.rows) == CELLS // 2
    return ended


def kill_when(
    words: list[str], cwd: Path, happened: Callable[[], bool], beside: Callable[[], None] = lambda: None
) -> None:
    """Start a driver, stop it as soon as something has happened, call `beside`, and kill it."""
    driver = start(*words, cwd=cwd)
    try:
        deadline = time.monotonic() + 90
        while not happened():
            assert driver.poll() is None, "it ended before that"
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.002)
        os.kill(driver.pid, signal.SIGSTOP)
        beside()
    finally:
        driver.kill()
        driver.communicate(60)


def rows_in(folder: Path) -> int:
    path = folder / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def cell_under_way(folder: Path, checkpoints: Path) -> list[Path]:
    """Where the checkpoints of cells lie that have written some and have no row."""
    path = folder / "results.jsonl"
    done = path.read_text() if path.exists() else ""
    return [place.parent for place in checkpoints.glob("*/step-*") if f'"{place.parent.name}"' not in done]


@pytest.mark.slow
def test_killed_and_resumed_sweep_has_the_same_rows(unbroken: Finished) -> None:
    folder, root = unbroken.folder.parent / "repaired", unbroken.folder.parent / "root"
    # Names of one length: paths stand in the metadata, and bytes are compared.
    assert len(folder.name) == len(unbroken.folder.name)
    anew = words_of(folder, *ON_RANKS, f"storage.root={root}")
    again = ["resume", str(folder)]

    def is_refused() -> None:
        second = resume(folder)
        assert (second.status, second.out) == (2, "")
        assert "another dcpbench is using this folder" in second.err

    kill_when(anew, folder.parent, (folder / "sweep.json").exists, beside=is_refused)

    # In a cell, with a checkpoint begun; it leaves more behind than one would think.
    kill_when(again, folder.parent, lambda: any(cell_under_way(folder, root / "repaired")))
    done = {line.row.cell for line in read_lines(folder) if line.row}
    dead = next(item["cell"] for item in unbroken.rows if item["cell"] not in done)
    for place in (root / "repaired" / dead, folder / dead):
        place.mkdir(parents=True, exist_ok=True)
        (place / "stale").write_text("left over")
    before = len(done)

    # Right after a row: nothing of the next cell is there, or a little.
    kill_when(again, folder.parent, lambda: rows_in(folder) > before)

    # In the middle of a row.
    content = (folder / "results.jsonl").read_bytes()
    last = content.rfind(b"\n", 0, -1) + 1
    (folder / "results.jsonl").write_bytes(content[: (last + len(content)) // 2])

    ended = resume(folder, cwd=TESTS)
    assert ended.err.count("was torn and is removed") == 1
    assert ended.status == unbroken.status == 1
    assert (folder / "results.jsonl").read_bytes().startswith(content[:last]), (
        "rows that stand are left alone"
    )
    assert [item["cell"] for item in ended.rows] == [item["cell"] for item in unbroken.rows]
    assert measured(ended.rows) == measured(unbroken.rows)
    assert not list(folder.parent.rglob("stale"))
    wrong = {item["cell"] for item in ended.rows if item["status"] == "fail"}
    assert {kept.name for kept in (root / "repaired").iterdir()} == wrong, "and no others' checkpoints"
    assert len(wrong) == 2
    assert len((folder / "results.csv").read_text().splitlines()) == CELLS // 2 + 1
    assert f"{CELLS // 2} cells: " in ended.out
    assert alive_in(folder.parent) == []


@pytest.mark.slow
def test_changed_rows_run_again_with_reasons(pretended: Finished) -> None:
    """More reasons: test_valid_rows.py."""
    folder = pretended.folder.parent / "reworked"
    shutil.copytree(pretended.folder, folder)
    rows = pretended.rows
    ran = [item for item in rows if item["status"] != "skip"]
    ran[0]["torch_version"] = "1.0"
    ran[2]["schema_version"] = ran[4]["schema_version"] = 3
    before = b"".join(json.dumps(item).encode() + b"\n" for item in rows)
    (folder / "results.jsonl").write_bytes(before)
    machine = json.loads((folder / "environment.json").read_text())
    machine["torch"] = "1.0"
    (folder / "environment.json").write_text(json.dumps(machine))

    planned = dcpbench("plan", "--resume", str(folder), PRETENDED, folder=folder)
    assert planned.status == 0, planned.err
    assert (folder / "results.jsonl").read_bytes() == before
    assert f"{CELLS} cells: 3 would run, {CELLS - 3} are done" in planned.out
    torch = pretended.rows[0]["torch_version"]
    reasons = (
        f"1 cell again: torch was 1.0 and is {torch}",
        "2 cells again: its line is not a row of this version",
    )
    assert all(planned.out.count(reason) == 1 for reason in reasons), planned.out

    ended = resume(folder, PRETENDED, "--rerun-failed")
    assert all(ended.err.count(reason) == 1 for reason in reasons), ended.err
    assert "4 cells again: its row is not ok (--rerun-failed)" in ended.err
    assert measured(ended.rows) == measured(pretended.rows)
    assert [item["cell"] for item in ended.rows] == [item["cell"] for item in pretended.rows]
    old = (folder / "superseded.jsonl").read_bytes().splitlines(keepends=True)
    assert sorted(old) == sorted(json.dumps(item).encode() + b"\n" for item in [*ran[:6], ran[7]])
    described = json.loads((folder / "environment.json").read_text())
    assert described["torch"] == torch
    assert described["earlier"] == [{"torch": "1.0"}]


@pytest.mark.slow
def test_wrong_use_is_one_line_and_changes_nothing(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    SweepRecord(["parallel=ddp"], str(tmp_path), {"a": ["parallel=ddp"]}, []).write(folder)
    append_row(folder, row(cell="a"))
    before = {item: item.stat().st_mtime for item in tmp_path.rglob("*")}
    assert "there is no such folder" in refused("resume", "nowhere")
    assert "contains no sweep to resume" in refused("resume", "empty")
    assert "leave out hydra.sweep.dir=" in refused("resume", "there", "hydra.sweep.dir=other")
    assert "not a key; write dcpbench resume there" in refused("parallel=ddp", "resume=there")
    assert "or run dcpbench resume" in refused("parallel=ddp", PRETENDED, folder=folder)
    assert {item: item.stat().st_mtime for item in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("replaced", [0, 1])
def test_rows_are_taken_out_atomically(tmp_path: Path, replaced: int) -> None:
    """Killed before the first or the second of its two files is put in place, and done again."""
    for cell in ("one", "two", "three"):
        append_row(tmp_path, row(cell=cell, details={"of": cell}))
    original = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)
    honest, done = Path.replace, []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == replaced:
            raise KeyboardInterrupt
        done.append(target)
        return honest(path, target)

    def take_out() -> None:
        one, two, three = read_lines(tmp_path)
        keep_lines(tmp_path, [three, one], take_out=[two])

    with mock.patch.object(Path, "replace", killed), pytest.raises(KeyboardInterrupt):
        take_out()
    assert (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True) == original
    take_out()
    assert (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True) == [original[2], original[0]]
    assert (tmp_path / "superseded.jsonl").read_bytes() == original[1]
    keep_lines(tmp_path, [], take_out=read_lines(tmp_path))
    assert (tmp_path / "superseded.jsonl").read_bytes() == original[1] + original[2] + original[0]


def test_digests_cover_what_decides_a_row() -> None:
    config = Config(scenario=ScenarioConfig(name="a", target="x.y"), model=ModelConfig(options={"size": 3}))
    failure = KnownFailure(id="f", cells={"parallel": "ddp"}, torch=">=2", checks={"model_equal": "a"})

    def but(**parts: Any) -> str:
        return identity_of(Config(**{**vars(config), **parts})).digest

    how_run = {"known_failures": "y", "retry": 0, "raw": True, "repeat": 3}
    assert but(**how_run) == but()
    assert but(executor=ExecutorConfig("ray", "x.y", address="a:1")) == but()
    assert but(storage=StorageConfig(root="x", needs_bytes=3)) == but()
    others = [
        but(model=ModelConfig(options={"size": 4})),
        but(seed=1),
        but(storage=StorageConfig(thread_count=2)),
        but(load_world_size=2),
        but(executor=ExecutorConfig(hosts=2)),
        but(executor=ExecutorConfig(ranks_per_host=2)),
    ]
    assert len({but(), *others}) == 7
    assert expected_digest(config, [failure]) != expected_digest(config, [])


@pytest.mark.slow
def test_full_disk_interrupts_between_rows(tmp_path: Path) -> None:
    """A limit on the length of files stands for a full disk."""
    folder = tmp_path / "sweep"
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (60 * 1024, 60 * 1024))
    full = run(folder, "-m", "seed=range(1,21)", "parallel=none", "device=cpu", PRETENDED, prepare=limit)
    assert full.status == 1
    kept = (folder / "results.jsonl").read_bytes()
    done = kept.count(b"\n")
    why = f"{folder / 'results.jsonl'} cannot be written to: File too large; free disk space, then run: "
    last = full.err.splitlines()[-1]
    assert last.startswith(f"interrupted: {done} of 20 cells done, {20 - done} left: {why}")
    assert full.err.splitlines()[-1].endswith(" -m dcpbench resume sweep")
    assert 0 < done < 20
    assert kept.endswith(b"\n")
    ended = resume(folder, PRETENDED)
    assert ended.status == 0, ended.err
    assert (folder / "results.jsonl").read_bytes().startswith(kept)
    assert [item["seed"] for item in ended.rows] == list(range(1, 21))


@pytest.mark.slow
def test_plan_of_a_resume_is_by_the_recorded_blocks(tmp_path: Path) -> None:
    blocks = '+hydra.sweeper.matrix={first:{seed:"1,2"},second:{seed:"4"}}'
    assert run(tmp_path / "s", PRETENDED, "parallel=none", "world_size=1", "device=cpu", blocks).status == 0
    folder = tmp_path / "s"
    planned = dcpbench("plan", "--resume", str(folder), PRETENDED, "--json", folder=folder)
    found = json.loads(planned.out)["blocks"]
    assert {name: block["done"] for name, block in found.items()} == {"first": 2, "second": 1}
