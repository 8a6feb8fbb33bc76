"""The environment and output of a driver change no verdict: one true line if something is wrong."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from adversary.hostile import close_descriptors, fill_output, remove_folder
from conftest import ONE_STEP, dcpbench, plan_sweep, run
from dcpbench.sweep.folder import SweepRecord
from report.sweeps import cell, folder_with
from support.commands import python
from support.drivers import environment

pytestmark = pytest.mark.slow

ONE = ("parallel=none", "world_size=1", "device=cpu", "saves=1", *ONE_STEP)
BRACKETS = "[red]a[/blue][b"
FULL = "standard output cannot be written to: No space left on device"


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (close_descriptors, ""),
        (partial(fill_output, 1), FULL),
        (partial(fill_output, 2), ""),
    ],
    ids=["closed", "stdout full", "stderr full"],
)
def test_where_output_goes_makes_no_verdict(prepare: Callable[[], Any], told: str, tmp_path: Path) -> None:
    folder = tmp_path / BRACKETS
    how: dict[str, Any] = {"folder": folder, "cwd": tmp_path, "prepare": prepare, "reports": True}
    ended = dcpbench(*ONE, f"hydra.sweep.dir='{folder}'", **how)
    assert ended.status == 0, ended.err
    assert [row["status"] for row in ended.rows] == ["pass"]
    assert {"results.csv", "report.html", "junit.xml"} <= {path.name for path in folder.iterdir()}
    assert told in ended.err.splitlines() or not told
    assert "Traceback" not in ended.err


def test_a_folder_that_is_gone_is_told_in_a_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    ended = run(tmp_path / "sweep", *ONE, cwd=gone, prepare=remove_folder)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "dcpbench: the current folder was removed; change to another one\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("given", ["", "sweep.json"])
def test_resuming_another_users_sweep_is_refused(tmp_path: Path, given: str) -> None:
    """It imports neither what the record names nor what lies in its folder by the name of a module."""
    there, sweep, ran = tmp_path / "there", tmp_path / "sweep", tmp_path / "ran"
    there.mkdir()
    sweep.mkdir()
    for module in ("selectors", "torch", "evil"):
        (there / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    words = [*ONE, "model.target=evil.Model"]
    SweepRecord(words, str(there), {",".join(ONE): [*ONE]}, []).write(sweep)
    os.chown(sweep / given, 65_534, -1)
    for words in (["resume", str(sweep)], ["plan", "--resume", str(sweep)]):
        ended = dcpbench(*words, folder=sweep, cwd=tmp_path)
        assert (ended.status, ended.out) == (2, "")
        assert f"resume {sweep}: another user owns it" in ended.err
        assert f"model.target=evil.Model` in {there}; if you want that, add --trust" in ended.err
        assert ended.err.count("\n") == 1
    planned = dcpbench("plan", "--trust", "--resume", str(sweep), folder=sweep, own_process=True)
    assert (planned.status, planned.err) == (0, "")
    assert not ran.exists(), "and the agent has imported nothing from there"
    alone = dcpbench("plan", *ONE, "--trust", folder=tmp_path / "new")
    assert (alone.status, alone.err) == (2, "dcpbench: --trust: needs --resume FOLDER\n")


READ_ONLY = {
    "-m dcpbench report {folder}": 0,
    "-m dcpbench compare {folder} {folder}": 0,
    "-m dcpbench history {folder}": 0,
    "-m dcpbench audit {folder}/checkpoint": 0,
    "-m dcpbench plan parallel=none world_size=1 device=cpu model.target=planted.Model": 0,
    "-m dcpbench plan parallel=none world_size=1 device=cpu load_python={python}": 1,
    "-m dcpbench doctor": None,
    "-m dcpbench run --help": 0,
    "{script} report {folder}": 0,
    "{script} plan parallel=none world_size=1 device=cpu model.target=planted.Model": 0,
}
"""Commands that only read, each with its exit status where that depends on nothing else."""


@pytest.fixture(scope="module")
def folder_of_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep's folder with a module for each that is installed or might be, a plug-in of dcpbench and one of
    Hydra; each of them adds its name to the file `ran`. Those that Python imports before a line of dcpbench's
    is run are not among them."""
    folder = folder_with(tmp_path_factory.mktemp("hostile") / "sweep", cell())
    record = {"arguments": ["parallel=none"], "cwd": str(folder), "cells": {"a": []}, "storage": []}
    (folder / "sweep.json").write_text(json.dumps(record))
    dcp.save({"a": torch.ones(1)}, checkpoint_id=folder / "checkpoint", no_dist=True)
    listed = [sys.executable, "-c", "import runpy, sys; print(*sys.modules)"]
    before = subprocess.check_output(listed, text=True).split()
    others = ("planted", "pyarrow", "numexpr", "bottleneck")
    known = {*sys.stdlib_module_names, *packages_distributions(), *others}
    names = {name for name in known if name.isidentifier()} - {*before, "dcpbench", "hydra_plugins"}
    plugin = folder / "hydra_plugins" / "planted"
    plugin.mkdir(parents=True)
    body = f"open({str(folder / 'ran')!r}, 'a').write(__name__ + chr(10))\n"
    for path in [*(folder / f"{name}.py" for name in names), plugin / "__init__.py"]:
        path.write_text(body)
    (folder / "planted.dist-info").mkdir()
    (folder / "planted.dist-info" / "METADATA").write_text("Name: planted\nVersion: 1\n")
    (folder / "planted.dist-info" / "entry_points.txt").write_text("[dcpbench]\nplanted = planted\n")
    return folder


