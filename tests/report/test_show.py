"""`dcpbench report <sweep>...`: which rows it shows, how, and where."""

import csv
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Command, Printed
from dcpbench.analysis.frame import read_sweep, read_sweeps
from dcpbench.analysis.runs import failures, rerun_command
from dcpbench.records.row import columns
from dcpbench.records.store import ENVIRONMENT_JSON
from dcpbench.report.document import names_failed_checks, render
from dcpbench.report.page import page
from dcpbench.report.show import MOST_CELLS, View, report_content, write_reports
from dcpbench.report.tables import counts, detection, headline, pivot_axes, status_pivot, summary
from report.sweeps import cell, folder_with
from support.rows import row

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    """Two parallelisms by two ways of saving, each cell run three times; one fails in one run of three."""
    failed = {"status": "fail", "reason": "model_equal: rank 1: net.weight", "model_equal": False}
    rows = [
        cell(
            parallel,
            save,
            repeat,
            save_s=0.1 + 0.1 * repeat,
            checkpoint_bytes=3 * 2**20,
            **(failed if (repeat, parallel, save) == (1, "ddp", "async") else {"model_equal": True}),
        )
        for repeat in range(3)
        for parallel in ("ddp", "fsdp")
        for save in ("sync", "async")
    ]
    return folder_with(tmp_path / "matrix", *rows)


def many(folder: Path, cells: int, **values: object) -> Path:
    rows = [
        cell(seed=seed, overrides=f"seed={seed}", **{"cell": f"seed={seed}", **values})
        for seed in range(cells)
    ]
    return folder_with(folder, *rows)


def test_runs_of_a_cell_are_one_line(matrix: Path) -> None:
    frame = read_sweep(matrix).frame
    table = summary(frame).table.set_index(["parallel", "save"])
    assert len(table) == 4
    assert table.loc[("ddp", "sync"), ["status", "runs", "save_s", "checks"]].tolist() == [
        "pass",
        "3",
        "0.200",
        "1 passed",
    ]
    assert table.loc[("ddp", "async"), ["status", "runs", "checks"]].tolist() == [
        "fail",
        "1 of 3",
        "failed: model_equal",
    ]
    assert headline(frame) == "4 cells in 12 runs: 11 pass, 1 fail"


def test_runs_and_words_count_in_one_way(tmp_path: Path) -> None:
    """A cell that also ran without times, and one that ran once: no word of theirs holds for all."""
    words = "experiment=gate sharing"
    rows = [
        cell("ddp", overrides=f"parallel=ddp {words}=correctness"),
        *(
            cell("ddp", "sync", one, overrides=f"parallel=ddp {words}=none repeat={one}", cell_s=2.0)
            for one in (0, 1)
        ),
        cell("fsdp2", overrides=f"parallel=fsdp2 {words}=correctness"),
    ]
    shown = summary(read_sweep(folder_with(tmp_path / "s", *rows)).frame)
    assert shown.title == "all cells: compile=false save=sync experiment=gate"
    assert shown.table[["parallel", "runs", "cell_s"]].to_numpy().tolist() == [
        ["ddp", "3, 2 timed", "2.000"],
        ["fsdp2", "1", "-"],
    ]


def test_costs_table_needs_measured_times(matrix: Path, tmp_path: Path, command: Command) -> None:
    without = many(tmp_path / "shared", 2, disk_bytes=20_817)
    for folder, times in ((matrix, True), (without, False)):
        said = command(folder, "--rows", "parallel", "--columns", "status").lines
        assert ("costs: medians over cells, in seconds" in said) is times
    assert "ddp 20.3 ±0.0" in command(without, "--rows", "parallel", "--metric", "disk_bytes").lines


