"""A sweep that several drivers run, each a part of it (`part=1/2`): in one folder, read as one sweep."""

import itertools
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from conftest import SMALL, Finished, dcpbench, run, start, words_of
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.core.metrics import Measurement
from dcpbench.records.store import append_measurements, append_row, stored_rows, write_json
from dcpbench.sweep.folder import manifest, parts
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.plan.part import Part
from support.rows import row

ASKED = ("-m", *SMALL, "device=cpu", "parallel=none", "world_size=1", "saves=1", "seed=1,2", "repeats=2")


def _of_part(part: str, folder: Path, *more: str) -> Finished:
    """A part that has ended; its rows are those of its own folder."""
    ended = run(folder, *ASKED, f"part={part}", *more)
    return Finished(ended.status, ended.out, ended.err, _folder(part, folder))


def _folder(part: str, whole: Path) -> Path:
    return whole / f"{whole.name}-part-{part.replace('/', '-of-')}"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, list[Finished]]:
    """A sweep in two parts at the same time, and the parts."""
    folder = tmp_path_factory.mktemp("parts") / "night"
    named = ("1/2", "2/2")
    drivers = [start(*words_of(folder, *ASKED, f"part={part}"), cwd=folder.parent) for part in named]
    told = [driver.communicate(240) for driver in drivers]
    parts = [
        Finished(int(driver.returncode or 0), out, err, _folder(part, folder))
        for part, driver, (out, err) in zip(named, drivers, told, strict=True)
    ]
    return Finished(0, "", "", folder), parts


def test_every_cell_is_run_once_and_the_whole_sweep_has_its_row(
    two: tuple[Finished, list[Finished]],
) -> None:
    whole, parts = two
    assert [part.status for part in parts] == [0, 0], [part.err for part in parts]
    asked = json.loads((whole.folder / "sweep.json").read_text())["cells"]
    assert [row["cell"] for row in whole.rows] == asked
    rows = {row["cell"]: row for part in parts for row in part.rows}
    assert len(rows) == sum(len(part.rows) for part in parts) == 4
    assert whole.rows == [rows[cell] for cell in asked]
    # One cell each, with both of its runs.
    assert [len(part.rows) for part in parts] == [2, 2]
    for part in parts:
        assert set(Counter(row["seed"] for row in part.rows).values()) == {2}
    last = [part.err for part in parts if f"4 of 4 cells of {whole.folder} have a row" in part.err]
    assert last, [part.err for part in parts]


def test_the_whole_sweep_is_read_as_one(two: tuple[Finished, list[Finished]]) -> None:
    whole, parts = two
    report = dcpbench("report", str(whole.folder), folder=whole.folder)
    assert "2 cells in 4 runs: 4 pass" in report.out
    assert "sweeps" not in report.out
    lines = [(part.folder / "measurements.jsonl").read_text().splitlines() for part in parts]
    together = (whole.folder / "measurements.jsonl").read_text().splitlines()
    assert Counter(together) == Counter([line for part in lines for line in part])
    history = dcpbench("history", str(whole.folder.parent), folder=whole.folder)
    assert "1 sweep," in history.out
    known = json.loads((whole.folder / "environment.json").read_text())
    assert known["torch"] == whole.rows[0]["torch_version"]


def test_cells_of_a_part_that_never_ran_are_known_and_it_begins_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "night"
    first = _of_part("1/2", folder)
    whole = Finished(0, "", "", folder)
    assert f"part=1/2: {len(first.rows)} of 4 cells of {folder} have a row" in first.err
    assert whole.rows == first.rows
    owed = {*json.loads((folder / "sweep.json").read_text())["cells"]} - {row["cell"] for row in first.rows}
    report = dcpbench("report", str(folder), folder=folder)
    assert f"{folder}: {len(owed)} of 4 cells have no row" in report.err
    second = dcpbench(f"resume={folder}", "part=2/2", "rerun=failed", folder=folder)
    assert second.status == 0, second.err
    assert f"part=2/2: 4 of 4 cells of {folder} have a row" in second.err
    assert [row for row in whole.rows if row["cell"] in {one["cell"] for one in first.rows}] == first.rows


