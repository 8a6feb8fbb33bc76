"""What a sweep would do is told without doing any of it: cells, times, room on the disk."""

import io
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from conftest import environment
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Sharing, StorageConfig
from dcpbench.config.text import duration_text, size_text
from dcpbench.executors.machine import Machine
from dcpbench.plan.estimates import TimeEstimates, too_little_space
from dcpbench.plan.plan import Plan, PlannedCell
from dcpbench.records.row import Row
from dcpbench.records.store import append_row, keep_lines, read_lines
from dcpbench.sweep.dry_run import print_plan
from dcpbench.sweep.folder import SweepFolder, SweepRecord, refuse_unusable
from dcpbench.sweep.progress import ProgressDisplay, cells_sentence, ranks_sentence
from dcpbench.sweep.request import Options
from dcpbench.sweep.valid_rows import ValidRows
from dcpbench.verdict.known_failures import KnownFailure
from support.alone import config
from support.commands import python
from support.jobs import job
from support.pretended import jobs_in
from support.rows import row

NO_GPU = Machine(0, {})
WITHOUT_TORCH = """
import runpy, sys
from dcpbench.executors import agent
sys.argv = ["dcpbench", *sys.argv[1:]]
try:
    runpy.run_module("dcpbench", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0
assert "torch" not in sys.modules
imported = agent._modules
assert imported == ["dcpbench.rank.machine_probe"], f"no rank is born of a plan: {imported}"
print("the driver has no torch")
"""


@pytest.mark.slow
def test_plan_prints_all_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()  # whose times say nothing of this sweep
    append_row(tmp_path / "older", row(cell_s=150.0))
    before = {item: item.stat().st_mtime for item in tmp_path.rglob("*")}
    asked = ["parallel=ddp,fsdp_tp", "save=sync,async_cached", "saves=1", "device=cpu"]
    folder = tmp_path / "sweep"
    planned = python(
        "-c", WITHOUT_TORCH, "plan", *asked, f"hydra.sweep.dir={folder}", env=environment(), cwd=tmp_path
    )
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.splitlines()[-1] == "the driver has no torch"
    shared, head, *lines = planned.stdout.splitlines()
    assert shared == "all cells: compile=false saves=1 device=cpu"
    assert head.split() == ["parallel", "save", "would", "about", "because"]
    cells = {tuple(line.split()[:2]): line.split(maxsplit=3)[2:] for line in lines[:4]}
    assert cells["ddp", "sync"] == ["run", "?"]
    assert cells["fsdp_tp", "sync"] == ["run", "?      known failure fsdp1-tp-optimizer-state"]
    for parallel in ("ddp", "fsdp_tp"):
        would, because = cells[parallel, "async_cached"]
        assert (would, "needs an accelerator" in because) == ("skip", True)
    assert "4 cells: 2 would run, 2 would be skipped" in planned.stdout
    assert "no time estimate: no similar cell has finished yet" in planned.stdout
    assert planned.stderr == ""
    assert {item: item.stat().st_mtime for item in tmp_path.rglob("*")} == before


def like(scenario: str, world_size: int = 4, **values: Any) -> PlannedCell:
    """A job with this scenario and world size."""
    own = replace(base().scenario, name=scenario)
    return job(replace(base(), scenario=own, world_size=world_size, **values), scenario=scenario)


def test_estimate_is_from_equal_scenarios_and_sizes() -> None:
    times = TimeEstimates(
        [
            row(scenario="a", cell_s=10.0),
            row(scenario="a", cell_s=30.0),
            row(scenario="a", world_size=2, cell_s=99.0),
            row(scenario="b", cell_s=None, shared_cell_s=7.0),
            row(scenario="c", cell_s=None),
        ]
    )
    assert times.seconds(like("a")) == 20
    assert times.seconds(like("b")) == 7, "cells that shared their devices count too"
    assert times.seconds(like("c")) is None
    alone = [like("a"), like("a", 2), like("c")]
    assert times.remaining_s([*alone, replace(like("a"), skip="no")], 0) == 20 + 99 + (20 + 99) / 2
    shared = [like("a", sharing=Sharing.correctness) for _ in range(2)]
    assert times.remaining_s(shared, 0) == 20, "two at once"
    assert TimeEstimates().remaining_s(alone, 0) is None


