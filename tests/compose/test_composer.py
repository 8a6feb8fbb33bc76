"""The configuration of a cell is the one that Hydra would compose."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from textwrap import indent
from unittest import mock

import pytest
from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dcpbench.compose.cells import CellWords, SweepCell, cells_of, write_hydra_folder
from dcpbench.compose.composer import Composer, typed
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import conf_folder, config_class

pytestmark = pytest.mark.slow

LISTS = {
    "parallel": ("ddp", "fsdp2_tp", "hsdp"),
    "model": ("dummy", "nested"),
    "save": ("sync", "async"),
    "optimizer": ("adam", "sgd"),
    "seed": ("1", "2"),
}
OWN_GROUPS = Path(__file__).parents[1] / "conf"


def crossed(**lists: tuple[str, ...]) -> list[list[str]]:
    return [
        [f"{key}={value}" for key, value in zip(lists, row, strict=True)] for row in product(*lists.values())
    ]


@cache
def sweep(loader: ConfigLoader, *words: str, groups: Path = OWN_GROUPS) -> DictConfig:
    searched = f"hydra.searchpath=[file://{groups}]"
    return loader.load_configuration("config", ["hydra.sweep.dir=x", searched, *words], RunMode.MULTIRUN)


def made(loader: ConfigLoader, base: DictConfig, cells: list[list[str]]) -> list[SweepCell]:
    return cells_of(Composer(loader, base), base, [CellWords(words) for words in cells])


@contextmanager
def counted(loader: ConfigLoader) -> Iterator[list[list[str]]]:
    """Collect the words of each composition by Hydra."""
    composed, honest = list[list[str]](), loader.load_sweep_config

    def compose(base: DictConfig, words: list[str]) -> DictConfig:
        composed.append([*words])
        return honest(base, words)

    with mock.patch.object(loader, "load_sweep_config", compose):
        yield composed


def is_as_by_hydra(composer: Composer, loader: ConfigLoader, base: DictConfig, words: list[str]) -> bool:
    """Return whether the configuration equals Hydra's."""
    return composer.config(words) == typed(loader.load_sweep_config(base, words))


def drawn(lists: dict[str, Sequence[str]], chance: random.Random) -> list[str]:
    return [f"{key}={chance.choice(values)}" for key, values in lists.items()]


def of_blocks(base: DictConfig, chance: random.Random, count: int) -> list[list[str]]:
    """Return cells of the blocks of an experiment."""
    of_sweep = ("repeats", "matrix", "plugin")
    blocks = [
        {key: str(values).split(",") for key, values in block.items() if key not in of_sweep}
        for block in OmegaConf.to_container(base.hydra.sweeper.matrix, resolve=True).values()  # type: ignore[union-attr]
    ]
    cells = [drawn(chance.choice(blocks), chance) for _ in range(count)]
    return [[word for word in cell if "[" not in word and "]" not in word] for cell in cells]


VALUES: dict[str, Sequence[str]] = {
    "parallel": ("ddp", "fsdp", "fsdp2_tp", "pp_fsdp2", "hsdp", "none", "experts_unscaled"),
    "load_parallel": ("tp", "fsdp2", "none"),
    "model": ("dummy", "even", "nested", "experts"),
    "storage": ("file", "fsspec", "file_threads"),
    "fault": ("none", "weight_nan", "file_bit"),
    "parallel.dp_replicate": ("2", "null"),
    "optimizer.lr": ("0.5", "1e-3"),
    "storage.thread_count": ("1", "4"),
    "model.options": ("{}",),
    "timeouts": ("{cell_s: 3, save_s: 1.5}",),
    "timeouts.load_s": ("7", "null"),
    "save_at": ("3", "${seed}"),
    "known_failures": ("null", "'x y'"),
    "compile": ("true", "False"),
    "seed": ("1", "2", "3"),
}


def random_sweep(chance: random.Random, count: int) -> list[list[str]]:
    """Cells of one sweep over some of these axes, in any order."""
    keys = chance.sample(list(VALUES), 8)
    return [drawn({key: VALUES[key] for key in keys}, chance) for _ in range(count)]


