"""Reports in a terminal: short lines, and tables that fit."""

import io
import re
from pathlib import Path

import pandas as pd
import pytest

from dcpbench.analysis.frame import read_sweeps
from dcpbench.records.row import Row
from dcpbench.report.document import Content, Table, render
from dcpbench.report.show import report_content
from report.sweeps import Terminal, cell, folder_with


@pytest.mark.parametrize("width", [80, 120])
def test_narrow_terminals_keep_status_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    broken = dict.fromkeys(("optim_equal", "loss_resume_equal"), False)
    costs = {"save_s": 1.0, "save_stall_s": 1.0, "load_s": 1.0, "cell_s": 1.0, "raw_write_s": 1.0}
    rows = [
        cell(
            "fsdp2_tp",
            "async",
            repeat,
            overrides=f"experiment=x saves={saves} +a.b={'long_value' * saves} repeat={repeat}",
            **more,
            **costs,
        )
        for repeat in (0, 1)
        for saves, more in (
            (1, {"model_equal": True}),
            (2, {"status": "fail", **broken}),
            (3, {"status": "xfail", "reason": "known failure x: y", **broken}),
        )
    ]
    for name, value in {"COLUMNS": str(width), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    said = render(report_content(read_sweeps([folder_with(tmp_path / "s", *rows)])), Terminal())
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in said.splitlines()]
    assert max(len(line.rstrip()) for line in lines if "again: " not in line) <= width
    fails = next(line for line in lines if " fail " in line)
    assert lines[-1].startswith("3 cells in 6 runs")
    assert "failed: optim_equal, +1 " in fails
    assert "saves=2" in fails
    assert "+a.b=long_valuelong_value" in " ".join(lines).split(), "words are not broken"
    left_out = " ".join(lines[1 : lines.index("")]).partition("not shown")[2].partition(": ")[2]
    assert [name for name in costs if name not in lines[1].split()] == left_out.replace(",", "").split()
    assert (left_out == "") is (width == 120)
    assert lines[0] == "all cells: parallel=fsdp2_tp compile=false save=async experiment=x"
    order = [re.findall(r"saves=\d|xfail|fail|pass", line)[:2] for line in lines if "saves=" in line][:3]
    assert order == [["saves=2", "fail"], ["saves=1", "pass"], ["saves=3", "xfail"]], "failed cells first"
    causes = lines.index(next(line for line in lines if line.startswith("    likely: The optimizer was")))
    assert width == 120 or lines[causes + 1].startswith("    "), "a longer sentence stays indented"
    assert "\x1b[1;31mfailed: optim" in said
    assert "\x1b[33mfailed: optim" in said, "a known failure is not red"


def test_axes_that_do_not_fit_are_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"scenario": "save_load", "parallel": "fsdp2_tp", "save": "async_cached", "storage": "-"}
    reason = f"a sentence and a word {'w' * 40}"
    cells = pd.DataFrame(
        [{**axes, "overrides": "saves=1 train_steps=12", "would": "skip", "because": reason}]
    )
    shown = Content([Table("", cells, folded=("overrides", "because"))])
    for name, value in {"COLUMNS": "60", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    head, *lines = (re.sub(r"\x1b\[[\d;]*m", "", line) for line in render(shown, Terminal()).splitlines())
    assert head.split() == ["cell", "would", "because"]
    assert max(map(len, lines)) <= 60
    words = "".join(line[: head.index("would")] for line in lines).split()
    assert words == [*(f"{name}={axes[name]}" for name in [*axes][:3]), "saves=1", "train_steps=12"]
    assert "w" * 40 in "".join(line[head.index("because") :] for line in lines)
    monkeypatch.setenv("COLUMNS", "140")
    assert all(name in render(shown, Terminal()).splitlines()[0] for name in cells)


def test_equal_failures_are_one_line(tmp_path: Path) -> None:
    def failed(seed: int, distance: float) -> Row:
        worst = {"name": "net.weight", "problem": "differs", "max_abs_diff": distance, "rank": 1}
        seen = {"worst": [worst], "mismatch_count": 4}
        reason = f"optim_equal: rank 1: net.weight: it is {distance} apart, and more that is long"
        checks = {"optim_equal": False, "extra_equal": False, "details": {"checks": {"optim_equal": seen}}}
        return cell(seed=seed, cell=f"seed={seed}", status="fail", reason=reason, **checks)

    folder = folder_with(tmp_path / "s", *(failed(seed, 0.5 + seed) for seed in range(3)))
    told = [
        line for line in render(report_content(read_sweeps([folder])), io.StringIO()).splitlines() if line
    ]
    assert not [line for line in told if line.endswith(" ")], "a file has no blanks at the end of lines"
    assert told[-6] == (
        "fail parallel=ddp seed=0 (and 2 more like it): "
        "optim_equal: net.weight differs by 0.5, rank 1 (+3 more), also extra_equal"
    )
    assert told[-5].startswith("    likely: The optimizer was restored wrongly: look for ")
    assert told[-4].startswith("    likely: Other state was not restored")
    assert told[-3] == "    again: dcpbench run parallel=ddp save=sync"
    assert told[-2].startswith("in full: report.html, dcpbench show FOLDER CELL; logs: ")