def progress(row: Row, *left_s: float, done: int = 0, title: str = "a") -> list[str]:
    """The lines of a sweep of cells that end with this row."""
    printed = io.StringIO()
    how = {"total": done + (len(left_s) or 1), "done": done, "titles": {"default": title}}
    with ProgressDisplay(Console(file=printed, width=200), **how) as display:
        for seconds in left_s or (None,):
            display.begin(row.cell)
            display.end(row, lambda: seconds)  # noqa: B023
    return printed.getvalue().splitlines()


def test_progress_lines_are_short(tmp_path: Path) -> None:
    """A reason is short or cut, and the time that is left is printed at each tenth."""
    lines = progress(row(cell="cell"), *(6.0 * (31 - number) for number in range(32)), done=8)
    left = ("3 min", "2 min", "2 min", "2 min", "72 s")
    assert [line for line in lines if "left" in line] == [f"about {words} left" for words in left]
    assert (lines[0], lines[-1]) == ("[9/40] pass cell", "[40/40] pass cell")
    worst = {"worst": [{"name": "0.weight", "problem": "differs", "max_abs_diff": 0.5, "rank": 1}]}
    long = {"reason": "model_equal: " + "0.weight, " * 99, "details": {"checks": {"model_equal": worst}}}
    failed = row(cell="a", status="fail", model_equal=False, **long)
    assert progress(failed) == ["[1/1] fail a: model_equal: 0.weight differs by 0.5, rank 1"]
    failed = row(status="error", cell="default", reason="x" * 1083, details={}, shared_cell_s=6.84)
    assert progress(failed, title="parallel=fsdp, 4 ranks") == [
        f"[1/1] error parallel=fsdp, 4 ranks 6.8 s: {'x' * 300} ... (1,083 characters)"
    ]
    (without_words,) = jobs_in(tmp_path, "a")
    assert Plan([without_words], NO_GPU).titles == {without_words.name: "parallel=ddp"}
    seconds = {4.4: "4 s", 89: "89 s", 90: "2 min", 5000: "83 min", 12000: "3 h 20 min"}
    assert {value: duration_text(value) for value in seconds} == seconds
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3788: "3.7 KiB", 2**30: "1.0 GiB"}
    assert {value: size_text(value) for value in sizes} == sizes


def test_first_lines_have_cells_folder_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two, four = (jobs_in(tmp_path, "a", world_size=size)[0] for size in (1, 2, 4))
    others = (jobs_in(tmp_path, "a", world_size=2, seed=seed)[0] for seed in (1, 2, 3))
    skipped = replace(two, skip="no")
    for jobs, cells, ranks in (
        ([two, *others], "4 cells", "2 ranks starting"),
        ([two, two, four], "2 cells in 3 runs", "2 to 4 ranks starting"),
        ([one], "1 cell", "1 rank starting"),
        ([four, two, one], "3 cells", "1 to 4 ranks starting"),
        ([four, skipped], "2 cells", "4 ranks starting"),
        ([skipped], "1 cell", "all cells are skipped"),
    ):
        plan = Plan(jobs, NO_GPU)
        assert cells_sentence(plan, tmp_path / "a sweep") == f"{cells}; rows go to a sweep"
        assert ranks_sentence(plan) == ranks


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_too_little_disk_space_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**10, 7 * 10**9, 3 * 10**9))

    def why(**parts: int | None) -> str | None:
        return too_little_space(StorageConfig(**parts), tmp_path / "not" / "yet")  # type: ignore[arg-type]

    assert why(keep_free_bytes=3 * 10**9) is None
    assert why(keep_free_bytes=10**9, needs_bytes=2 * 10**9) is None
    assert why(keep_free_bytes=10**9, needs_bytes=2 * 10**9 + 1) == (
        f"too little disk space: 2.8 GiB are free in {tmp_path}, it needs 1.9 GiB (storage.needs_bytes) "
        "and 953.7 MiB have to stay free (storage.keep_free_bytes)"
    )
    assert "free in" in str(why(keep_free_bytes=3 * 10**9 + 1))


def planned(capsys: pytest.CaptureFixture[str], jobs: list[PlannedCell], **options: Any) -> tuple[int, str]:
    """Return the exit status and the output for these jobs."""
    status = print_plan(
        Plan(jobs, NO_GPU), Path("/nowhere"), ValidRows(), Options(**{"plan": "table", **options})
    )
    return status, capsys.readouterr().out


base = cache(config)


def asked(
    number: int, skip: str | None = None, known: tuple[KnownFailure, ...] = (), **axes: object
) -> PlannedCell:
    one = job(base(), known=known, skip=skip, **{**axes, **({} if axes else {"seed": number})})
    overrides = [f"{axis}={value}" for axis, value in axes.items()]
    return replace(one, name=f"cell {number}", overrides=overrides)