@pytest.mark.parametrize("experiment", ["nightly", "seeds", "convert", "soak", "faults", "crash"])
def test_cells_of_experiments_equal_hydras(experiment: str, hydra_loader: ConfigLoader) -> None:
    chance, word = random.Random(experiment), f"experiment={experiment}"
    base = sweep(hydra_loader, word)
    cells = [[*cell, word] for cell in of_blocks(base, chance, 30)]
    composer = Composer(hydra_loader, base)
    with counted(hydra_loader) as composed:
        for cell in cells:
            composer.config(cell)
    assert len(composed) <= 3, "the files of each key are merged"
    for cell in cells:
        assert is_as_by_hydra(composer, hydra_loader, base, cell), cell


OTHER_WORDS = (
    ["experiment=seeds", "seed=1", "scenario=convert", "load_parallel=fsdp", "parallel=hsdp"],
    ["+model.options.more=3", "model.options.more=4"],
    ["save_at=3", "~experiment"],
    ["+parallel@load_parallel=ddp", "saves=1"],
    ["model=even", "model=uneven"],
    ["hydra.job.name=x", "seed=8"],
    ["executor.hosts=2", "seed=5"],
    [],
)
OF_SWEEP = ("parallel=fsdp2", "model.options={}", "save_at=5", "seed=3")


@pytest.mark.parametrize("of_sweep", [(), (*OF_SWEEP, "optimizer=adam,sgd", "repeats=2")], ids=len)
def test_other_words_equal_hydras_composition(of_sweep: tuple[str, ...], hydra_loader: ConfigLoader) -> None:
    """Words of the sweep, fewer and more than those, and random ones."""
    base = sweep(hydra_loader, *of_sweep)
    composer = Composer(hydra_loader, base)
    of_cells = [[*OF_SWEEP], [*OF_SWEEP, "optimizer=sgd"], [*OF_SWEEP[:3]]]
    for words in of_cells if of_sweep else [*OTHER_WORDS, *random_sweep(random.Random(1), 2)]:
        assert is_as_by_hydra(composer, hydra_loader, base, words), words


