"""Changes between sweeps: verdicts by cell, costs only beyond noise."""

import itertools
import math
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from conftest import Command
from dcpbench.analysis.comparison import code_changes
from dcpbench.analysis.frame import read_sweeps
from dcpbench.core.cell_key import digest_of
from dcpbench.records.store import append_row, write_json
from report.sweeps import Terminal
from support.rows import row

Made = Callable[..., Path]
PARALLELISMS = ("ddp", "fsdp", "hsdp", "fsdp2")


@pytest.fixture
def sweep(tmp_path: Path) -> Made:
    def made(name: str, *rows: Any, **environment: object) -> Path:
        (tmp_path / name).mkdir()
        for item in rows:
            append_row(tmp_path / name, item)
        if environment:
            write_json(tmp_path / name / "environment.json", environment)
        return tmp_path / name

    return made


def asked(parallel: str, **columns: Any) -> Any:
    return row(parallel=parallel, overrides=f"parallel={parallel}", **columns)


def measured(
    seed: int, slower: float = 1.0, noise: float = 0.02, offset: float = 1.0, **columns: Any
) -> list[Any]:
    """Five runs of each of eight cells; those of fsdp are slower by a factor, all of them by the offset."""
    chance = random.Random(seed)
    return [
        row(
            parallel=parallel,
            save=save,
            repeat=repeat,
            overrides=f"parallel={parallel} save={save} repeat={repeat}",
            save_s=level * (slower if parallel == "fsdp" else 1) * offset * math.exp(chance.gauss(0, noise)),
            load_s=level / 2 * math.exp(chance.gauss(0, noise)),
            **columns,
        )
        for repeat in range(5)
        for level, parallel in enumerate(PARALLELISMS, 1)
        for save in ("sync", "async")
    ]


def lines(command: Command, *words: object) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = command("compare", *words, "--format", "json").json()
    return told


def statuses(command: Command, *words: object) -> list[dict[str, Any]]:
    return [line for line in lines(command, *words) if line["metric"] == "status"]


def test_statuses_are_matched_by_axes_and_come_first(sweep: Made, command: Command) -> None:
    old = sweep(
        "old", asked("ddp"), asked("fsdp", status="fail"), asked("hsdp"), asked("none"), torch="2.11.0"
    )
    new = sweep(
        "new",
        asked("ddp", status="crash", reason="rank 1 was killed by SIGKILL in save"),
        asked("fsdp"),
        asked("fsdp2"),
        asked("none"),
        torch="2.13.0",
    )
    told = {line["parallel"]: line["verdict"] for line in statuses(command, old, new)}
    assert told == {
        "ddp": "newly failing",
        "fsdp": "newly passing",
        "hsdp": "vanished",
        "fsdp2": "new",
        "none": "same",
    }


def test_repeats_are_runs_of_one_cell(sweep: Made, command: Command) -> None:
    def runs(*statuses: str) -> list[Any]:
        return [
            row(status=status, repeat=repeat, overrides=f"parallel=ddp repeat={repeat}")
            for repeat, status in enumerate(statuses)
        ]

    old, new = sweep("old", *runs("pass", "pass")), sweep("new", *runs("pass", "fail", "pass"))
    (status,) = statuses(command, old, new)
    assert (status["verdict"], status["old"], status["new"]) == ("flaky", "pass", "2 pass, 1 fail")


def test_fail_on_sets_the_exit_status(sweep: Made, command: Command) -> None:
    old, new = sweep("old", asked("ddp")), sweep("new", asked("ddp", status="fail"))
    for fail_on in ("regressions,newly-failing", "failing"):
        command("compare", old, new, "--fail-on", fail_on, status=1)
    command("compare", old, new, "--fail-on", "vanished,regressions")
    command("compare", old, old, "--fail-on", "newly-failing,regressions,vanished,failing")


@pytest.mark.slow
def test_shared_slowdowns_are_found_and_named(sweep: Made, command: Command) -> None:
    old, new = sweep("old", *measured(1)), sweep("new", *measured(2, slower=1.15))
    called = {
        (line["metric"], line["name"] or line["parallel"])
        for line in lines(command, old, new)
        if line["verdict"] in ("slower", "faster")
    }
    assert ("save_s", "parallel=fsdp") in called
    assert {name for _, name in called} <= {"parallel=fsdp", "fsdp"}
    assert {metric for metric, _ in called} <= {"save_s", "save_stall_s"}
    command("compare", old, new, "--fail-on", "regressions", status=1)
    command("compare", new, old, "--fail-on", "regressions")


ALONE, NCCL = {"ranks_per_gpu": 1, "backend": "nccl"}, {"ranks_per_gpu": 4, "backend": "nccl"}
GLOO, SHARED = {"ranks_per_gpu": 4, "backend": "gloo"}, {"training_from": "another"}
COSTS = {"save_s": 1.0, "cell_s": 2.0, "peak_host_bytes": 3}


