"""How cells went over many sweeps: what is read, what is found in it, and what is shown of it."""

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from dcpbench.analysis.cell_history import KINDS, CellHistory, History, cell_histories, folded, history
from dcpbench.analysis.change_points import FALSE_ALARMS, LEAST_SIDE, changes
from dcpbench.analysis.history_rows import Rows, read_history
from dcpbench.records.row import Row
from dcpbench.records.store import RESULTS_CSV, RESULTS_JSONL, append_row, write_csv
from dcpbench.report.__main__ import main
from dcpbench.report.history import blocks, contents, default_metrics, strip_length
from dcpbench.report.rendering import rendered
from report.sweeps import cell, folder_with

NIGHTS = 24
METRICS = default_metrics()


def night(folder: Path, number: int, *rows: Row) -> Path:
    """A sweep of that night with these rows, as the driver leaves it."""
    then = {
        "started_at": f"2026-{10 + number // 30:02}-{1 + number % 30:02}T01:00:00+00:00",
        "git_commit": f"{0xABC0000 + number:x}".ljust(40, "0"),
        "torch_version": "2.13.0" if number < NIGHTS // 2 else "2.14.0",
    }
    sweep = folder_with(folder / f"night-{number:02}", *(replace(row, **then) for row in rows))
    write_csv(sweep)
    return sweep


def costs(random: np.random.Generator, factor: float = 1) -> dict[str, float]:
    return {name: float(0.1 * factor * np.exp(random.normal(0, 0.03))) for name in METRICS}


@pytest.fixture
def nights(tmp_path: Path) -> Path:
    """ddp fails in the last two nights; fsdp's load_s is 30 % more from the 12th on; hsdp is as ever."""
    random = np.random.default_rng(3)
    for number in range(NIGHTS):
        failed = {"status": "fail", "reason": "optim_equal: rank 1:\nnet.weight"}
        ddp = cell("ddp", **costs(random), **(failed if number >= NIGHTS - 2 else {}))
        slower = costs(random)
        slower["load_s"] *= 1.3 if number >= NIGHTS // 2 else 1
        night(tmp_path / "nights", number, ddp, cell("fsdp", **slower), cell("hsdp", **costs(random)))
    return tmp_path / "nights"


def found(folder: Path, **how: object) -> History:
    return history(read_history([folder], METRICS), METRICS, **how)  # type: ignore[arg-type]


def by_name(folder: Path) -> dict[str, CellHistory]:
    return {cell.name: cell for cell in cell_histories(found(folder))}