def test_files_that_set_other_groups(tmp_path: Path, hydra_loader: ConfigLoader) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "experiment").mkdir()
    dummy = indent((conf_folder() / "model/dummy.yaml").read_text(), "  ")
    files = {
        "model/with_decay": f"# @package _global_\noptimizer: {{weight_decay: 0.125}}\nmodel:\n{dummy}",
        "model/more": "defaults: [dummy, _self_]\nname: more\nbatch_size: 48\n",
        "experiment/even": "# @package _global_\ndefaults: [override /model: even]\n",
        "experiment/slow": "# @package _global_\noptimizer: {lr: 0.25}\ntimeouts: {load_s: 9}\n",
        "experiment/follows": "# @package _global_\ndefaults: [override /scheduler: '${optimizer}']\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    base = sweep(hydra_loader, groups=tmp_path)
    composer = Composer(hydra_loader, base)
    models = {**LISTS, "model": ("dummy", "with_decay", "more")}
    cells = crossed(**models) + crossed(experiment=("even", "slow"), **LISTS)
    for cell in cells[1::80]:
        assert is_as_by_hydra(composer, hydra_loader, base, cell), cell
    assert composer.config(["experiment=even", "parallel=ddp"]).model.name == "even"
    slow = composer.config(["optimizer=sgd", "timeouts.save_s=1", "experiment=slow"])
    assert (slow.optimizer.name, slow.optimizer.lr, slow.timeouts.load_s) == ("sgd", 0.25, 9.0)
    # What follows another choice is not to be found in a cell without that.
    (tmp_path / "scheduler").mkdir()
    for optimizer in ("adam", "sgd"):
        (tmp_path / f"scheduler/{optimizer}.yaml").write_text(
            f"defaults: [step, _self_]\nname: like_{optimizer}\n"
        )
    others = crossed(experiment=("follows",), optimizer=("adam", "sgd"), seed=("1", "2", "3"))
    assert [composer.config(cell).scheduler.name for cell in others[2:4]] == ["like_adam", "like_sgd"]


@pytest.mark.parametrize(
    "wrong", ["seed=x", "sead=1", "parallel=ddb", "parallel.x=1", "model.options.x=1", "timeouts=3", "a"]
)
def test_wrong_words_are_refused_in_hydras_words(wrong: str, hydra_loader: ConfigLoader) -> None:
    base = sweep(hydra_loader)
    with pytest.raises(HydraException) as theirs:
        typed(hydra_loader.load_sweep_config(base, [wrong]))
    with pytest.raises(HydraException) as ours:
        made(hydra_loader, base, [["parallel=tp"], [wrong]])
    assert str(ours.value) in str(theirs.value)


def test_cell_folders_have_the_configuration(hydra_loader: ConfigLoader, tmp_path: Path) -> None:
    base = sweep(hydra_loader, f"hydra.sweep.dir={tmp_path}")
    texts = ["+model.options.texts=['1e3','1_0','0x1','on','no: ö','nan','${seed}','']"]
    cells = made(hydra_loader, base, [*crossed(**LISTS), texts, ["seed=1"], ["seed=1"]])
    assert [cell.name for cell in cells[-2:]] == ["seed=1", "seed=1#2"]
    for number in (3, len(cells) - 3, len(cells) - 1):
        cell = cells[number]
        assert cell.folder == tmp_path / cell.name
        write_hydra_folder(cell.folder, cell.overrides, cell.config)
        assert OmegaConf.load(cell.folder / ".hydra/overrides.yaml") == cell.overrides
        written = OmegaConf.load(cell.folder / ".hydra/config.yaml")
        again = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config_class()), written))
        assert again == cell.config


def test_long_names_have_what_varies_and_a_number(hydra_loader: ConfigLoader, tmp_path: Path) -> None:
    base = sweep(hydra_loader, f"hydra.sweep.dir={tmp_path}")
    long = [f"storage.root={'x' * 150}"]
    batch = [[*long, "seed=1"], [*long, "seed=2"], [*long, "seed=2"]]
    assert [cell.name for cell in made(hydra_loader, base, batch)] == [
        "seed=1",
        "seed=2",
        "seed=2#2",
    ]
    far = [[f"storage.root={'x' * 150}{number}"] for number in range(3)]
    names = [cell.name for cell in made(hydra_loader, base, far)]
    assert names == [f"storage.root={'x' * 137}{number}" for number in ("", "#2", "#3")]
    alone = made(hydra_loader, base, [[*long, "seed=1"]])
    assert alone[0].name == f"storage.root={'x' * 137}"
    (wide,) = made(hydra_loader, base, [[f"+model.options.text='{'漢' * 140}'"]])
    assert wide.name == f"+model.options.text=_{'漢' * 43}", "a folder's name is limited in bytes"


def test_flags_are_written_the_same_however_typed(hydra_loader: ConfigLoader) -> None:
    typed = ["compile=True", "compile=true", "compile=TRUE", "compile=on", "compile=1", "++compile=true"]
    cells = made(hydra_loader, sweep(hydra_loader), [[word, "model=dummy"] for word in typed])
    assert {cell.name.partition("#")[0] for cell in cells} == {
        "compile=true,model=dummy",
        "++compile=true,model=dummy",
    }
    assert cells[3].overrides == ["compile=true", "model=dummy"]
    (other,) = made(hydra_loader, sweep(hydra_loader), [["save.options={}", "deterministic=False"]])
    assert other.overrides[1] == "deterministic=false"


def test_other_folders_of_cells_are_refused(hydra_loader: ConfigLoader) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.subdir=x: applies to the complete sweep"):
        made(hydra_loader, sweep(hydra_loader), [["hydra.sweep.subdir=x", "seed=1"]])
