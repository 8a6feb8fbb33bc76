"""Histories of cells over many sweeps: changes, and how they are shown."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from conftest import Command
from dcpbench.analysis.cell_history import KINDS, CellHistory, History, group_by_display, history
from dcpbench.analysis.frame import Sweeps, read_sweeps
from dcpbench.records.row import Row
from dcpbench.report.document import render
from dcpbench.report.history import contents, default_metrics, sparkline, strip_length
from report.sweeps import Terminal, cell, folder_with

NIGHTS = 24
METRICS = default_metrics()


def night(folder: Path, number: int, *rows: Row) -> Path:
    """A sweep of that night with these rows, as the driver leaves it."""
    then = {
        "started_at": f"2026-{10 + number // 30:02}-{1 + number % 30:02}T01:00:00+00:00",
        "dcpbench_commit": f"{0xABC0000 + number:x}".ljust(40, "0"),
        "torch_version": "2.13.0" if number < NIGHTS // 2 else "2.14.0",
    }
    return folder_with(folder / f"night-{number:02}", *(replace(row, **then) for row in rows))


def costs(random: np.random.Generator, factor: float = 1) -> dict[str, float]:
    return {name: float(0.1 * factor * np.exp(random.normal(0, 0.03))) for name in METRICS}


def three_cells(folder: Path) -> Path:
    """ddp fails in the last two nights; fsdp's load_s is 30 % more from the 12th on; hsdp is as ever."""
    random = np.random.default_rng(3)
    for number in range(NIGHTS):
        failed = {"status": "fail", "reason": "optim_equal: rank 1:\nnet.weight"}
        ddp = cell("ddp", **costs(random), **(failed if number >= NIGHTS - 2 else {}))
        slower = costs(random)
        slower["load_s"] *= 1.3 if number >= NIGHTS // 2 else 1
        night(folder, number, ddp, cell("fsdp", **slower), cell("hsdp", **costs(random)))
    return folder


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_cells(tmp_path_factory.mktemp("history") / "nights")


def found(folder: Path, **how: object) -> History:
    return history(read_sweeps([folder], details=False), METRICS, **how)  # type: ignore[arg-type]


def by_name(folder: Path) -> dict[str, CellHistory]:
    return {cell.name: cell for cell in found(folder).cells}


def letters(history_of: CellHistory) -> str:
    return "".join(KINDS[kind].letter for kind in history_of.kinds)


