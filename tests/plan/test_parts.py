"""A sweep that several drivers run, each a part of its cells (`part=1/2`)."""

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from conftest import Finished, dcpbench, plan_sweep, resume, run, start, words_of
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.plan.plan import PlannedCell, part_numbers, part_of
from support.commands import main
from support.pretended_engine import PRETENDED

ASKED = ("-m", "device=cpu", "parallel=none", "world_size=1", "seed=1,2", "repeats=2")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Finished]]:
    """Two parts of a sweep that ran at the same time, in the folders of one folder."""
    night = tmp_path_factory.mktemp("parts") / "night"
    night.mkdir()
    folders = [night / "1", night / "2"]
    drivers = [
        start(*words_of(folder, *ASKED, PRETENDED, f"part={folder.name}/2"), cwd=night) for folder in folders
    ]
    ended = [driver.communicate(240) for driver in drivers]
    return night, [
        Finished(int(driver.returncode or 0), out, err, folder)
        for folder, driver, (out, err) in zip(folders, drivers, ended, strict=True)
    ]


@pytest.mark.slow
def test_every_cell_runs_in_one_part(two: tuple[Path, list[Finished]]) -> None:
    _, parts = two
    assert [part.status for part in parts] == [0, 0], [part.err for part in parts]
    assert [len(part.rows) for part in parts] == [2, 2]
    assert {row["seed"] for part in parts for row in part.rows} == {1, 2}
    for part in parts:  # one cell each, with both of its runs
        assert set(Counter(row["seed"] for row in part.rows).values()) == {2}
        assert [*json.loads((part.folder / "sweep.json").read_text())["cells"]] == [
            row["cell"] for row in part.rows
        ]


@pytest.mark.slow
def test_folder_of_parts_is_read_as_sweeps(
    two: tuple[Path, list[Finished]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night, _ = two
    assert main(["report", str(night)]) == 0
    assert "2 cells in 4 runs: 4 pass" in capsys.readouterr().out
    shutil.copytree(night, tmp_path / "later")
    assert main(["compare", str(night), str(tmp_path / "later")]) == 0
    assert "0 of 2 cells changed" in capsys.readouterr().out


@pytest.mark.slow
def test_part_is_resumed_as_a_sweep(two: tuple[Path, list[Finished]], tmp_path: Path) -> None:
    night, (first, _) = two
    own = tmp_path / "1"
    shutil.copytree(night / "1", own)
    (own / "results.jsonl").write_bytes((own / "results.jsonl").read_bytes().splitlines(keepends=True)[0])
    left = dcpbench("plan", *ASKED, "part=1/2", "--resume", str(own), PRETENDED, folder=own)
    assert "1 cell in 2 runs: 1 would run, 1 are done" in left.out, left.err
    again = resume(own, PRETENDED)
    assert again.status == 0, again.err
    assert "resume: 1 of 2 cells are done" in again.err
    assert [row["cell"] for row in again.rows] == [row["cell"] for row in first.rows]
    other = resume(own, "part=2/2", PRETENDED)
    assert other.status == 2
    assert "leave out part=2/2, or run another sweep" in other.err


@pytest.mark.slow
def test_plan_of_a_part_writes_nothing(tmp_path: Path) -> None:
    blocks = '+hydra.sweeper.matrix={first:{seed:"1,2,3"},second:{seed:"4,5"}}'
    words = (PRETENDED, "parallel=none", "world_size=1", "device=cpu", blocks, "part=1/2")
    ended = plan_sweep(tmp_path / "night", *words, "--json")
    assert ended.status == 0, ended.err
    told = json.loads(ended.out)
    assert len(told["cells"]) == sum(block["cells"] for block in told["blocks"].values()) in (2, 3)
    assert not (tmp_path / "night").exists()


@pytest.mark.parametrize("said", ["0/2", "3/2", "2", "a", "1/0", "1/2/3", "-1/2"])
def test_part_is_a_number_and_a_count(said: str) -> None:
    with pytest.raises(ConfigError, match=f"part={said}: must be a number and a count, as 2/4"):
        part_numbers(said)


@pytest.mark.slow
def test_part_without_cells_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path / "night", *ASKED, PRETENDED, "part=7/9")
    assert ended.status == 2, ended.err
    assert "part=7/9: has none of 4 cells" in ended.err.splitlines()[-1]
    assert not (tmp_path / "night").exists()


def test_cells_are_dealt_out_with_their_repeats() -> None:
    """Every second cell of the product would be all of one world size."""
    axes = itertools.product((False, True), range(4), (2, 4), (0, 1))
    jobs = [
        cast(
            PlannedCell,
            SimpleNamespace(
                overrides=[f"compile={compiled}", f"seed={seed}", f"world_size={size}", f"repeat={run}"],
                asked=Config(compile=compiled, seed=seed, world_size=size),
            ),
        )
        for compiled, seed, size, run in axes
    ]
    parts = [part_of(jobs, number, 2) for number in (1, 2)]
    assert sorted(map(id, itertools.chain(*parts))) == sorted(map(id, jobs))
    for part in parts:
        assert part == [job for job in jobs if job in part]
        assert len(part) == len(jobs) / 2
        assert {job.asked.world_size for job in part} == {2, 4}
        assert {*Counter(tuple(job.overrides[:3]) for job in part).values()} == {2}
