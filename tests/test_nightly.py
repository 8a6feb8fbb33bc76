"""What runs every night: the script, the workflow and the experiment, for real but small."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import environment
from dcpbench.code.provenance import conf_folders
from dcpbench.core.plugins import declared_values
from dcpbench.sweep.folder import lock_folder
from support.commands import program
from support.pretended_engine import PRETENDED

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").glob("nightly.*"))
WORKFLOW = ROOT / ".github/workflows/nightly.yml"


def tool(name: str) -> str:
    """A linter that pip has put beside this python."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found, f"{name} is not installed: pip install -e '.[dev]'"
    return found


def linted(*command: str | Path) -> None:
    done = program(*command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    linted(tool("shellcheck"), "--shell=bash", "--enable=quote-safe-variables", script)


def test_steps_of_the_workflow_are_clean(tmp_path: Path) -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    for number, step in enumerate(step for step in job["steps"] if "run" in step):
        assert "${{" not in step["run"], "what somebody types is a value in the environment, never code"
        (tmp_path / f"{number}.sh").write_text("#!/usr/bin/env bash\n" + step["run"])
        linted(tool("shellcheck"), tmp_path / f"{number}.sh")


def test_the_experiment_names_values_that_there_are() -> None:
    """Composing all of its cells takes a minute: here only the names in its lists are looked up."""
    folders, faults = conf_folders(), declared_values("fault")
    night = yaml.safe_load((folders[0] / "experiment/nightly.yaml").read_text())
    added = [path for folder in folders for path in sorted(folder.glob("experiment/nightly/*.yaml"))]
    parts = [night, *(yaml.safe_load(path.read_text()) for path in added)]
    blocks = {}
    for part in parts:
        blocks |= part.get("hydra", {"sweeper": {"matrix": {}}})["sweeper"]["matrix"]
    groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    for name, block in blocks.items():
        for key, values in block.items():
            folder = "parallel" if key == "load_parallel" else key
            for value in str(values).split(",") if folder in groups else ():
                files = (one / folder / f"{value.strip()}.yaml" for one in folders)
                known = value.strip() in faults or any(path.is_file() for path in files)
                assert known, (name, key, value)
        sharing = block.get("sharing", night["sharing"])
        assert sharing == ("none" if name.startswith("costs_") else "correctness")
        assert "scenario" in block, "or scenario=... on the command line would be taken for the block's own"
        assert ("repeats" in block) == name.startswith("costs_")


# What `compare` still has to learn.
class Nights:
    """A user's folder with nightly runs of two cells, whose second may be made to fail between them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder / "the nights", folder / "conf"
        (self.conf / "experiment").mkdir(parents=True)
        (self.conf / "scenario").mkdir()
        matrix = {"both": {"scenario": "save_load,changing", "parallel": "none"}}
        tiny = {"world_size": 2, "device": "cpu", "saves": 1, "train_steps": 1, "resume_steps": 1, "retry": 0}
        tiny["hydra"] = {"sweeper": {"matrix": matrix}}
        (self.conf / "experiment/tiny.yaml").write_text("# @package _global_\n" + yaml.safe_dump(tiny))
        scenario = {"name": "changing", "target": "changing_scenario.run"}
        (self.conf / "scenario/changing.yaml").write_text(yaml.safe_dump(scenario))
        self.second_cell("dcpbench.scenarios.save_load", "save_load")

    def second_cell(self, module: str, function: str) -> None:
        """Its code changes and its configuration does not: it stays the same cell."""
        (self.folder.parent / "changing_scenario.py").write_text(f"from {module} import {function} as run\n")

    def start(self, date: str, *overrides: str, **names: str) -> "subprocess.Popen[str]":
        names = {"NIGHTLY_DIR": str(self.folder), "NIGHTLY_DATE": date, "PYTHON": sys.executable, **names}
        return subprocess.Popen(
            [
                ROOT / "scripts/nightly.sh",
                "--config-dir",
                self.conf.name,
                *(overrides or ("experiment=tiny",)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**names),
            cwd=self.folder.parent,
            start_new_session=True,
        )

    def run(self, date: str, *overrides: str, **names: str) -> tuple[int, str]:
        night = self.start(date, *overrides, **names)
        out, err = night.communicate(timeout=240)
        return night.returncode, out + err

    def rows(self, date: str) -> list[dict[str, Any]]:
        path = self.folder / date / "results.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


@pytest.mark.parametrize("through_link", [False, True])
def test_paths_are_found_from_the_users_folder(through_link: bool, tmp_path: Path) -> None:
    """The Python is that of the checkout, unless another is named."""
    mine, script = tmp_path / "mine", tmp_path / "a clone/scripts/nightly.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts/nightly.sh", script)
    python = tmp_path / "a clone/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$@"\nexit 3\n')
    python.chmod(0o755)
    mine.mkdir()
    if through_link:
        (mine / "nightly").symlink_to(script)
    command = [mine / "nightly" if through_link else script, "--config-dir", "my_conf", "experiment=gate"]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "NIGHTLY_DIR")}
    ended = program(*command, cwd=mine, env={**kept, "NIGHTLY_DATE": "2026-11-20"})
    words = ["-m", "dcpbench", "--config-dir", "my_conf", "experiment=gate"]
    folder = "outputs/nightly/2026-11-20"
    assert ended.stdout.split("|") == [str(mine), *words, f'hydra.sweep.dir="{folder}"', ""]
    assert (ended.returncode, folder in ended.stderr) == (3, True), ended.stderr


@pytest.mark.slow
def test_what_cannot_be_started_says_so(nights: Nights) -> None:
    status, told = nights.run("2026-11-20", "experiment=tiny", "parallel=unknown", PRETENDED)
    assert status == 2, told
    assert "the sweep ended with 2" in told


@pytest.mark.parametrize("count", ["0", "-3", "some", "010", "9999999999999999999999"])
def test_a_wrong_number_of_nights_starts_nothing(count: str, nights: Nights) -> None:
    status, message = nights.run("2026-11-20", KEEP_NIGHTS=count)
    assert status == 2, message
    assert message.endswith(f"KEEP_NIGHTS={count}: not a number of nights; give 1 or more\n"), message
    assert not nights.folder.exists()


def old_night(folder: Path) -> Path:
    (folder / "a" / "checkpoints").mkdir(parents=True)
    (folder / "sweep.json").write_text("{}\n")
    (folder / ".lock").touch()
    return folder


@pytest.mark.slow
def test_only_the_newest_nights_are_kept(nights: Nights) -> None:
    """Also folders that look like nights and are not: links, names, files of another program."""
    elsewhere = old_night(nights.folder.parent / "elsewhere")
    oldest, running, newer = (old_night(nights.folder / f"2026-10-0{day}") for day in (1, 2, 3))
    (oldest / "a" / "link").symlink_to(elsewhere)
    (nights.folder / "2026-09-01").symlink_to(elsewhere)
    old_night(nights.folder / "2026-09-02-copy")
    (nights.folder / "2026-09-03").mkdir()
    no_sweep, no_lock = (old_night(nights.folder / f"2026-09-0{day}") for day in (4, 5))
    for file in (no_sweep / "sweep.json", no_lock / ".lock"):
        file.unlink()
        file.symlink_to(elsewhere / file.name)
    stay = {path.name for path in nights.folder.iterdir()} - {oldest.name}
    nights.second_cell("dcpbench.scenarios.save_load", "save_load")
    held = lock_folder(running)
    try:
        status, message = nights.run("2026-11-20", "experiment=tiny", PRETENDED, KEEP_NIGHTS="2")
    finally:
        os.close(held)
    assert status == 0, message
    assert f"{oldest}: removed; the newest 2 nights stay" in message
    assert f"{running}: not removed: a driver is running in it" in message
    assert newer.name in stay
    assert {path.name for path in nights.folder.iterdir()} == {*stay, "2026-11-20"}
    assert {path.name for path in elsewhere.iterdir()} == {"a", "sweep.json", ".lock"}


@pytest.mark.slow
def test_nights_one_after_another(nights: Nights) -> None:
    first = broken_off_and_gone_on_with(nights, "2026-11-19")
    # Run again with a night before it, which had the same rows.
    shutil.copytree(nights.folder / "2026-11-19", nights.folder / "2026-11-18")
    status, told = nights.run("2026-11-19")
    assert (status, "2 of 2 cells are done" in told) == (0, True), told
    assert (nights.folder / "2026-11-19/results.jsonl").read_bytes() == first, "no cell ran twice"
    assert "its comparison with 2026-11-18 with 0" in told
    status, told = nights.run("2026-11-19", "experiment=tiny", "seed=3")
    assert (status, "leave out seed=3, or run another sweep" in told) == (2, True), told
    # An interrupted night is not compared with.
    shutil.copytree(nights.folder / "2026-11-19", nights.folder / "2026-11-20")
    rows = (nights.folder / "2026-11-20/results.jsonl").read_text().splitlines(keepends=True)
    (nights.folder / "2026-11-20/results.jsonl").write_text(rows[0])
    nights.second_cell("support.scenarios", "raises")
    status, told = nights.run("2026-11-21")
    assert status == 1, told
    assert "the sweep ended with 1, its comparison with 2026-11-19 with 1" in told
    assert "changing" in (nights.folder / "2026-11-21/compare.txt").read_text()
    # The morning after, the same failure is not new, and the night is not better.
    status, told = nights.run("2026-11-22")
    assert status == 1, told
    assert "the sweep ended with 1, its comparison with 2026-11-21 with 0" in told


def broken_off_and_gone_on_with(nights: Nights, date: str) -> bytes:
    """The rows of the first night, which is interrupted in its second cell and then ended."""
    nights.second_cell("support.scenarios", "hangs")
    night = nights.start(date)
    try:
        for _ in range(4000):
            if nights.rows(date):
                break
            assert night.poll() is None, night.communicate()
            time.sleep(0.05)
        os.killpg(night.pid, signal.SIGINT)  # as Ctrl-C does, and Slurm before the time is up
        _, told = night.communicate(timeout=60)
    finally:
        if night.poll() is None:
            os.killpg(night.pid, signal.SIGKILL)
    assert night.returncode == 130, told
    (first,) = nights.rows(date)
    nights.second_cell("dcpbench.scenarios.save_load", "save_load")
    status, told = nights.run(date)
    assert status == 0, told
    assert "1 of 2 cells are done" in told
    assert "no finished night before it" in told
    assert nights.rows(date)[0] == first
    assert [row["status"] for row in nights.rows(date)] == ["pass", "pass"]
    return (nights.folder / date / "results.jsonl").read_bytes()