@pytest.mark.parametrize(
    ("old", "new", "comparable"),
    [
        ({}, ALONE, {*COSTS}),  # a GPU each, as before there was another way
        ({}, NCCL, {"peak_host_bytes"}),
        (NCCL, GLOO, {"peak_host_bytes"}),
        (ALONE, NCCL, {"peak_host_bytes"}),
        (NCCL, NCCL, {*COSTS}),
        ({}, SHARED, {"save_s"}),  # the others are of all that a cell does
        (SHARED, SHARED, {*COSTS}),
    ],
)
def test_costs_of_another_way_to_run_are_not_compared(
    old: dict[str, Any], new: dict[str, Any], comparable: set[str], sweep: Made, command: Command
) -> None:
    folders = [sweep(name, row(**COSTS, **how)) for name, how in (("old", old), ("new", new))]
    costs = lines(command, *folders, "--metric", ",".join(COSTS))
    verdicts = {line["metric"]: line["verdict"] for line in costs if line["metric"] in COSTS}
    assert verdicts == {name: "too few runs" if name in comparable else "not measured" for name in COSTS}


@pytest.mark.slow
def test_equal_sweeps_cause_no_false_alarms(sweep: Made, command: Command) -> None:
    folders = [sweep(f"s{seed}", *measured(seed, noise=0.05)) for seed in range(8)]
    false = [
        line
        for old, new in itertools.pairwise(folders)
        for line in lines(command, old, new)
        if line["verdict"] in ("slower", "faster", "larger", "smaller")
    ]
    assert false == []


@pytest.mark.slow
def test_earlier_sweeps_measure_the_drift(sweep: Made, command: Command, tmp_path: Path) -> None:
    """Every complete night is up to 8 % off: one slower night proves nothing."""

    def night(name: str, seed: int, offset: float) -> Path:
        return sweep(f"nights/{name}", *measured(seed, offset=offset))

    (tmp_path / "nights").mkdir()
    for number, offset in enumerate((1.06, 0.95, 1.0, 1.08, 0.97, 0.94)):
        night(f"{number}", number, offset)
    last, tonight = night("6", 6, 0.98), night("7", 7, 1.08)

    def said(new: Path, *words: object) -> str:
        told = lines(command, last, new, "--metric", "save_s", *words)
        (whole,) = (one for one in told if one["metric"] == "save_s" and one["level"] == "all")
        return str(whole["verdict"])

    assert said(tonight) == "slower"
    each = [word for number in range(6) for word in ("--earlier", tmp_path / "nights" / str(number))]
    assert said(tonight, *each) == "unclear"
    assert lines(command, last, tonight, *each) == lines(
        command, last, tonight, "--earlier", tmp_path / "nights"
    ), "of a folder of nights, those that are compared are none before"
    assert said(night("8", 8, 1.6), *each) == "slower"


def test_statuses_are_compared_with_the_old_sweep(sweep: Made, command: Command) -> None:
    before = sweep("before", asked("ddp", status="fail", reason="then"))
    old, new = sweep("old", asked("ddp")), sweep("new", asked("ddp", status="fail", reason="now"))
    (line,) = statuses(command, old, new, "--earlier", before)
    assert (line["verdict"], line["old"], line["new"]) == ("newly failing", "pass", "fail")