def letters(history_of: CellHistory) -> str:
    return "".join(KINDS[kind].letter for kind in history_of.kinds)


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main(["history", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_changed_last_comes_first_and_says_since_when(
    nights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, nights)
    assert lines[0] == "24 sweeps, 2026-10-01 to 2026-10-24"
    newest = "The newest, night-23, commit abc00160 → abc00170, torch 2.14.0"
    assert lines[1] == f"{newest}: 2 of 3 cells as they should be"
    ddp, fsdp = lines.index("parallel=ddp"), lines.index("parallel=fsdp")
    assert ddp < fsdp
    assert lines[ddp + 1].split() == ["status", "P" * 22 + "FF", "fail"]
    assert lines[ddp + 2].index("^") == lines[ddp + 1].index("F")
    assert lines[ddp + 6] == (
        "status: pass to fail since night-22, commit abc00150 → abc00160, torch 2.14.0; optim_equal: rank 1: "
        "net.weight"
    )
    load, arrow, text = lines[fsdp + 4 : fsdp + 7]
    assert load.split()[0] == "load_s"
    assert arrow.index("^") == load.index("load_s") + len("save_stall_s  ") + NIGHTS // 2
    assert text.startswith("load_s: +3")
    assert "since night-12, commit abc000b0 → abc000c0, torch 2.13.0 → 2.14.0, 0." in text
    assert "parallel=hsdp" not in lines
    assert "1 cell all along the same and ok, with steady costs: 1 pass (--all shows them)" in lines


def test_all_shows_also_what_is_as_ever(nights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "parallel=hsdp" in shown(capsys, nights, "--all")


def test_a_change_before_the_sweeps_shown_is_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        status = "error" if number == 2 else "pass"
        night(tmp_path, number, cell("ddp", status=status), cell("fsdp"))
    lines = shown(capsys, tmp_path)
    assert "parallel=ddp" in lines
    capsys.readouterr()
    assert main(["history", str(tmp_path), "--format", "table", "--last", "20"]) == 0
    assert "2 cells all along the same" in capsys.readouterr().out
    many = [CellHistory(0, "a", (0, *[12] * 999), 999, 1, KINDS[0], [], "")]
    assert folded(many, 50).earlier == many


def test_runs_of_a_cell_are_its_worst_status_and_its_median_cost(tmp_path: Path) -> None:
    ends = ["pass", "crash", "fail"]
    runs = [cell(repeat=n, status=end, reason=end, save_s=1.0 + n) for n, end in enumerate(ends)]
    night(tmp_path, 0, *runs)
    night(tmp_path, 1, *(cell(repeat=n, save_s=3.0 + n) for n in range(2)))
    (only,) = cell_histories(found(tmp_path))
    assert letters(only) == "CP"
    assert only.costs[0].medians.tolist() == [2.0, 3.5]
    assert found(tmp_path, last=1).reasons == [""]
    assert history(_only(tmp_path, 0), METRICS).reasons == ["crash"]


def _only(folder: Path, number: int) -> Rows:
    return read_history([folder / f"night-{number:02}"], METRICS)


def test_a_planted_fault_is_well_when_it_was_seen(tmp_path: Path) -> None:
    for number, seen in enumerate((True, True, False)):
        night(
            tmp_path,
            number,
            cell(fault="lr", status="fail", fault_seen=seen, overrides="parallel=ddp fault=lr"),
            cell("fsdp", flaky=number == 1),
        )
    histories = by_name(tmp_path)
    planted, flaky = histories["parallel=ddp fault=lr"], histories["parallel=fsdp fault=-"]
    assert (letters(planted), planted.now.ok, planted.before and planted.before.ok) == (
        "DDM",
        False,
        True,
    )
    assert (letters(flaky), flaky.now.ok) == ("P~P", True)


def test_cells_are_matched_by_axes_and_overrides_but_not_by_repeat(tmp_path: Path) -> None:
    night(tmp_path, 0, cell(overrides="parallel=ddp saves=1 parallel.tp=2"))
    night(tmp_path, 1, cell(overrides="parallel.tp=2 saves=1 parallel=ddp repeat=4 timeouts.cell_s=9"))
    night(tmp_path, 2, cell(overrides="parallel=ddp saves=2 parallel.tp=2"))
    assert {name: letters(one) for name, one in by_name(tmp_path).items()} == {
        "parallel=ddp parallel.tp=2 saves=1": "PP·",
        "parallel=ddp parallel.tp=2 saves=2": "··P",
    }
    night(tmp_path, 3, cell(overrides=" ".join(f"+model.options.width_{n}=1" for n in range(20))))
    assert max(name.count("width") for name in by_name(tmp_path)) == 20


def test_sweeps_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for folder, started_at in (("a", "2026-11-03"), ("b", "2026-11-01"), ("c", "2026-11-02")):
        write_csv(folder_with(tmp_path / folder, cell(started_at=started_at)))
    assert found(tmp_path).sweeps["name"].tolist() == ["b", "c", "a"]


def marked(sweep: Path) -> None:
    """Have the flat copy of a sweep tell other costs than its rows, to see which of them was read."""
    path = sweep / RESULTS_CSV
    path.write_text(path.read_text().replace(",0.25,", ",0.75,"))


def late(sweep: Path) -> None:
    os.utime(sweep / RESULTS_CSV, ns=(0, 0))


def missing(sweep: Path) -> None:
    (sweep / RESULTS_CSV).unlink()


def of_before(sweep: Path) -> None:
    """The copy of a folder whose driver was killed after it had gone on."""
    when = (sweep / RESULTS_CSV).stat().st_mtime_ns
    append_row(sweep, cell("hsdp", save_s=0.25))
    os.utime(sweep / RESULTS_JSONL, ns=(when, when))


def edited(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(sweep: Path) -> None:
        path = sweep / RESULTS_CSV
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))

    return change


def cut(sweep: Path) -> None:
    path = sweep / RESULTS_CSV
    path.write_bytes(path.read_bytes()[:-30])


def without_a_line(sweep: Path) -> None:
    path = sweep / RESULTS_CSV
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def header_alone(sweep: Path) -> None:
    path = sweep / RESULTS_CSV
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (late, "results.csv is older than results.jsonl"),
        (missing, "no results.csv"),
        (of_before, "results.csv does not end with the row that results.jsonl ends with"),
        (without_a_line, "results.csv does not end with the row"),
        (header_alone, "results.csv does not end with the row"),
        (cut, "results.csv is damaged"),
        (edited(b"save_load", b'"save_load'), "results.csv is damaged"),
        (edited(b"save_load", b"\0"), "results.csv is damaged"),
        (edited(b"save_load", b"\xff"), "results.csv is damaged"),
        (edited(b"0.75", b"no number"), "results.csv is damaged"),
        (edited(b"save_load,", b""), "results.csv is damaged"),
        (edited(b"save_load", b"save_load," * 60), "results.csv is damaged"),
        (edited(b"pass", b""), "results.csv is damaged"),
        (edited(b"cell,status", b"cell,cell"), "results.csv is damaged"),
        (edited(b"schema_version", b"schema"), "results.csv is damaged"),
    ],
)
def test_a_flat_copy_that_is_not_surely_the_same_is_not_read(
    damage: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    """And no other sweep is the worse for it."""
    for number in range(3):
        sweep = night(tmp_path, number, cell("ddp", save_s=0.25), cell("fsdp", save_s=0.25))
        marked(sweep)
        if number == 1:
            damage(sweep)
    rows = read_history([tmp_path], METRICS)
    (remark,) = rows.remarks
    assert remark.startswith(f"{tmp_path / 'night-01'}: {why}")
    assert "read from results.jsonl, which takes longer" in rows.remarks[0]
    made = history(rows, METRICS).costs["save_s"]
    assert made[:2].tolist() == [[0.75, 0.25, 0.75]] * 2


def test_both_files_tell_the_same(nights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["history", str(nights), "--format", "json", "--where", "compile=false", "--where", "parallel!=x"]
    assert main(asked) == 0
    flat = json.loads(capsys.readouterr().out)
    for path in nights.glob(f"*/{RESULTS_CSV}"):
        path.unlink()
    assert main(asked) == 0
    whole = json.loads(capsys.readouterr().out)
    assert [len(flat.pop("remarks")), len(whole.pop("remarks"))] == [0, 1]
    assert flat == whole
    assert [len(one["costs"]["load_s"]["changes"]) for one in flat["cells"]] == [0, 1, 0]


def test_older_rows_without_some_columns(tmp_path: Path) -> None:
    """Their copies have another header."""
    night(tmp_path, 1, cell(save_s=0.5, disk_bytes=7))
    old = night(tmp_path, 0, cell(save_s=0.25, schema_version=1))
    with (old / RESULTS_CSV).open(newline="") as read:
        lines = list(csv.reader(read))
    known = lines[0].index("schema_version") + 1
    lines = [line[:known] for line in lines]
    with (old / RESULTS_CSV).open("w", newline="") as out:
        csv.writer(out).writerows(lines)
    rows = read_history([tmp_path], ["save_s", "disk_bytes"])
    assert rows.remarks == []
    made = history(rows, ["save_s", "disk_bytes"])
    assert made.costs["save_s"].tolist() == [[0.25, 0.5]]
    assert np.array_equal(made.costs["disk_bytes"], [[np.nan, 7]], equal_nan=True)
    assert made.kinds.shape == (1, 2)


NOTHING_CHANGED = [(1, 10, 0), (1, 30, 0.1), (60, 30, 0), (9, 200, 0.2)]


def normal(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.normal(size=size)


def heavy(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_t(3, size)


def moody(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A night is like the one before."""
    drawn = random.normal(size=size)
    for number in range(1, size[1]):
        drawn[:, number] = 0.3 * drawn[:, number - 1] + 0.954 * drawn[:, number]
    return drawn


@pytest.mark.parametrize("noise", [normal, heavy, moody])
@pytest.mark.parametrize(("series", "sweeps", "missing"), NOTHING_CHANGED)
def test_where_nothing_changed_hardly_anything_is_told(
    series: int, sweeps: int, missing: float, noise: Callable[..., np.ndarray]
) -> None:
    """So seldom over all series together, whatever the noise is like."""
    random, alarms, times = np.random.default_rng(5), 0, 300
    for _ in range(times):
        values = np.exp(0.1 * noise(random, (series, sweeps)))
        values[random.random(values.shape) < missing] = np.nan
        alarms += any(changes(values))
    assert alarms / times <= FALSE_ALARMS + 2 * np.sqrt(FALSE_ALARMS / times)


@pytest.mark.parametrize("at", [10, 15, 20])
def test_a_step_is_found_where_it_is(at: int) -> None:
    """10 % at 3 % noise over 30 sweeps, in one of 60 series: in 90 of 100 histories, and not elsewhere."""
    random, found, within, elsewhere = np.random.default_rng(6), 0, 0, 0
    for _ in range(100):
        values = np.exp(0.03 * random.normal(size=(60, 30)))
        values[7, at:] *= 1.1
        made = changes(values)
        found += len(made[7]) == 1
        within += any(abs(change.at - at) <= 1 for change in made[7])
        elsewhere += any(made[:7] + made[8:])
    assert found >= 90
    assert within >= 85
    assert elsewhere <= 5


def test_steps_up_and_down_again_and_wild_values() -> None:
    random = np.random.default_rng(8)
    values = np.exp(0.03 * random.normal(size=(20, 300)))
    values[0, 100:200] *= 1.2
    values[1, 290:] *= 1.2
    values[2, [50, 51, 150, 298, 299]] *= 10
    values[3, 150:] *= 1.03
    made = changes(values)
    assert [round(change.at, -1) for change in made[0]] == [100, 200]
    assert [round(change.ratio, 1) for change in made[0]] == [1.2, 0.8]
    assert [change.at for change in made[1]] == [290]
    assert made[2:] == [[]] * 18


@pytest.mark.parametrize(
    "values", [np.empty((0, 30)), np.empty((3, 0)), np.ones((2, 30)), np.full((2, 9), np.nan)]
)
def test_nothing_to_find(values: np.ndarray) -> None:
    assert changes(values) == [[]] * len(values)


def test_what_is_not_positive_was_not_measured() -> None:
    values = np.where(np.arange(40) < 20, 1.0, 2.0)[None] * np.exp(
        0.01 * np.random.default_rng(9).normal(size=40)
    )
    values[0, [3, 25]] = 0
    ((change,),) = changes(values)
    assert (change.at, round(change.ratio)) == (20, 2)
    assert not any(changes(values[:, : 2 * LEAST_SIDE]))


def test_one_sweep_is_no_history_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night(tmp_path, 0, cell(save_s=0.25))
    lines = shown(capsys, tmp_path)
    assert lines[4].split() == ["status", "P", "pass"]
    assert "One sweep: there is no history yet; the next one in this folder starts it." in lines


def test_sweeps_without_a_common_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night(tmp_path, 0, cell("ddp"))
    night(tmp_path, 1, cell("fsdp"))
    said = shown(capsys, tmp_path)
    assert any(line.startswith("No cell is in more than one sweep") for line in said)
    assert "1 cell not in the newest sweep, last in night-00, commit abc00000, torch 2.13.0" in said


@pytest.mark.parametrize(
    ("arguments", "told_of"),
    [
        (["empty"], "no sweep here, nor in a folder of it"),
        (["nights", "--where", "parallel=none"], "no row of 72 in 24 sweeps meets every --where"),
        (["nights", "--metric", "cell"], "cell is no number"),
        (["nights", "--where", "nonsense"], "expected a column"),
        (["nights", "-o", "history.html"], "say with --format what to write"),
        (["nights", "-o", "nowhere/history.md"], "cannot be written"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    arguments: Sequence[str],
    told_of: str,
    nights: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(nights.parent)
    Path("empty").mkdir()
    assert main(["history", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told_of in err


def test_sweeps_without_rows_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / RESULTS_JSONL).touch()
    assert main(["history", str(tmp_path)]) == 2
    assert "no rows" in capsys.readouterr().err


def test_a_damaged_line_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        night(tmp_path, number, cell())
    with (tmp_path / "night-01" / RESULTS_JSONL).open("a") as rows:
        rows.write('{"cell": "torn')
    said = "\n".join(shown(capsys, tmp_path))
    assert "2 sweeps" in said
    assert "not a whole row, broken off" in " ".join(said.split())


def test_some_of_the_rows_the_sweeps_and_the_costs(nights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [nights, "--where", "parallel~dp", "--where", "sweep!=night-23", "--last", "5"]
    said = json.loads("\n".join(shown(capsys, *asked, "--metric", "load_s,cell_s", "--format", "json")))
    assert [sweep["name"] for sweep in said["sweeps"]] == [f"night-{n}" for n in range(18, 23)]
    assert {one["statuses"] for one in said["cells"]} == {"PPPPF", "PPPPP"}
    assert [list(one["costs"]) for one in said["cells"]] == [["load_s", "cell_s"]] * 3
    assert said["cells"][0]["since"] == 4
    assert said["cells"][0]["reason"].startswith("optim_equal")


def test_written_to_a_file(nights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("md", "txt", "json"):
        assert shown(capsys, nights, "-o", tmp_path / f"history.{suffix}") == []
    written = (tmp_path / "history.md").read_text()
    assert (
        "| parallel=ddp | status | `PPPPPPPPPPPPPPPPPPPPPPFF` | fail | pass to fail since night-22" in written
    )
    assert (tmp_path / "history.txt").read_text().splitlines() == shown(capsys, nights)
    assert json.loads((tmp_path / "history.json").read_text())["statuses"]["F"] == {
        "label": "fail",
        "ok": False,
    }


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_lines_fit_the_terminal(width: int, nights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    history_of, remarks = found(nights), ["a remark of some words " * 9]
    cells = cell_histories(history_of)
    for part in contents(history_of, cells, remarks, True, strip_length(history_of, cells, width)):
        for line in rendered(part, Terminal()).splitlines():
            assert len(Text.from_ansi(line).plain.rstrip()) <= width, line


def test_noise_is_drawn_low_and_what_is_missing_is_a_space() -> None:
    drawn = blocks(np.array([1.0, 1.05, np.nan, 1.1]))
    assert drawn[0] == "▁"
    assert drawn[2] == " "
    assert max(drawn) < "▅"
    assert blocks(np.array([1.0, 2.0, 4.0]))[0::2] == "▁█"
    assert blocks(np.array([np.nan])) == " "


def test_another_configuration_is_another_cell_from_then_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its costs are no change of the cell before, and what was edited is named."""
    random = np.random.default_rng(4)
    for number in range(NIGHTS):
        edited = number >= NIGHTS // 2
        config = {"parallel": "ddp", "model.options.sizes": "[3, 8]" if edited else "[3, 4]"}
        rows = [cell(config=config, config_digest=str(edited), **costs(random, 1.5 if edited else 1))]
        night(tmp_path, number, *rows, cell("fsdp", **costs(random)))
    text = json.loads("\n".join(shown(capsys, tmp_path, "--format", "json")))
    assert [one["statuses"] for one in text["cells"]] == ["·" * 12 + "P" * 12, "P" * 12 + "·" * 12, "P" * 24]
    assert [one["costs"]["save_s"]["changes"] for one in text["cells"]] == [[], [], []]
    assert text["cells"][0]["reconfigured"] == {
        "at": 12,
        "keys": {"model.options.sizes": ["[3, 4]", "[3, 8]"]},
    }
    assert [one["reconfigured"] for one in text["cells"][1:]] == [None, None]
    lines = shown(capsys, tmp_path)
    assert lines.count("parallel=ddp") == 1, "and the cell before is no news"
    named = "other configuration since night-12, commit abc000b0 → abc000c0, torch 2.13.0 → 2.14.0: "
    assert any(f"status: {named}model.options.sizes: [3, 4] → [3, 8]" in line for line in lines)
    assert any(line.startswith("1 cell with a configuration that was replaced since") for line in lines)
    assert "parallel=ddp (configuration until night-11)" in shown(capsys, tmp_path, "--all")
    for path in tmp_path.glob(f"*/{RESULTS_CSV}"):
        path.unlink()
    again = json.loads("\n".join(shown(capsys, tmp_path, "--format", "json")))
    assert again["cells"] == text["cells"]


def test_a_history_goes_on_from_rows_of_version_1(tmp_path: Path) -> None:
    """They have no digest that compares: it is their address that counts."""
    for number in range(4):
        old = {"schema_version": 1, "config_digest": "of then", "checkpointer": None} if number < 2 else {}
        quote = "" if number < 2 else "'"
        night(
            tmp_path, number, cell(overrides=f"parallel=ddp {quote}+model.sizes=[3, 4]{quote} seed=0", **old)
        )
    assert {name: letters(one) for name, one in by_name(tmp_path).items()} == {"parallel=ddp": "PPPP"}
    (tmp_path / "night-01" / RESULTS_CSV).unlink()
    assert {name: letters(one) for name, one in by_name(tmp_path).items()} == {"parallel=ddp": "PPPP"}