def started(words: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Start a Python there with these words, as a shell does."""
    script = folder.parent / "dcpbench"
    script.write_text("from dcpbench.__main__ import main\nif __name__ == '__main__':\n    main()\n")
    given = words.format(folder=folder, script=script, python=sys.executable)
    unset = ("PYTHONSAFEPATH", "DCPBENCH_PLUGINS")
    around = {name: value for name, value in environment().items() if name not in unset} | variables
    return python(*shlex.split(given), cwd=folder, env=around)


@pytest.mark.parametrize("words", READ_ONLY)
def test_commands_that_read_import_nothing_from_the_current_folder(
    words: str, folder_of_modules: Path
) -> None:
    ended = started(words, folder_of_modules)
    ran = folder_of_modules / "ran"
    assert not ran.exists(), ran.read_text()
    assert READ_ONLY[words] in (ended.returncode, None), ended.stderr
    if "planted" in words:
        assert f"planted.Model: in {folder_of_modules / 'planted.py'}" in ended.stdout.replace("\n", "")


def test_completion_imports_nothing_from_the_current_folder(folder_of_modules: Path) -> None:
    asked = {"_DCPBENCH_COMPLETE": "zsh_complete", "COMP_WORDS": "dcpbench parallel=", "COMP_CWORD": "1"}
    assert "fsdp2" in started("{script}", folder_of_modules, **asked).stdout
    assert not (folder_of_modules / "ran").exists()


@pytest.mark.parametrize(
    ("target", "told", "status"),
    [
        ("mine.model.Net", "in {folder}/mine/model.py", 0),
        ("mine.modle.Net", "not found in {folder}, nor installed", 1),
        ("theirs.Net", "not found in {folder}, nor installed", 1),
    ],
)
def test_a_plan_names_the_targets_that_no_file_defines(
    target: str, told: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("raise SystemExit\n")
    ended = plan_sweep(tmp_path / "sweep", *ONE, f"workload.target={target}", cwd=tmp_path)
    assert ended.status == status, ended.err
    assert f"{target}: {told.format(folder=tmp_path)}" in ended.out


def test_ranks_import_the_users_module_and_prefer_what_is_installed(tmp_path: Path) -> None:
    """By another interpreter too; the user can forbid it."""
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text("import json\nfrom dcpbench.workloads.models import Mlp as Mine\n")
    (tmp_path / "json.py").write_text(f"open({str(ran)!r}, 'w')\n")
    words = f"-m dcpbench {shlex.join([*ONE])} model.target=mine.Mine scenario=convert verify=deep"
    words += " load_python={python} -m save=sync,async_process hydra.sweep.dir="
    ended = started(f"{words}{tmp_path}/sweep", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "sweep/results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["pass"] * 2, ended.stderr
    assert not ran.exists()
    started(f"{words}{tmp_path}/safe", tmp_path, PYTHONSAFEPATH="1")
    rows = [json.loads(line) for line in (tmp_path / "safe/results.jsonl").read_text().splitlines()]
    assert ["No module named 'mine'" in row["reason"] for row in rows] == [True] * 4, "with retries"
