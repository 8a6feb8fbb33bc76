"""A union of products: what an experiment names, and what the command line chooses of it.

Or few cells in which every two values meet: `matrix=pairwise`."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, open_dict

from dcpbench.cli import keys_help
from dcpbench.cli.words import one_line
from dcpbench.compose import pairwise
from dcpbench.compose.blocks import override_lists, with_repeats, words_of_blocks, words_of_cells
from dcpbench.compose.cells import CellWords, cells_of
from dcpbench.compose.composer import Composer
from dcpbench.compose.pairwise import Combination, PairCover, Search, sentence
from dcpbench.config.errors import ConfigError
from dcpbench.core.axes import AXES
from dcpbench.executors.machine import Machine
from dcpbench.plan.plan import PlannedCell, plan_of

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
    return [" ".join(job.overrides) for job in words_of_blocks(blocks, parsed(*given), every)]


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
    assert override_lists(parsed("compile=False,false,true")) == [["compile=False", "compile=True"]]
    blocks = {name: parsed("parallel=ddp,fsdp") for name in ("one", "other")}
    assert words_of_blocks(blocks, [], every) == [
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


def test_last_value_of_a_repeated_key_applies() -> None:
    """`hydra.sweeper.params` comes before the command line: a list there is what holds without another."""
    assert chosen("seed=1,2", "scenario=convert", "seed=7") == [
        "scenario=convert parallel=hsdp load_parallel=fsdp seed=7"
    ]


CHECKED_AND_TIMED = {
    "checked": ["parallel=ddp", "sharing=correctness"],
    "timed": ["parallel=ddp,fsdp", "repeats=3"],
}


def rounds(*given: str, repeats: int = 1, for_all: bool = False) -> list[str]:
    blocks = {name: parsed(*items) for name, items in CHECKED_AND_TIMED.items()}
    return [
        " ".join(job.overrides)
        for job in with_repeats(words_of_blocks(blocks, parsed(*given), every), repeats, for_all)
    ]


def test_block_can_set_its_repeats() -> None:
    """Its rounds are interleaved, and `repeats` itself is no override of a cell."""
    assert rounds() == [
        "parallel=ddp sharing=correctness",
        *(f"parallel={parallel} repeat={this}" for this in range(3) for parallel in ("ddp", "fsdp")),
    ]
    assert len(rounds(repeats=2)) == 2 + 6, "an experiment's own repeats hold for the other blocks"
    of_all = [job[-1] for job in rounds(repeats=2, for_all=True)]
    assert of_all == ["0"] * 3 + ["1"] * 3, "the command line's hold for all of them"
    assert rounds(for_all=True) == ["parallel=ddp sharing=correctness", "parallel=ddp", "parallel=fsdp"]
    assert [rounds(*job.split()) for job in rounds()[1:]] == [[job] for job in rounds()[1:]], "each alone"


@pytest.mark.parametrize("repeats", ["repeats=0", "repeats=some", "repeats=1,2"])
def test_block_with_two_repeats_is_refused(repeats: str) -> None:
    with pytest.raises(ConfigError, match="repeats="):
        with_repeats(words_of_blocks({"one": parsed("parallel=ddp", repeats)}, [], every), 1, for_all=False)


KEYS: dict[str, list[Any]] = {
    "compile": [True, False],
    "world_size": [1, 2],
    "device": ["auto", "cpu"],
    "seed": [0, 1],
    "load_world_size": [None, 2],
    "activation_checkpointing": [None, "layer"],
    "load_parallel": [None, "ddp"],
    "save_at": [None, 0],
    "optimizer.lr": [0.1, 1e-3],
    "optimizer.betas": [[0.9, 0.99], [0.8, 0.9]],
    "compile_scope": [None, "layer"],
    "model.options.sizes": [[8, 16, 8], [8, 32, 8]],
}
"""Values of the axes that are no groups, and of other keys."""


def loaded(loader: ConfigLoader, *words: str) -> DictConfig:
    """The composition of a sweep with these words."""
    return loader.load_configuration("config", ["hydra.sweep.dir=x", *words], RunMode.MULTIRUN)


def cells_in(
    loader: ConfigLoader, base: DictConfig, words: Iterable[str], sentences: list[str] | None = None
) -> list[PlannedCell]:
    """The cells of a composition and words on a machine without GPUs; add one about pairs to `sentences`."""
    composer, here = Composer(loader, base), Machine(0, {"torch": "2.13"})

    def covering(lists: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        found = pairwise.covering(composer, here, lambda *_: 1, lists)
        if sentences is not None:
            sentences.append(pairwise.sentence(lists, found))
        return found.rows

    return plan_of(
        cells_of(composer, base, words_of_cells(parsed(*words), loader, base, covering)), here
    ).cells


def planned(loader: ConfigLoader, blocks: Any, *words: str, params: Any = None) -> list[PlannedCell]:
    """The cells of these blocks, a mapping or YAML, with these words."""
    base = loaded(loader, *words)
    with open_dict(base):
        base.hydra.sweeper.matrix = yaml.safe_load(blocks) if isinstance(blocks, str) else blocks
        base.hydra.sweeper.params = params or {}
    return cells_in(loader, base, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "values", "differs"),
    [
        ("isolation", "warm,fresh", "isolation=warm and isolation=fresh"),
        ("verify", "standard,deep", "restart=false and restart=true"),
    ],
)
def test_cells_that_differ_only_in_how_they_run_are_refused(
    key: str, values: str, differs: str, hydra_loader: ConfigLoader
) -> None:
    """Of a group the key that differs is named."""
    with pytest.raises(ConfigError) as refused:
        planned(hydra_loader, {}, "parallel=ddp,fsdp2", f"{key}={values}")
    assert all(f"parallel=ddp,{key}={value}" in str(refused.value) for value in values.split(","))
    assert f"({differs}), and would count as repeats of one cell" in str(refused.value)


@pytest.mark.slow
def test_a_list_is_a_list_of_values_for_every_axis(hydra_loader: ConfigLoader) -> None:
    groups = {name: [*key.values][:2] for name, key in keys_help.groups().items() if name in AXES}
    values = groups | KEYS
    assert AXES.keys() <= values.keys(), "each axis has its list"
    blocks = {
        name.replace(".", "_"): {"scenario": "convert" if "load" in name else "save_load", name: values[name]}
        for name in values
    }
    blocks |= {
        name: {**block, "train_steps": number + 1} for number, (name, block) in enumerate(blocks.items())
    }
    both = {"save": ["sync", "async"], "parallel": ["ddp", "hsdp"], "train_steps": len(blocks) + 1}
    counts = Counter(cell.block for cell in planned(hydra_loader, {**blocks, "both": both}))
    # Here `auto` is another spelling of `cpu`, and two spellings of a cell are one cell.
    assert counts == {**dict.fromkeys(blocks, 2), "device": 1, "both": 4}
    lists = {"optimizer.betas": [0.9, 0.99], "save": "sync,async", "seed": [1, 2]}
    names = [f"optimizer.betas=_0.9,0.99_,save={save},seed={n}" for save in ("sync", "async") for n in (1, 2)]
    assert [cell.name for cell in planned(hydra_loader, {"b": lists})] == names, "a list of a list key"
    params = {"seed": [0, 1], "save_at": [None, 0]}
    assert len(planned(hydra_loader, {"b": {"parallel": ["ddp", "hsdp"]}}, params=params)) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            "{b: {compile: true,false, saves: 1}}",
            "block b: false has no value; write a list in brackets: compile: [true, false]",
        ),
        ("{b: {save_at: 0,null}}", "null is not a key; write a list in brackets"),
        ("{b: {save: []}}", "save=[]: use save=a,b"),
        ('{b: {save: "[sync,async]"}}', "save=[sync,async]: use save=sync,async"),
        ("{b: {save: [null, sync]}}", "save=null: cannot be null"),
        (
            "{b: {optimizer.betas: [[[0.9, 0.99]]]}}",
            "optimizer.betas=[[0.9,0.99]]: has a list or a mapping in its list",
        ),
    ],
)
def test_other_lists_are_refused(blocks: str, message: str, hydra_loader: ConfigLoader) -> None:
    with pytest.raises(Exception, match=r".") as error:
        planned(hydra_loader, blocks)
    assert message in one_line(error.value)


shapes = st.lists(st.integers(1, 5), min_size=2, max_size=6)
PAIRS = (
    *("parallel=none,ddp,fsdp2", "save=sync,async,async_cached", "overlap_saves=false,true"),
    *("model=even,uneven", "seed=range(0,3)", "optimizer=adam,sgd"),
)


def lists_of(shape: list[int]) -> list[list[str]]:
    return [[f"{axis}={value}" for value in range(number)] for axis, number in enumerate(shape)]


def pairs_of(rows: list[Combination]) -> set[tuple[str, str]]:
    return {pair for row in rows for pair in itertools.combinations(row, 2)}


def anything(_: Any, __: Any = None) -> bool:
    return True


def nothing(_: Any, __: Any = None) -> bool:
    return False


@pytest.mark.parametrize(
    ("shape", "at_most"), [([8, 3, 2, 2, 10], 80), ([5] * 10, 60), ([3] * 4 + [2] * 4, 16)]
)
def test_pairs_need_few_jobs(shape: list[int], at_most: int) -> None:
    assert len(Search(lists_of(shape), anything, nothing).found().rows) <= at_most < math.prod(shape)


@given(shapes, st.data())
@settings(deadline=None, max_examples=50)
def test_every_runnable_pair_is_in_a_job_that_runs(shape: list[int], data: st.DataObject) -> None:
    """Constraints of two values, some known before, and one of three."""
    lists = lists_of(shape)
    anywhere = st.sampled_from([value for values in lists for value in values])
    apart = data.draw(st.lists(st.frozensets(anywhere, min_size=2, max_size=3), max_size=4))
    known = {conflict for conflict in apart if len(conflict) == 2 and data.draw(st.booleans())}

    def runs(row: Combination) -> bool:
        return not any(conflict <= {*row} for conflict in apart)

    def conflicts(one: str, other: str) -> bool:
        return frozenset((one, other)) in known

    found = Search(lists, runs, conflicts).found()
    assert Search(lists, runs, conflicts).found() == found, "the same cells on every day"
    assert all(row[axis] in values for row in found.rows for axis, values in enumerate(lists))
    could = pairs_of([row for row in itertools.product(*lists) if runs(row)])
    assert pairs_of([row for row in found.rows if runs(row)]) == could
    assert not could & {*found.left_out}
    alone = {value for values in lists for value in values} - {value for pair in could for value in pair}
    assert {*found.never} == alone
    assert [row for row in found.rows if not runs(row)] == found.rows[len(found.rows) - len(alone) :]


def test_pairs_left_out_are_printed() -> None:
    lists = [["a=1", "a=2"], ["b=1", "b=2"]]
    told = sentence(lists, PairCover([("a=1", "b=1")] * 3, [("a=2", "b=2")], ["a=3"]))
    assert told.startswith("matrix=pairwise: 3 of 4 cells have every pair of values that can run; ")
    assert told.endswith("left out: a=3 with any, a=2 with b=2")
    many = PairCover([], [("a=1", f"b={number}") for number in range(9)], [])
    assert sentence(lists, many).endswith("a=1 with b=2 and 6 more")


@pytest.mark.slow
def test_pairwise_cells_have_all_runnable_pairs(hydra_loader: ConfigLoader) -> None:
    base = loaded(hydra_loader, "matrix=pairwise", *PAIRS)
    sentences = list[str]()
    cells = cells_in(hydra_loader, base, ("matrix=pairwise", *PAIRS), sentences)
    assert "left out: save=async_cached with any, save=sync with overlap_saves=True" in sentences[0]
    (skip,) = [cell.name for cell in cells if cell.skip]
    assert "save=async_cached" in skip
    met = {pair for cell in cells for pair in itertools.combinations(cell.name.split(","), 2)}
    assert {("parallel=fsdp2", "optimizer=sgd"), ("overlap_saves=true", "seed=2")} <= met
    assert len(cells) < 20, "of 216"


@pytest.mark.slow
def test_block_of_an_experiment_can_be_pairwise(hydra_loader: ConfigLoader) -> None:
    block = {key: values for key, _, values in (axis.partition("=") for axis in PAIRS[2:])}
    pairs = {**block, "save": "async", "matrix": "pairwise"}
    blocks = {"pairs": pairs, "all": {"parallel": "ddp,fsdp", "saves": 1}}
    by_pairs = [cell.name for cell in planned(hydra_loader, blocks)]
    assert 6 + 2 <= len(by_pairs) < 24 + 2
    assert not any("matrix" in name for name in by_pairs)
    typed = by_pairs[3].split(",")
    assert [cell.name for cell in planned(hydra_loader, blocks, *typed)] == [by_pairs[3]]
    pairs["matrix"] = "pairwse"
    with pytest.raises(ConfigError, match=r"matrix=pairwse: .* did you mean pairwise\?"):
        planned(hydra_loader, blocks)
