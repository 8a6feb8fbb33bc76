"""A copy with values set is what Hydra would have composed."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from dcpbench.cli.run import register_groups
from dcpbench.config.schema import conf_folder
from dcpbench.sweep.plan import forked_map
from dcpbench.sweep.plan.cells import CellMaker
from dcpbench.sweep.plan.composition import Compositions
from dcpbench.sweep.plan.configurations import typed

pytestmark = pytest.mark.slow

JOBS = (
    ["parallel=ddp", "seed=1", "compile=True"],
    ["parallel=ddp", "seed=2", "compile=false"],
    ["seed=3", "parallel=hsdp", "parallel.dp_replicate=2", "model=uneven", "optimizer.lr=0.5"],
    ["experiment=seeds", "seed=1", "scenario=convert", "load_parallel=fsdp", "parallel=hsdp"],
    ["+model.options.more=3", "model.options.more=4"],
    ["save_at=3", "~experiment"],
    ["+parallel@load_parallel=ddp", "saves=1"],
    ["timeouts={cell_s: 3, save_s: 1.5}", "known_failures=null", "seed=5"],
    ["seed=6", "seed=7"],
    ["hydra.sweep.subdir=${hydra.job.override_dirname}/${seed}", "seed=8", "train_steps=3"],
)


@pytest.fixture
def hydra_loader() -> Iterator[ConfigLoader]:
    register_groups([])
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def sweep(loader: ConfigLoader) -> DictConfig:
    return loader.load_configuration("config", ["hydra.sweep.dir=x"], RunMode.MULTIRUN)


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_a_copy_is_what_hydra_composes(job: list[str], hydra_loader: ConfigLoader) -> None:
    base = sweep(hydra_loader)
    made = Compositions(hydra_loader, base)
    made.of(["parallel=ddp", "seed=99"])  # what was set for one job does not show in another
    ours, theirs = made.of(job), hydra_loader.load_sweep_config(base, job)
    assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
    assert str(ours.hydra.sweep.subdir) == str(theirs.hydra.sweep.subdir) if "hydra." in job[0] else True
    assert typed(ours) == typed(theirs)


def test_files_are_read_once_for_each_choice_of_groups(
    hydra_loader: ConfigLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = sweep(hydra_loader)
    loads = []
    load = type(hydra_loader).load_sweep_config

    def counted(self: ConfigLoader, master: DictConfig, overrides: list[str]) -> DictConfig:
        loads.append(overrides)
        return load(self, master, overrides)

    monkeypatch.setattr(type(hydra_loader), "load_sweep_config", counted)
    made = Compositions(hydra_loader, base)
    for parallel in ("ddp", "fsdp"):
        for seed in range(10):
            made.of([f"parallel={parallel}", f"seed={seed}"])
    assert loads == [["parallel=ddp"], ["parallel=fsdp"]]


LISTS = {
    "parallel": ("ddp", "fsdp2_tp", "hsdp"),
    "model": ("dummy", "nested"),
    "save": ("sync", "async"),
    "optimizer": ("adam", "sgd"),
    "seed": ("1", "2"),
}


def product(**lists: tuple[str, ...]) -> list[list[str]]:
    return [
        [f"{key}={value}" for key, value in zip(lists, values, strict=True)]
        for values in itertools.product(*lists.values())
    ]


def test_jobs_are_put_together_of_the_values_of_groups(
    hydra_loader: ConfigLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, jobs = sweep(hydra_loader), product(**LISTS)
    made = Compositions(hydra_loader, base)
    monkeypatch.setattr(forked_map, "_WORTH_S", 60)  # all of it in this process
    composed = made.composed
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(made, "composed", lambda choices: (asked.append(choices), composed(choices))[1])
    made.prepare(jobs)
    copies = [made.of(job) for job in jobs]
    told = "what is common, each group's values beside those of others, and one to compare with"
    assert len(asked) == 1 + len(LISTS["parallel"]) + 1, told
    for job, copy in list(zip(jobs, copies, strict=True))[::5]:
        theirs = hydra_loader.load_sweep_config(base, job)
        assert OmegaConf.to_container(copy) == OmegaConf.to_container(theirs)
        assert typed(copy) == typed(theirs), "model.tp_plan is parallel.tp_plan as well"


def test_a_value_that_changes_more_than_its_group_is_composed_with_all_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    dummy = (conf_folder() / "model/dummy.yaml").read_text()
    (tmp_path / "model/with_decay.yaml").write_text(
        f"# @package _global_\noptimizer: {{weight_decay: 0.125}}\nmodel:\n{indent(dummy, '  ')}"
    )
    lists = {**LISTS, "model": ("dummy", "with_decay")}
    register_groups([])
    overrides = [f"hydra.searchpath=[file://{tmp_path}]"]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        base = loader.load_configuration("config", ["hydra.sweep.dir=x", *overrides], RunMode.MULTIRUN)
        made, jobs = Compositions(loader, base), product(**lists)
        made.prepare(jobs)
        for job in jobs[1::6]:
            ours, theirs = made.of(job), loader.load_sweep_config(base, job)
            assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
            assert ours.optimizer.weight_decay == (0.125 if "model=with_decay" in job else None)


def test_what_all_jobs_ask_for_may_choose_otherwise_than_the_sweep_itself(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/even.yaml").write_text("# @package _global_\ndefaults: [override /model: even]\n")
    register_groups([])
    overrides = ["hydra.sweep.dir=x", f"hydra.searchpath=[file://{tmp_path}]"]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        base = loader.load_configuration("config", overrides, RunMode.MULTIRUN)
        made, jobs = Compositions(loader, base), product(experiment=("even",), **{**LISTS, "seed": ("1",)})
        made.prepare(jobs)
        ours, theirs = made.of(jobs[0]), loader.load_sweep_config(base, jobs[0])
        assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
        assert ours.model.name == "dummy"


@pytest.mark.parametrize(
    "wrong", [["seed=x"], ["sead=1"], ["parallel=ddb"], ["parallel=ddp", "parallel.x=1"], ["timeouts=3"]]
)
def test_a_wrong_value_is_refused_in_hydras_words(wrong: list[str], hydra_loader: ConfigLoader) -> None:
    base = sweep(hydra_loader)
    with pytest.raises(HydraException) as theirs:
        typed(hydra_loader.load_sweep_config(base, wrong))
    with pytest.raises(HydraException) as ours:
        Compositions(hydra_loader, base).of(wrong)
    assert str(ours.value) == str(theirs.value)


def test_many_choices_are_composed_beside_each_other_alike(
    hydra_loader: ConfigLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_map, "_WORTH_S", 0.01)
    monkeypatch.setattr(forked_map.os, "sched_getaffinity", lambda _: {0, 1})
    base = sweep(hydra_loader)
    jobs = [[f"parallel={name}", f"seed={seed}"] for name in ("ddp", "hsdp", "none") for seed in (1, 2)]
    wrong = ["parallel=none_such"]
    made = Compositions(hydra_loader, base)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(forked_map, "told", lambda *far: told.append(far))
    made.prepare([*jobs[:3], wrong, *jobs[3:]])
    assert told, "whoever waits sees how far it is"
    assert told[-1][0] == told[-1][1] == len(told)
    monkeypatch.setattr(type(hydra_loader), "load_sweep_config", lambda *_: pytest.fail("composed again"))
    copies = [made.of(job) for job in jobs]
    monkeypatch.undo()
    for job, copy in zip(jobs, copies, strict=True):
        assert OmegaConf.to_container(copy) == OmegaConf.to_container(
            hydra_loader.load_sweep_config(base, job)
        )
    with pytest.raises(HydraException, match="none_such"):
        made.of(wrong)


@pytest.mark.parametrize(
    ("subdir", "parallel"),
    [
        ("${hydra.job.id}", ("fsdp2_tp",)),
        ("${seed}/${hydra.job.num}", ("fsdp2_tp",)),
        ("${model.name}${hydra.job.num}", ("ddp", "fsdp2_tp")),
        (
            "${now:%Y}/${hydra.job.num}-${hydra.job.override_dirname}",
            ("fsdp2_tp",),
        ),  # save_at=${seed} is in it
        (r"a\${hydra.job.id}-${hydra.job.id}", ("fsdp2_tp",)),
    ],
)
def test_cells_are_configured_and_lie_as_hydra_has_it(
    subdir: str, parallel: tuple[str, ...], hydra_loader: ConfigLoader
) -> None:
    named = [f"hydra.sweep.subdir={subdir}", "hydra.sweep.dir=x"]
    base = hydra_loader.load_configuration("config", named, RunMode.MULTIRUN)
    # Values mention those of other axes: save_at a seed, fsdp2_tp the plan of the model.
    jobs = product(**{**LISTS, "parallel": parallel, "model": ("dummy", "even", "nested"), "seed": ("3",)})
    # A folder that is named by overrides is then named by what these mention.
    jobs = [[*job, *["save_at=${seed}"][number % 2 :]] for number, job in enumerate(jobs)]
    for job, cell in zip(jobs, CellMaker(hydra_loader, base).cells(jobs), strict=True):
        theirs = hydra_loader.load_sweep_config(base, job)
        with open_dict(theirs):
            theirs.hydra.job.update(id=cell.name, num=jobs.index(job))
        folder = Path(str(theirs.hydra.sweep.dir)).resolve() / str(theirs.hydra.sweep.subdir)
        assert (cell.folder, cell.config) == (folder, typed(theirs))
