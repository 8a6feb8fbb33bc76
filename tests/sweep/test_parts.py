"""A sweep that several drivers run, each a part of it (`part=1/2`): in one folder, read as one sweep."""

import itertools
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from conftest import SMALL, Finished, dcpbench, run, start, words_of
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.records.store import read_rows, write_json
from dcpbench.report import read_sweeps
from dcpbench.sweep import manifest
from dcpbench.sweep.job import Job, Part
from dcpbench.sweep.sweep_folder import begin_part

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


def _rows(folder: Path) -> list[dict[str, object]]:
    return [row.flat() for row in read_rows(folder)[0]]


@pytest.mark.slow
def test_every_cell_runs_in_one_part(two: tuple[Finished, list[Finished]]) -> None:
    whole, parts = two
    assert [part.status for part in parts] == [0, 0], [part.err for part in parts]
    asked = json.loads((whole.folder / "sweep.json").read_text())["cells"]
    assert [len(part.rows) for part in parts] == [2, 2]
    assert {row["cell"] for part in parts for row in part.rows} == {*asked}
    for part in parts:  # one cell each, with both of its runs
        assert set(Counter(row["seed"] for row in part.rows).values()) == {2}
    last = [part.err for part in parts if f"4 of 4 cells of {whole.folder} have a row" in part.err]
    assert last, [part.err for part in parts]


@pytest.mark.slow
def test_folder_of_parts_is_read_as_one_sweep(two: tuple[Finished, list[Finished]], tmp_path: Path) -> None:
    whole, parts = two
    night = tmp_path / "night"
    shutil.copytree(whole.folder, night)
    report = dcpbench("report", str(night), folder=night)
    assert "2 cells in 4 runs: 4 pass" in report.out
    assert "sweeps" not in report.out
    assert " left" not in report.err + report.out
    assert (night / "report.html").is_file()
    assert not (night / "results.jsonl").exists()
    assert _rows(night) == [row for part in parts for row in part.rows]
    one, other = (part.folder / "environment.json" for part in parts)
    write_json(night / other.parent.name / "environment.json", {"host": "other"})
    (known,) = read_sweeps([night]).environments.values()
    assert known == {**json.loads(one.read_text()), "earlier": [{"host": "other"}]}
    shutil.copytree(night, tmp_path / "later")
    history = dcpbench("history", str(tmp_path), folder=tmp_path)
    assert "2 sweeps," in history.out
    compared = dcpbench("compare", str(night), str(tmp_path / "later"), folder=tmp_path)
    assert compared.status == 0, compared.err
    assert "0 of 2 cells changed" in compared.out


@pytest.mark.slow
def test_parts_are_resumed_separately(tmp_path: Path) -> None:
    folder = tmp_path / "night"
    first = _of_part("1/2", folder)
    assert f"part=1/2: {len(first.rows)} of 4 cells of {folder} have a row" in first.err
    assert re.search(r"\nnext: .* -m dcpbench report (\S*/)?night\n", first.err)
    owed = {*json.loads((folder / "sweep.json").read_text())["cells"]} - {row["cell"] for row in first.rows}
    report = dcpbench("report", str(folder), folder=folder)
    assert f"{folder}: {4 - len(owed)} of 4 cells done, {len(owed)} left" in report.err
    refused = dcpbench(f"resume={folder}", folder=folder)
    assert refused.status == 2
    told = r"has 2 parts, each resumed separately: [^,]* -m dcpbench resume (\S*/)?night part=2/2$"
    assert re.search(told, refused.err.splitlines()[-1])
    second = dcpbench(f"resume={folder}", "part=2/2", "rerun=failed", folder=folder)  # it has not begun
    assert second.status == 0, second.err
    assert f"part=2/2: 4 of 4 cells of {folder} have a row" in second.err
    assert [row for row in _rows(folder) if row["cell"] not in owed] == first.rows
    assert "all are complete" in dcpbench(f"resume={folder}", folder=folder).err
    own = _folder("1/2", folder)
    (own / "results.jsonl").write_bytes((own / "results.jsonl").read_bytes().splitlines(keepends=True)[0])
    again = dcpbench(f"resume={own}", folder=folder)
    assert again.status == 0, again.err
    assert "resume: 1 of 2 cells are done" in again.err
    assert len(_rows(folder)) == 4


def _made(folder: Path, cells: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    manifest.Record([], "/", {cell: [] for cell in cells}, []).write(folder)
    write_json(folder / "environment.json", {"host": folder.name})
    return folder


def test_part_needs_the_folder_of_its_sweep(tmp_path: Path) -> None:
    whole = tmp_path / "night"
    record = manifest.Record([], "/", {"a": [], "b": []}, [])
    for _ in range(2):  # the second time as if the first driver had been killed before its part began
        begin_part(_folder("1/2", whole), record)
    assert manifest.read(whole).cells == {"a": [], "b": []}
    with pytest.raises(ConfigError, match=r"hydra.sweep.dir=.*/night: another part began just now"):
        begin_part(_folder("1/2", whole), replace(record, cells={"a": [], "b": [], "c": []}))
    _made(_folder("1/2", whole), ["a"])
    with pytest.raises(ConfigError, match=r"has 2 and 3 parts; choose one number"):
        begin_part(_folder("1/3", whole), record)


@pytest.mark.slow
def test_plan_of_a_part_writes_nothing(tmp_path: Path) -> None:
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
def test_part_is_a_number_and_a_count(said: str) -> None:
    with pytest.raises(ConfigError, match=f"part={said}: must be a number and a count, as 2/4"):
        Part.parse(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "told"),
    {
        ("++part=1/2",): "part=1/2: pass it on the command line, exactly so",
        ("part=1/2,2/2",): "part=1/2,2/2: applies to the complete sweep; pass one value",
        ("part=1/2",): "contains a sweep already; choose a new or empty folder, or run dcpbench resume /",
        ("part=7/9",): "part=7/9: has none of 4 cells",
        (
            "part=1/2",
            "repeats=1",
            "hydra/sweeper=basic",
        ): "part=1/2: needs all cells before the first one runs",
    }.items(),
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_part_is_refused(
    two: tuple[Finished, list[Finished]], asked: tuple[str, ...], told: str
) -> None:
    whole, _ = two
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*") if path.name != ".lock"}
    own = {word.partition("=")[0] for word in asked}
    ended = run(whole.folder, *(word for word in ASKED if word.partition("=")[0] not in own), *asked)
    assert ended.status == 2, ended.err
    assert told in ended.err.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_part_needs_a_named_folder(tmp_path: Path) -> None:
    ended = dcpbench("parallel=none", "part=1/2", folder=tmp_path)
    assert ended.status == 2
    assert "part=1/2: name the folder of the complete sweep" in ended.err


def test_similar_cells_are_dealt_out_evenly() -> None:
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
