"""A sweep that several drivers run, each a part of its cells (`part=1/2`)."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from conftest import Command, resume, run
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.plan.plan import PlannedCell, cells_of_part, part_numbers
from support.pretended_engine import PRETENDED

ASKED = ("-m", "device=cpu", "parallel=none", "world_size=1", "seed=1,2", "repeats=2")


@pytest.mark.slow
def test_parts_are_sweeps_of_their_own(tmp_path: Path, command: Command) -> None:
    """One cell each, with both of its runs; the folder of the parts is read as one sweep."""
    night = tmp_path / "night"
    night.mkdir()
    first, second = (run(night / f"{n}", *ASKED, PRETENDED, f"part={n}/2") for n in (1, 2))
    assert [first.status, second.status] == [0, 0], first.err + second.err
    seeds = [Counter(row["seed"] for row in part.rows) for part in (first, second)]
    assert seeds[0] | seeds[1] == {1: 2, 2: 2}
    assert [*json.loads((first.folder / "sweep.json").read_text())["cells"]] == [
        row["cell"] for row in first.rows
    ]
    assert "2 cells in 4 runs: 4 pass" in command(night).out
    results, before = first.folder / "results.jsonl", first.rows
    results.write_bytes(results.read_bytes().splitlines(keepends=True)[0])
    again = resume(first.folder, PRETENDED)
    assert "resume: 1 of 2 cells are done" in again.err
    assert [row["cell"] for row in again.rows] == [row["cell"] for row in before]


@pytest.mark.parametrize("said", ["0/2", "3/2", "2", "a", "1/0", "1/2/3", "-1/2"])
def test_part_is_a_number_and_a_count(said: str) -> None:
    with pytest.raises(ConfigError, match=f"part={said}: must be a number and a count, as 2/4"):
        part_numbers(said)


def test_cells_are_dealt_out_with_their_repeats() -> None:
    """Whatever the order of the cells and how they run; every second cell of the product would be all of one
    world size."""
    axes = [*itertools.product((False, True), range(4), (2, 4), (0, 1))]

    def jobs(cell_s: float) -> list[PlannedCell]:
        made = [
            SimpleNamespace(
                requested=Config(compile=compiled, seed=seed, world_size=size), of=(compiled, seed, size)
            )
            for compiled, seed, size, _ in axes
        ]
        for one in made:
            one.requested.timeouts.cell_s = cell_s
        return cast("list[PlannedCell]", made)

    cells = jobs(9.0)
    parts = [cells_of_part(cells, number, 2) for number in (1, 2)]
    assert sorted(map(id, itertools.chain(*parts))) == sorted(map(id, cells))
    for part in parts:
        assert part == [cell for cell in cells if cell in part]
        assert {cell.requested.world_size for cell in part} == {2, 4}
        assert {*Counter(cell.of for cell in part).values()} == {2}  # type: ignore[attr-defined]
    random.Random(0).shuffle(other := jobs(7.0))
    mine = [{cell.of for cell in cells_of_part(some, 1, 2)} for some in (cells, other)]  # type: ignore[attr-defined]
    assert mine[0] == mine[1]
    with pytest.raises(ConfigError, match="part=39/40: has none of 32 cells"):
        cells_of_part(cells, 39, 40)