def test_rows_of_a_part_that_was_killed_are_taken_in_when_the_sweep_goes_on(
    two: tuple[Finished, list[Finished]], tmp_path: Path
) -> None:
    folder = tmp_path / "night"
    shutil.copytree(two[0].folder, folder)
    shutil.rmtree(_folder("2/2", folder))
    for path in folder.glob("results.*"):  # as if it had come to no end
        path.unlink()
    before = Finished(0, "", "", _folder("1/2", folder)).rows
    planned = dcpbench(f"resume={folder}", "plan=true", folder=folder)
    assert f"{len(before)} are done" in planned.out
    assert not (folder / "results.jsonl").exists()
    ended = dcpbench(f"resume={folder}", folder=folder)
    assert ended.status == 0, ended.err
    assert f"resume: {len(before)} of 4 cells are done" in ended.err
    assert len(ended.rows) == 4
    assert [row for row in ended.rows if row["cell"] in {one["cell"] for one in before}] == before
    # The part, gone on with, leaves what was run since.
    again = dcpbench(f"resume={folder}", "part=1/2", folder=folder)
    assert (again.status, again.rows) == (0, ended.rows), again.err


def test_of_each_cell_the_newest_row_is_taken_in_and_none_is_lost(tmp_path: Path) -> None:
    """Part 1 died while it wrote a row; the whole sweep was gone on with, and part 2 once more after that."""
    whole = tmp_path / "night"
    one, two = (_made(_folder(part, whole), ["a", "b", "c"]) for part in ("1/2", "2/2"))
    _made(whole, ["a", "b", "c", "d"])
    _measured(one, "a", 1)
    _measured(whole, "a", 2)
    before = _measured(whole, "b", 3)
    _measured(two, "b", 4)
    with (one / "results.jsonl").open("ab") as out:
        out.write(b'{"cell": "c", "stat')
    parts.take_in(whole)
    rows = [*stored_rows(whole)]
    assert [(row.cell, row.started_at) for row in rows] == [("a", _at(2)), ("b", _at(4))]
    measured = [json.loads(line) for line in (whole / "measurements.jsonl").read_text().splitlines()]
    assert [(one["cell"], one["value"]) for one in measured] == [("b", 4.0), ("a", 2.0)]
    assert (whole / "superseded.jsonl").read_bytes() == before
    known = json.loads((whole / "environment.json").read_text())
    assert [known["host"], known["earlier"]] == [one.name, [{"host": two.name}, {"host": "night"}]]
    parts.take_in(whole)
    assert [*stored_rows(whole)] == rows
    assert json.loads((whole / "environment.json").read_text()) == known