def test_costs_are_medians_per_model(tmp_path: Path, command: Command) -> None:
    sizes = {"small": 0.1, "large": 9.0}
    rows = [
        cell("ddp", repeat=repeat, model=model, seed=seed, save_s=size)
        for model, size in sizes.items()
        for seed in range(3)
        for repeat in range(2)
    ]
    folder = folder_with(tmp_path / "s", *rows)
    said = command(folder, "--rows", "parallel", "--format", "table").lines
    assert said[said.index("parallel model cells save_s") + 1 :][:2] == [
        "ddp small 3 0.100",
        "ddp large 3 9.000",
    ]
    said = command(folder, "--metric", "save_s,load_s", "--format", "table").lines
    assert said[7:9] == ["ddp small -", "ddp large -"], "a metric that was not measured has no median"
    assert said[1:4] == [
        "parallel model save_s",
        "ddp small 0.100 ±0.000",
        "ddp large 9.000 ±0.000",
    ]


def test_worst_run_gives_the_status(tmp_path: Path) -> None:
    """A cell that fails every other time does not work."""
    ends = ["pass", "fail", "crash", "fail"]
    folder = folder_with(
        tmp_path / "s",
        *(cell(repeat=n, status=end, reason=f"{end} of rank {n}") for n, end in enumerate(ends)),
    )
    frame = read_sweep(folder).frame
    assert summary(frame).table[["status", "runs"]].to_numpy().tolist() == [["crash", "1 of 4"]]
    told = failures(frame)
    assert told[["status", "runs"]].to_numpy().tolist() == [["fail", "2 of 4 runs"], ["crash", "1 of 4 runs"]]
    assert told["again"][0].endswith("parallel=ddp save=sync repeat=1")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"ranks_per_gpu": 4, "backend": "nccl"},
            "4 ranks per GPU (NCCL 2.30.7): NVLink and peer copies are not tested",
        ),
        (
            {"ranks_per_gpu": 2, "backend": "gloo"},
            "2 ranks per GPU (gloo; NCCL is 2.30.7): NCCL, NVLink and peer copies are not tested",
        ),
        ({"ranks_per_gpu": 1, "backend": "nccl"}, ""),
        ({"backend": "gloo"}, ""),
    ],
)
def test_shared_gpus_are_named(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    folder = folder_with(tmp_path / "s", cell("ddp", **columns), cell("fsdp2", **columns))
    (folder / ENVIRONMENT_JSON).write_text('{"nccl": "2.30.7"}')
    sweeps = read_sweeps([folder])
    assert report_content(sweeps).more == said
    assert page(sweeps, "s").count("<span>" + (said or "ranks per GPU")) == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize(("cells", "is_pivot"), [(MOST_CELLS, False), (MOST_CELLS + 1, True), (1000, True)])
def test_many_cells_are_a_pivot(tmp_path: Path, cells: int, is_pivot: bool) -> None:
    sweeps = read_sweeps([many(tmp_path / "s", cells)])
    said = render(report_content(sweeps), io.StringIO())
    assert ("status by parallel" in said) is is_pivot
    assert f"{cells} pass" in said
    assert (len(said.splitlines()) < 20) is is_pivot
    assert len(report_content(sweeps, View(cells=True)).sections[0].table) == cells


def test_pivots_count_the_worst_first(tmp_path: Path) -> None:
    rows = [cell("ddp", model="even"), cell("ddp", model="uneven", status="fail"), cell("fsdp", model="even")]
    frame = read_sweeps([folder_with(tmp_path / "s", *rows)]).frame
    shown = status_pivot(frame, pivot_axes(frame))
    assert shown.table.to_numpy().tolist() == [["ddp", "1 fail, 1 pass"], ["fsdp", "pass"]]
    assert shown.title == "status by parallel; each entry counts all values of model"
    by_model = status_pivot(frame, pivot_axes(frame, ["parallel"], ["model"])).table
    assert list(by_model.columns) == ["parallel", "even", "uneven"]
    assert by_model.to_numpy().tolist() == [["ddp", "pass", "fail"], ["fsdp", "pass", ""]]


def test_pivots_have_any_axes_units_and_spread(
    matrix: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = command(matrix, "--metric", "save_s,checkpoint_bytes", "--format", "table").lines
    assert said[2] == "ddp 0.200 ±0.050 0.200 ±0.050"
    assert said[5].startswith("checkpoint_bytes by parallel × save: median in MiB")
    assert said[7] == "ddp 3.0 ±0.0 3.0 ±0.0"
    by_save = ("--rows", "save", "--columns", "parallel,repeat", "--format", "table")
    assert command(matrix, *by_save).lines[2:5] == [
        "save repeat=0 repeat=1 repeat=2 repeat=0 repeat=1 repeat=2",
        "sync pass pass pass pass pass pass",
        "async pass fail pass pass pass pass",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", printed := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        command(matrix, "--metric", "save_s", "--format", "table")
        printed.flush()
    assert b"save_s by parallel ? save" in printed.buffer.getvalue()  # type: ignore[attr-defined]


def test_conditions_apply_to_every_format(matrix: Path, command: Command) -> None:
    def shown(format_: str) -> Printed:
        return command(matrix, "--where", "status!=pass", "--format", format_)

    (record,) = shown("json").json()
    assert record["sweep"] == "matrix"
    assert (record["status"], record["compile"], record["repeat"], record["load_s"]) == (
        "fail",
        False,
        1,
        None,
    )
    (line,) = csv.DictReader(io.StringIO(shown("csv").out))
    assert list(line) == list(record) == ["sweep", *columns()]
    assert (line["status"], line["compile"], line["load_s"]) == ("fail", "False", "")
    assert "1 cell: 1 fail (1 of 12 rows)" in shown("table").out
    assert shown("markdown").out.startswith(
        "**all cells: parallel=ddp compile=false save=async**\n\n| status | checks |"
    )
    assert "- **fail** `parallel=ddp`: `model_equal" in shown("markdown").out


def test_markdown_escapes_texts_of_rows(tmp_path: Path, command: Command) -> None:
    folder = folder_with(tmp_path / "s", cell("a|b", status="fail", reason="`x`\n| <b> @all"))
    said = command(folder, "--format", "markdown").out
    assert "**all cells: parallel=a\\|b compile=false save=sync**" in said
    assert ": `` `x` | <b> @all ``<br>again: `dcpbench run 'parallel=a|b' save=sync`" in said


TORCH = "rank 1 in train: RuntimeError: Expected to have finished. " + "Words of torch. " * 60


@pytest.mark.parametrize("format_", ["table", "markdown"])
def test_causes_follow_the_reason(tmp_path: Path, format_: str, command: Command) -> None:
    """A long reason is cut at a word, and does not hide what helps."""
    reason = f"{TORCH}pass `find_unused_parameters=True`"
    rows = [
        cell("ddp", status="error", reason=reason),
        cell("ddp_unused", status="error", reason=reason, seed=1),
        cell("fsdp", "async", status="fail", reason="x", flags_equal=False),
        cell("fsdp", "async", 1, status="fail", reason="x", flags_equal=False),
    ]
    said = command(folder_with(tmp_path / "s", *rows), "--format", format_).out
    said = said.replace("\\", "").replace("`", "")
    assert said.count("use parallel=ddp_unused") == 1
    assert said.count("Flags, modes, gradients or hooks differ after the load") == 1
    assert re.search(r"(Words|of|torch\.) \.\.\. \(1,\d+ characters\)", said)
    sign = "**" if format_ == "markdown" else ""
    assert f"{sign}error{sign} parallel=ddp: " in said
    assert f"{sign}fail{sign} parallel=fsdp (2 runs)" in said


def test_again_commands_are_quoted_for_a_shell() -> None:
    def words(overrides: str | None, **columns: str) -> str:
        return rerun_command({"overrides": overrides, "config_dir": None, "cwd": None, **columns})

    quoted = words("'model.options={a: 1, b: [2]}' ~fault 'seed=$(reboot)'", config_dir="my conf")
    assert shlex.split(quoted)[2:4] == ["--config-dir", "my conf"]
    assert shlex.split(quoted)[4:] == ["model.options={a: 1, b: [2]}", "~fault", "seed=$(reboot)"]
    assert shlex.split(words("parallel=ddp it's"))[2:] == ["parallel=ddp", "it's"], "not as a shell has it"
    assert words(None) == "dcpbench run"
    assert words("seed=1", cwd="/my models") == "cd '/my models' && dcpbench run seed=1"


@pytest.mark.slow
def test_closed_pipes_are_not_reported(matrix: Path) -> None:
    gone, ours = os.pipe()
    os.close(gone)
    ended = run_report(matrix, ours)
    os.close(ours)
    assert (ended.stderr, ended.returncode) == ("", 0)


def run_report(folder: Path, stdout: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "dcpbench", "report", str(folder), "--format", "table"]
    return subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


SEVERAL = ("model_equal", "optim_equal", "loss_resume_equal", "gradient_close")


def test_table_has_the_axes_that_vary(tmp_path: Path) -> None:
    sweep = folder_with(
        tmp_path / "s",
        row(model="even", model_equal=True, save_s=0.25),
        row(model="uneven", status="fail", model_equal=False),
        row(model="large", status="fail", model_equal=True, gradient_close=False, step_equal=False),
        row(model="both", status="fail", **dict.fromkeys(SEVERAL, False)),
    )
    table = summary(read_sweep(sweep).frame).table
    assert list(table["model"]) == ["uneven", "large", "both", "even"], "failed cells first"
    assert list(table["checks"]) == [
        "failed: model_equal",
        "training failed: gradient_close, +1",
        "failed: model_equal, +2; training failed: gradient_close",
        "1 passed",
    ]
    assert [names_failed_checks(text) for text in table["checks"]] == [True, True, True, False]
    assert list(table["save_s"]) == ["-", "-", "-", "0.250"]
    assert "optimizer" not in table


def test_integers_of_an_axis_with_a_null_stay_integers(tmp_path: Path) -> None:
    """Under pandas 2 they became 2.0, and a pivot had no cell of that number."""
    frame = read_sweep(
        folder_with(tmp_path / "s", row(load_world_size=2, save_s=1.0), row(load_world_size=None, save_s=3.0))
    ).frame
    assert set(summary(frame).table["load_world_size"]) == {"2", "-"}
    pivot = status_pivot(frame, pivot_axes(frame, ["load_world_size"])).table
    assert list(pivot["load_world_size"]) == ["2", "-"]


def test_injected_faults_have_a_separate_table(tmp_path: Path) -> None:
    def planted(fault: str, parallel: str, seen: bool | None, status: str, **more: bool) -> object:
        return row(fault=fault, parallel=parallel, fault_seen=seen, status=status, **more)

    sweep = folder_with(
        tmp_path / "s",
        planted("lr", "ddp", True, "fail", optim_equal=False),
        planted("lr", "fsdp", False, "pass", optim_equal=True),
        planted("file", "ddp", True, "error"),
        planted("file", "fsdp", None, "skip"),
        row(parallel="ddp"),
    )
    frame = read_sweep(sweep).frame
    table = detection(frame).set_index("fault")
    assert list(table.loc["lr", ["ddp", "fsdp", "detected", "detected by"]]) == [
        "fail",
        "NO",
        "1 of 2",
        "optim_equal",
    ]
    assert list(table.loc["file", ["ddp", "fsdp", "detected", "detected by"]]) == [
        "error",
        "-",
        "1 of 1",
        "error",
    ]
    assert list(table.loc["all of them", ["ddp", "fsdp", "detected"]]) == ["2 of 2", "0 of 1", "2 of 3"]
    assert list(failures(frame)["status"]) == ["pass", "skip"]
    assert counts(frame).endswith("2 of 3 faults detected")
    write_reports(sweep, None)
    assert "all of them" in (sweep / "report.html").read_text()
    assert detection(frame[frame["fault"].isna()]).empty
