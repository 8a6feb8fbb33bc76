"""A union of products: what an experiment names, and what the command line chooses of it."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from conftest import ONE_STEP, TESTS, run
from dcpbench.compose.cells import CellWords
from dcpbench.compose.matrix import jobs, repeated
from dcpbench.config.errors import ConfigError
from support.pretended_engine import PRETENDED

BLOCKS = {
    "end_to_end": ["scenario=save_load", "parallel=fsdp,hsdp", "compile=false,true"],
    "hsdp": ["scenario=save_load", "parallel=hsdp", "model=even,uneven"],
    "convert": ["scenario=convert", "parallel=hsdp", "load_parallel=fsdp"],
}


def every(lists: Sequence[Sequence[str]], of_block: str | None) -> Iterable[Sequence[str]]:
    """All combinations, whatever a block says."""
    return itertools.product(*lists)


def parsed(*items: str) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(items))


def chosen(*given: str) -> list[str]:
    blocks = {name: parsed(*items) for name, items in BLOCKS.items()}
    return [" ".join(job.overrides) for job in jobs(blocks, parsed(*given), every)]


def test_blocks_are_products_in_order() -> None:
    assert chosen() == [
        "scenario=save_load parallel=fsdp compile=False",
        "scenario=save_load parallel=fsdp compile=True",
        "scenario=save_load parallel=hsdp compile=False",
        "scenario=save_load parallel=hsdp compile=True",
        "scenario=save_load parallel=hsdp model=even",
        "scenario=save_load parallel=hsdp model=uneven",
        "scenario=convert parallel=hsdp load_parallel=fsdp",
    ]


def test_command_line_selects_swept_values() -> None:
    assert chosen("parallel=fsdp", "seed=1,2") == [
        f"scenario=save_load parallel=fsdp compile={compiled} seed={seed}"
        for compiled in (False, True)
        for seed in (1, 2)
    ]
    # The third, of the block hsdp, is the second once more.
    assert chosen("compile=true", "scenario=save_load", "model=even") == [
        "scenario=save_load parallel=fsdp compile=True model=even",
        "scenario=save_load parallel=hsdp compile=True model=even",
    ]


@pytest.mark.parametrize("number", range(7))
def test_all_overrides_of_a_cell_select_it_alone(number: int) -> None:
    job = chosen("seed=3")[number]
    assert chosen(*job.split()) == [job]


def test_job_of_two_blocks_runs_once() -> None:
    blocks = {name: parsed("parallel=ddp,fsdp") for name in ("one", "other")}
    assert jobs(blocks, [], every) == [
        CellWords(["parallel=ddp"], "one"),
        CellWords(["parallel=fsdp"], "one"),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["parallel=ddp"], "parallel=ddp: no cell of the experiment has it; its parallel is fsdp, hsdp"),
        (["scenario=convert", "parallel=fsdp"], "the experiment has no cell with all of this"),
        (["seed=interval(0,1)"], "seed=interval(0,1): only lists can be swept"),
    ],
)
def test_empty_selection_lists_the_values(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(").replace(")", r"\)")):
        chosen(*given)


@pytest.mark.slow
def test_printed_command_runs_only_that_cell(tmp_path: Path) -> None:
    cells = ("experiment=seeds", "scenario=key_order", "parallel=fsdp", "fault=none,lr_next_float")
    first = run(tmp_path / "first", *cells, "device=cpu", PRETENDED)
    assert [row["status"] for row in first.rows] == ["pass", "fail"]
    (again,) = [line for line in first.out.splitlines() if "again: " in line]
    words = again.split(f" run --config-dir {TESTS / 'conf'} ")[1].split()
    second = run(tmp_path / "second", *words)
    assert [row["overrides"] for row in second.rows] == [first.rows[1]["overrides"]]


def test_last_value_of_a_repeated_key_applies() -> None:
    """`hydra.sweeper.params` comes before the command line: a list there is what holds without another."""
    assert chosen("seed=1,2", "scenario=convert", "seed=7") == [
        "scenario=convert parallel=hsdp load_parallel=fsdp seed=7"
    ]


@pytest.mark.slow
@pytest.mark.extended
def test_random_seeds_are_drawn_once(tmp_path: Path) -> None:
    command = ("experiment=soak", "parallel=none", "model=dummy", "save=sync", "world_size=1", *ONE_STEP)
    done = run(tmp_path / "sweep", *command, "device=cpu")
    seeds = [row["seed"] for row in done.rows]
    assert len(set(seeds)) == 14
    assert {row["status"] for row in done.rows} == {"pass"}
    again = run(tmp_path / "again", *done.rows[5]["overrides"].split())
    assert [(row["seed"], row["status"]) for row in again.rows] == [(seeds[5], "pass")]


def test_repeats_run_in_rounds() -> None:
    jobs = [CellWords(["parallel=ddp"], "one"), CellWords(["parallel=fsdp"], "other")]
    assert repeated(jobs, 1, for_all=True) == jobs
    assert repeated(jobs, 2, for_all=True) == [
        CellWords(["parallel=ddp", "repeat=0"], "one"),
        CellWords(["parallel=fsdp", "repeat=0"], "other"),
        CellWords(["parallel=ddp", "repeat=1"], "one"),
        CellWords(["parallel=fsdp", "repeat=1"], "other"),
    ]
    again = [CellWords(["parallel=ddp", "repeat=1"])]
    assert repeated(again, 5, for_all=True) == again, "a cell that is asked for again is one cell"


CHECKED_AND_TIMED = {
    "checked": ["parallel=ddp", "sharing=correctness"],
    "timed": ["parallel=ddp,fsdp", "repeats=3"],
}


def rounds(*given: str, repeats: int = 1, for_all: bool = False) -> list[str]:
    blocks = {name: parsed(*items) for name, items in CHECKED_AND_TIMED.items()}
    return [
        " ".join(job.overrides) for job in repeated(jobs(blocks, parsed(*given), every), repeats, for_all)
    ]


def test_block_can_set_its_repeats() -> None:
    """Its rounds are interleaved, and `repeats` itself is no override of a cell."""
    assert rounds() == [
        "parallel=ddp sharing=correctness",
        *(f"parallel={parallel} repeat={this}" for this in range(3) for parallel in ("ddp", "fsdp")),
    ]
    assert len(rounds(repeats=2)) == 2 + 6, "an experiment's own repeats hold for the other blocks"
    assert len(rounds(repeats=2, for_all=True)) == 2 * 3, "the command line's hold for all of them"
    assert rounds(for_all=True) == ["parallel=ddp sharing=correctness", "parallel=ddp", "parallel=fsdp"]


def test_repeat_of_a_block_can_run_alone() -> None:
    for job in rounds()[1:]:
        assert rounds(*job.split()) == [job]


@pytest.mark.parametrize("repeats", ["repeats=0", "repeats=some", "repeats=1,2"])
def test_block_with_two_repeats_is_refused(repeats: str) -> None:
    with pytest.raises(ConfigError, match="repeats="):
        repeated(jobs({"one": parsed("parallel=ddp", repeats)}, [], every), 1, for_all=False)