def _made(folder: Path, cells: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    manifest.Record([], "/", cells, []).write(folder)
    write_json(folder / "environment.json", {"host": folder.name})
    return folder


def _measured(folder: Path, cell: str, second: int) -> bytes:
    """Give a sweep a row, and a measurement, of this second; the row's line."""
    one = row(cell=cell, started_at=_at(second))
    append_measurements(folder, one, [Measurement("save_s", float(second), 0)])
    return append_row(folder, one)


def _at(second: int) -> str:
    return f"2026-11-23T00:00:{second:02}+00:00"


def test_a_part_begins_in_the_folder_of_its_own_sweep_alone(tmp_path: Path) -> None:
    whole = tmp_path / "night"
    record = manifest.Record([], "/", ["a", "b"], [])
    for _ in range(2):  # the second time as if the first driver had been killed before its part began
        parts.begin(_folder("1/2", whole), record)
    assert manifest.read(whole).cells == ["a", "b"]
    with pytest.raises(ConfigError, match=r"hydra.sweep.dir=.*/night: is another matrix: it has no cell c"):
        parts.begin(_folder("1/2", whole), replace(record, cells=["a", "b", "c"]))
    with manifest.held(_made(_folder("1/2", whole), ["a"])), pytest.raises(ConfigError, match="at work in"):
        parts.take_in(whole)
    with pytest.raises(ConfigError, match=r"has 2 and 3 parts; choose one number"):
        parts.begin(_folder("1/3", whole), record)


def test_parts_that_end_at_the_same_moment_wait_for_each_other(tmp_path: Path) -> None:
    def ends(_: int) -> None:
        with manifest.held(tmp_path, parts.WAIT_S):
            pass

    (tmp_path / "sweep.json").touch()
    with ThreadPoolExecutor(4) as drivers:
        with manifest.held(tmp_path):
            others = [drivers.submit(ends, number) for number in range(4)]
            assert wait(others, timeout=0.2).done == set()
        assert [other.result() for other in others] == [None] * 4


def test_a_plan_of_a_part_is_of_its_cells_and_writes_nothing(tmp_path: Path) -> None:
    blocks = '+hydra.sweeper.matrix={first:{seed:"1,2,3"},second:{seed:"4,5"}}'
    counts: Counter[str] = Counter()
    for part in ("1/2", "2/2"):
        words = ("parallel=none", "world_size=1", "device=cpu", blocks, f"part={part}")
        planned = run(tmp_path / "night", *words, "plan=true", "plan_as=json")
        assert planned.status == 0, planned.err
        told = json.loads(planned.out)
        counts += Counter({name: block["cells"] for name, block in told["blocks"].items()})
        assert len(told["cells"]) in (2, 3)
    assert counts == {"first": 3, "second": 2}
    assert not (tmp_path / "night").exists()


@pytest.mark.parametrize("said", ["0/2", "3/2", "2", "a", "1/0", "1/2/3", "-1/2"])
def test_a_part_is_a_number_of_how_many(said: str) -> None:
    with pytest.raises(ConfigError, match=f"part={said}: must be a number of how many, as 2/4"):
        Part.parse(said)


@pytest.mark.parametrize(
    ("asked", "told"),
    {
        ("++part=1/2",): "part=1/2: must be said on the command line, just so",
        ("part=1/2,2/2",): "part=1/2,2/2: is about the whole sweep and takes one value",
        ("part=1/2",): "holds another sweep; choose a folder that is new or empty, or go on with resume=",
        ("part=7/9",): "part=7/9: has none of 4 cells",
        (
            "part=1/2",
            "repeats=1",
            "hydra/sweeper=basic",
        ): "part=1/2: needs to know all cells before the first one runs",
    }.items(),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_part_that_makes_no_sense_is_refused(
    two: tuple[Finished, list[Finished]], asked: tuple[str, ...], told: str
) -> None:
    whole, _ = two
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.name != ".lock"}
    ended = run(whole.folder, *ASKED, *asked)
    assert ended.status == 2, ended.err
    assert told in ended.err.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_part_needs_the_folder_that_it_shares(tmp_path: Path) -> None:
    ended = dcpbench("parallel=none", "part=1/2", folder=tmp_path)
    assert ended.status == 2
    assert "part=1/2: name the folder of the whole sweep" in ended.err


def test_cells_alike_are_dealt_out_evenly() -> None:
    """Every second cell of the product would be all of one world size."""
    axes = itertools.product((False, True), range(4), (2, 4), (0, 1))
    jobs = [
        cast(
            Job,
            SimpleNamespace(
                cell=SimpleNamespace(
                    overrides=[f"compile={compiled}", f"seed={seed}", f"world_size={size}", f"repeat={run}"],
                    config=Config(compile=compiled, seed=seed, world_size=size),
                )
            ),
        )
        for compiled, seed, size, run in axes
    ]
    parts = [Part(number, 2).jobs(jobs) for number in (1, 2)]
    assert sorted(map(id, itertools.chain(*parts))) == sorted(map(id, jobs))
    for part in parts:
        assert part == [job for job in jobs if job in part]
        kinds = Counter((job.cell.config.compile, job.cell.config.world_size) for job in part)
        assert kinds == dict.fromkeys(itertools.product((False, True), (2, 4)), 4)
        assert {*Counter(tuple(job.cell.overrides[:3]) for job in part).values()} == {2}