def test_times_of_shared_gpus_stay_apart(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    for number in range(12):
        shared = {"ranks_per_gpu": 4, "backend": "nccl"} if number % 2 else {}
        night(tmp_path, number, cell("ddp", **costs(random, 5 if shared else 1), **shared))
    (of_ddp,) = found(tmp_path).cells
    assert letters(of_ddp) == "P" * 12
    for cost in of_ddp.costs:
        assert np.isnan(cost.medians).tolist() == [True, False] * 6, "the newest night shared"
        assert cost.changes == []


def test_newest_changes_come_first(nights: Path, command: Command) -> None:
    lines = command("history", nights).out.splitlines()
    assert lines[0] == "24 sweeps, 2026-10-01 to 2026-10-24"
    newest = "The newest, night-23, dcpbench abc00160 → abc00170, torch 2.14.0"
    assert lines[1] == f"{newest}: 2 of 3 cells as expected"
    ddp, fsdp = lines.index("parallel=ddp"), lines.index("parallel=fsdp")
    assert ddp < fsdp
    assert lines[ddp + 1].split() == ["status", "P" * 22 + "FF", "fail"]
    assert lines[ddp + 2].index("^") == lines[ddp + 1].index("F")
    assert lines[ddp + 6] == (
        "status: pass to fail since night-22, dcpbench abc00150 → abc00160, torch 2.14.0; optim_equal: "
        "rank 1: net.weight"
    )
    text = next(line for line in lines[fsdp:] if line.startswith("load_s: +3"))
    assert "since night-12, dcpbench abc000b0 → abc000c0, torch 2.13.0 → 2.14.0, 0." in text
    assert "parallel=hsdp" not in lines
    assert "1 cell unchanged and ok, with steady costs: 1 pass (--all lists them)" in lines
    assert "parallel=hsdp" in command("history", nights, "--all").out.splitlines()


def test_commit_is_that_of_the_users_targets(tmp_path: Path, command: Command) -> None:
    """dcpbench's is named so, where there is no target or it changed too."""
    yours = {"target_commit": "1" * 40}, {"target_commit": f"{'2' * 40}-dirty, gpt 1.1"}
    both = cell("ddp", target_commit="2" * 40 + "-dirty"), cell("fsdp", target_commit="gpt 1.1"), cell("hsdp")
    night(tmp_path, 0, cell("ddp", **yours[0]), cell("fsdp"))
    night(tmp_path, 1, *both)
    night(tmp_path, 2, cell("ddp", status="fail", reason="wrong", **yours[1]))
    path = tmp_path / "night-02/results.jsonl"
    path.write_text(path.read_text().replace("abc00020", "abc00010"))
    lines = command("history", tmp_path).out.splitlines()
    commit = "commit 22222222-dirty, gpt 1.1"
    assert lines[1].startswith(f"The newest, night-02, {commit}, torch 2.13.0: 0 of 1 cells")
    assert any(f"pass to fail since night-02, {commit}, torch 2.13.0; wrong" in line for line in lines)
    last = "last in night-01, commit 11111111 → 22222222-dirty, gpt 1.1, dcpbench abc00000 → abc00010, torch"
    assert any(f"2 cells not in the newest sweep, {last}" in line for line in lines)
    told = command("history", tmp_path, "--format", "json").json()["sweeps"]
    assert [one["target_commit"] for one in told] == ["1" * 40, *[yours[1]["target_commit"]] * 2]


def test_reason_is_printed_once_a_kind(tmp_path: Path, command: Command) -> None:
    for number in range(2):
        reasons = {"ddp": "lost 1 of 3", "fsdp": "lost 2 of 3", "hsdp": "another"} if number else {}
        ends = {name: {"status": "fail", "reason": reason} for name, reason in reasons.items()}
        night(tmp_path, number, *(cell(name, **ends.get(name, {})) for name in ("ddp", "fsdp", "hsdp")))
    text = " ".join(command("history", tmp_path).lines)
    assert (text.count("lost 1 of 3"), text.count("another"), text.count("reason as above")) == (1, 1, 1)
    assert "lost 2 of 3" not in text


def test_earlier_changes_are_summarized(tmp_path: Path, command: Command) -> None:
    for number in range(12):
        status = "error" if number == 2 else "pass"
        night(tmp_path, number, cell("ddp", status=status), cell("fsdp"))
    lines = command("history", tmp_path).out.splitlines()
    assert "parallel=ddp" in lines
    few = command("history", tmp_path, "--format", "table", "--last", "6").out
    assert "2 cells unchanged and ok" in few
    many = [CellHistory("a", {}, (0, *[12] * 999), [])]
    assert group_by_display(many, 50)["earlier"] == many


def test_runs_have_worst_status_and_median_cost(tmp_path: Path) -> None:
    ends = ["pass", "crash", "fail"]
    runs = [cell(repeat=n, status=end, reason=end, save_s=1.0 + n) for n, end in enumerate(ends)]
    night(tmp_path, 0, *runs)
    night(tmp_path, 1, *(cell(repeat=n, save_s=3.0 + n) for n in range(2)))
    (only,) = found(tmp_path).cells
    assert letters(only) == "CP"
    assert only.costs[0].medians.tolist() == [2.0, 3.5]
    assert [one.reason for one in found(tmp_path, last=1).cells] == [""]
    assert [one.reason for one in history(_only(tmp_path, 0), METRICS).cells] == ["crash"]


def _only(folder: Path, number: int) -> Sweeps:
    return read_sweeps([folder / f"night-{number:02}"], details=False)


def test_detected_faults_pass(tmp_path: Path) -> None:
    for number, seen in enumerate((True, True, False)):
        night(
            tmp_path,
            number,
            cell(fault="lr", status="fail", fault_seen=seen, overrides="parallel=ddp fault=lr"),
            cell("fsdp", flaky=number == 1),
        )
    histories = by_name(tmp_path)
    planted, flaky = histories["parallel=ddp fault=lr"], histories["parallel=fsdp"]
    assert (
        letters(planted),
        planted.current_status.ok,
        planted.last_change_of_status and planted.last_change_of_status[1].ok,
    ) == ("DDM", False, True)
    assert (letters(flaky), flaky.current_status.ok) == ("P~P", True)


def test_cells_are_matched_without_their_repeat(tmp_path: Path) -> None:
    night(tmp_path, 0, cell(overrides="parallel=ddp saves=1 parallel.tp=2"))
    night(tmp_path, 1, cell(overrides="parallel.tp=2 saves=1 parallel=ddp repeat=4 timeouts.cell_s=9"))
    night(tmp_path, 2, cell(overrides="parallel=ddp saves=2 parallel.tp=2"))
    assert {name: letters(one) for name, one in by_name(tmp_path).items()} == {
        "parallel=ddp saves=1": "PP·",
        "parallel=ddp saves=2": "··P",
    }
    night(tmp_path, 3, cell(overrides=" ".join(f"+model.options.width_{n}=1" for n in range(20))))
    assert max(name.count("width") for name in by_name(tmp_path)) == 20


def test_one_sweep_is_not_a_history(tmp_path: Path, command: Command) -> None:
    night(tmp_path, 0, cell(save_s=0.25))
    lines = command("history", tmp_path).out.splitlines()
    assert lines[4].split() == ["status", "P", "pass"]
    assert "One sweep: a history needs at least two in this folder." in lines


def test_sweeps_without_a_common_cell(tmp_path: Path, command: Command) -> None:
    night(tmp_path, 0, cell("ddp"))
    night(tmp_path, 1, cell("fsdp"))
    said = command("history", tmp_path).out.splitlines()
    assert any(line.startswith("No cell is in more than one sweep") for line in said)
    assert "1 cell not in the newest sweep, last in night-00, dcpbench abc00000, torch 2.13.0" in said


def test_history_options_select_rows_and_costs(nights: Path, command: Command) -> None:
    asked = [nights, "--where", "parallel~dp", "--where", "sweep!=night-23", "--last", "5"]
    said = command("history", *asked, "--metric", "load_s,cell_s", "--format", "json").json()
    assert [sweep["name"] for sweep in said["sweeps"]] == [f"night-{n}" for n in range(18, 23)]
    assert {one["statuses"] for one in said["cells"]} == {"PPPPF", "PPPPP"}
    assert [list(one["costs"]) for one in said["cells"]] == [["load_s", "cell_s"]] * 3
    assert said["cells"][0]["since"] == 4
    assert said["cells"][0]["reason"].startswith("optim_equal")


def test_history_is_written_to_a_file(nights: Path, tmp_path: Path, command: Command) -> None:
    for suffix in ("md", "json"):
        assert command("history", nights, "-o", tmp_path / f"history.{suffix}").out.splitlines() == []
    written = (tmp_path / "history.md").read_text()
    assert (
        "| parallel=ddp | status | `PPPPPPPPPPPPPPPPPPPPPPFF` | fail | pass to fail since night-22" in written
    )
    assert json.loads((tmp_path / "history.json").read_text())["statuses"]["F"] == {
        "label": "fail",
        "ok": False,
    }


def test_history_lines_fit_the_terminal(nights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    history_of, remarks = found(nights), ["a remark of some words " * 9]
    for width in (40, 80, 100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        for part in contents(history_of, remarks, True, strip_length(history_of, width)):
            for line in render(part, Terminal()).splitlines():
                assert len(Text.from_ansi(line).plain.rstrip()) <= width, line


def test_blocks_show_noise_small_and_gaps_blank() -> None:
    drawn = sparkline(np.array([1.0, 1.05, np.nan, 1.1]))
    assert drawn[0] == "▁"
    assert drawn[2] == " "
    assert max(drawn) < "▅"
    assert sparkline(np.array([1.0, 2.0, 4.0]))[0::2] == "▁█"
    assert sparkline(np.array([np.nan])) == " "


def test_new_configurations_are_new_cells(tmp_path: Path, command: Command) -> None:
    """Its costs are not a change of the cell before, and the edited key is named."""
    random = np.random.default_rng(4)
    for number in range(12):
        edited = number >= 6
        config = {"parallel": "ddp", "model.options.sizes": "[3, 8]" if edited else "[3, 4]"}
        rows = [cell(config=config, config_digest=str(edited), **costs(random, 1.5 if edited else 1))]
        night(tmp_path, number, *rows, cell("fsdp", **costs(random)))
    text = command("history", tmp_path, "--format", "json").json()
    assert [one["statuses"] for one in text["cells"]] == ["·" * 6 + "P" * 6, "P" * 6 + "·" * 6, "P" * 12]
    assert [one["costs"]["save_s"]["changes"] for one in text["cells"]] == [[], [], []]
    assert text["cells"][0]["reconfigured"] == {
        "at": 6,
        "keys": {"model.options.sizes": ["[3, 4]", "[3, 8]"]},
    }
    assert [one["reconfigured"] for one in text["cells"][1:]] == [None, None]
    lines = command("history", tmp_path).out.splitlines()
    assert lines.count("parallel=ddp") == 1, "and the cell before is not reported"
    named = "other configuration since night-06, dcpbench abc00050 → abc00060, torch 2.13.0: "
    assert any(f"status: {named}model.options.sizes: [3, 4] → [3, 8]" in line for line in lines)
    assert any(line.startswith("1 cell with a configuration that was replaced later") for line in lines)
    assert (
        "parallel=ddp (configuration until night-05)"
        in command("history", tmp_path, "--all").out.splitlines()
    )


def test_sweeps_are_ordered_by_their_start(tmp_path: Path) -> None:
    for folder, started_at in (("a", "2026-11-03"), ("b", "2026-11-01"), ("c", "2026-11-02")):
        folder_with(tmp_path / folder, cell(started_at=started_at))
    assert history(read_sweeps([tmp_path], details=False), METRICS).sweeps["name"].tolist() == ["b", "c", "a"]