@pytest.mark.slow
def test_many_cells_are_summed_by_block(capsys: pytest.CaptureFixture[str]) -> None:
    failure = KnownFailure("some-id", reason="torch is wrong")
    jobs = [asked(number, "no accelerator" if number % 3 else None) for number in range(60)]
    jobs[:2] = asked(0, known=(failure,)), asked(1, "no compiler")
    jobs = [replace(one, block="second" if number >= 40 else "first") for number, one in enumerate(jobs)]
    status, told = planned(capsys, jobs)
    assert status == 0
    counts = [line.split() for line in told.splitlines()[1:3]]
    assert counts == [["first", "40", "14", "26", "?"], ["second", "20", "6", "14", "?"]]
    for said in ("39 × no accelerator", "1 × no compiler", "1 × some-id: torch is wrong"):
        assert f"\n  {said}\n" in told
    assert "\n1 cell in 60 runs: 20 would run, 40 would be skipped\n" in told
    assert "cell 7" not in told
    _, told = planned(capsys, jobs, every=True)
    cells = [line.split()[:2] for line in told.splitlines() if line[:1].isdigit()][:60]
    assert cells == [[str(number), "skip" if one.skip else "run"] for number, one in enumerate(jobs)]
    _, told = planned(capsys, jobs, plan="json")
    values = json.loads(told)
    assert values["blocks"]["second"] == {"cells": 20, "run": 6, "skip": 14, "done": 0, "seconds": None}
    ended = {"would": "skip", "because": "no compiler", "block": "first"}
    assert values["cells"][1].items() >= {"cell": "cell 1", **ended}.items()
    without = [like(("save_load", "convert")[n % 3 == 0]) for n in range(60)]
    lines = [line.split()[:2] for line in planned(capsys, without)[1].splitlines()[1:3]]
    assert lines == [["scenario=convert", "20"], ["scenario=save_load", "40"]], "without blocks"
    status, told = planned(capsys, [asked(0, "no"), asked(1, "no")])
    assert (status, told.splitlines()[-1]) == (1, "every cell would be skipped: nothing would be measured")
    assert planned(capsys, [asked(0, "no"), asked(1)])[0] == 0


def test_cells_are_listed_like_the_rows_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """What all cells share comes first, then the axes and other overrides that vary; repeats are one line."""
    why = "needs a disk of its own and more"
    how = [("ddp", "sync", None), ("ddp", "sync", None), ("fsdp2", "async", why)]
    jobs = [asked(at, skip, parallel=of, save=save, saves=2) for at, (of, save, skip) in enumerate(how)]
    for one, word in zip(jobs, ("repeat=0", "repeat=1", "retry=0"), strict=True):
        one.overrides.append(word)
    shared, head, *lines = planned(capsys, jobs)[1].splitlines()
    assert shared == "all cells: compile=false saves=2"
    assert head.split() == ["parallel", "save", "overrides", "would", "runs", "about", "because"]
    listed = [" ".join(line.split()) for line in lines[:2]]
    assert listed == ["ddp sync run 2 ?", f"fsdp2 async retry=0 skip 1 {why}"]


def test_replaced_rows_are_good_for_an_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """After a change of the code, and once they have been moved away."""
    again, moved = like("a"), like("b")
    append_row(tmp_path, replace(row(scenario="a", cell_s=7.0), config_digest=again.key.digest))
    valid = ValidRows(superseded=[*read_lines(tmp_path)])
    append_row(tmp_path, row(scenario="b", cell_s=20.0))
    keep_lines(tmp_path, [], [*read_lines(tmp_path)][1:])
    assert print_plan(Plan([again, moved], NO_GPU), tmp_path, valid, Options(plan="table")) == 0
    told = capsys.readouterr().out
    assert "about 27 s, from the times of cells similar to 2 of the 2 in this sweep" in told
    assert [line.split()[2] for line in told.splitlines()[2:4]] == ["7", "20"]


def test_plan_refuses_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "rows").touch()
    refuse_unusable(tmp_path, is_resumed=True)
    with SweepFolder(tmp_path, SweepRecord([], "", {"a": []}, [])) as folder:
        folder.hold()
        with pytest.raises(ConfigError, match="another dcpbench is using"):
            refuse_unusable(tmp_path, is_resumed=True)
    refuse_unusable(tmp_path, is_resumed=True)