def test_compared_costs_fit_the_terminal(
    sweep: Made, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = sweep("old", *measured(1)), sweep("new", *measured(2, slower=1.15))
    for width, detectable in (80, "in this terminal: smallest detectable"), (120, "smallest\n"):
        for name, value in {"COLUMNS": str(width), "TERM": "xterm"}.items():
            monkeypatch.setenv(name, value)
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        command("compare", old, new)
        said = re.sub(r" +\n", "\n", Text.from_ansi(terminal.getvalue()).plain)
        assert max(map(len, said.splitlines())) <= width
        assert detectable in said
        assert "slower" in said


@pytest.mark.slow
def test_too_few_runs_are_not_judged(sweep: Made, command: Command) -> None:
    old, new = sweep("old", asked("ddp", save_s=1.0)), sweep("new", asked("ddp", save_s=9.0))
    verdicts = {line["verdict"] for line in lines(command, old, new) if line["metric"] == "save_s"}
    assert verdicts == {"too few runs"}
    assert "1 on one side, and at least 3 are needed" in command("compare", old, new).out


def test_failures_are_explained_and_cost_nothing(sweep: Made, command: Command) -> None:
    broken = {"status": "fail", "reason": "extra_equal: x", "extra_equal": False, "save_s": 1.0}
    old, new = sweep("old", asked("ddp", save_s=1.0)), sweep("new", asked("ddp", **broken))
    said = command("compare", old, new, "--fail-on", "regressions").out.splitlines()
    assert said[said.index("1 of 1 cell changed: 1 newly failing") - 2].startswith("    likely: Other state")
    assert said[-1] == "No costs are compared: no cell passed on both sides."


def test_sweeps_without_common_cells_say_why(sweep: Made, command: Command) -> None:
    old, new = sweep("old", asked("ddp", model="even")), sweep("new", asked("ddp", model="uneven"))
    assert "they differ in model (even before, uneven now)" in command("compare", old, new).out
    assert "0 of 1 cell changed" in command("compare", old, new, "--ignore", "model").out


def test_every_sweep_is_compared_with_the_first(sweep: Made, command: Command, tmp_path: Path) -> None:
    old = sweep("old", asked("ddp"))
    others = [sweep("well", asked("ddp")), sweep("broken", asked("ddp", status="fail"))]
    told = {line["against"]: line["verdict"] for line in statuses(command, old, *others)}
    assert told == {"well": "same", "broken": "newly failing"}
    command("compare", old, *others, "-o", tmp_path / "said.md")
    assert "newly failing" in (tmp_path / "said.md").read_text()


def edited(sizes: str, seed: int, **columns: Any) -> list[Any]:
    """Sweeps with a configuration that no override says: the YAML of the model."""
    rows = measured(seed, **columns)
    config = [{**one.config, "model.options.sizes": sizes} for one in rows]
    return [
        replace(one, config=known, config_digest=digest_of(known))
        for one, known in zip(rows, config, strict=True)
    ]


def test_edited_configurations_are_not_compared(sweep: Made, command: Command, tmp_path: Path) -> None:
    """The axes and the overrides are the same: only the complete configuration is not."""
    old = sweep("old", *edited("[3, 4]", 1))
    slow = edited("[3, 8]", 2, offset=2.0, checkpoint_bytes=9)
    new = sweep("new", *edited("[3, 4]", 3)[:2], *slow[2:8], *edited("[3, 4]", 3)[8:])
    told = lines(command, old, sweep("all", *slow))
    assert {line["verdict"] for line in told} == {"other configuration"}
    keys = [line for line in told if line["metric"] == "configuration"]
    assert len(keys) == 8
    assert {(line["name"], line["old"], line["new"]) for line in keys} == {
        ("model.options.sizes", "[3, 4]", "[3, 8]")
    }
    compare = ("compare", old, tmp_path / "all")
    command(*compare, "--fail-on", "other-configuration", status=1)
    text = command(*compare, "--fail-on", "regressions,newly-failing,new,vanished").out
    assert "The environments are the same; configurations are not, see below." in text
    assert "model.options.sizes  [3, 4] → [3, 8]  8" in text
    assert "8 cells with another configuration" in text
    command(*compare, "--ignore", "model.options.sizes", "--fail-on", "regressions", status=1)
    failed = sweep("failed", *edited("[3, 8]", 2, status="fail", reason="model_equal: rank 1"))
    command("compare", old, failed, "--fail-on", "newly-failing")
    text = command("compare", old, failed, "--fail-on", "failing", status=1).out
    assert "other configuration parallel=ddp save=sync (and 7 more like it): model_equal: rank 1" in text
    assert text.count("again: ") == 1, "identical failures of a comparison are grouped"
    assert {line["verdict"] for line in statuses(command, old, new)} == {"same", "other configuration"}


A, B = "a" * 40, "b" * 40


def gpt(commit: str, **files: str) -> dict[str, Any]:
    return {
        "commit": commit,
        "digest": "".join(files.values()),
        "files": {f"{n}.py": d for n, d in files.items()},
    }


def test_changed_code_is_named(sweep: Made, command: Command) -> None:
    """The user's with its files and commits, and dcpbench's."""
    known = {"torch": "2.13", "target_commit": A}
    ours = {"dcpbench": {"commit": A, "digest": "0", "files": {}}}
    old = sweep("old", row(), **known, code={**ours, "my_gpt": gpt(A, my_gpt="1")})
    new = sweep("new", row(), **known, code={**ours, "my_gpt": gpt(f"{A}-dirty", my_gpt="2")})
    other = {"my_gpt": gpt(B, my_gpt="3", more="4"), "dcpbench": {"commit": B, "digest": "1"}}
    newer = sweep("newer", row(), torch="2.13", target_commit=B, dcpbench_commit=B, code=other)
    text = " ".join(command("compare", old, new, newer, "--format", "markdown").out.split())
    assert f"new: your code changed: my_gpt.py (commit {A[:12]}, now with uncommitted changes)." in text
    assert f"newer: your code changed: more.py (new), my_gpt.py (commit {A[:12]}, now {B[:12]})." in text
    assert f"newer: the code of dcpbench changed (commit {A[:12]}, now {B[:12]})." in text
    assert f"dcpbench commit | - | - | {B[:12]}" in text
    assert "The environments are the same." in command("compare", old, old).out
    # A folder of sweeps that differ among themselves is compared as a whole.
    sides = [read_sweeps([old, new]), read_sweeps([new, old]), read_sweeps([newer])]
    assert code_changes(sides[0], sides[1]) == []
    assert code_changes(sides[0], sides[2])[0] == "your code changed: more.py (new), my_gpt.py"
