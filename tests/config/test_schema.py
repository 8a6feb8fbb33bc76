"""Meshes, plans and what a machine can run."""

import re
import sys
from dataclasses import fields, is_dataclass, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

from dcpbench.compose.limits import refuse_impossible, resolve, why_skip
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import (
    Device,
    ExecutorConfig,
    FaultConfig,
    ModelConfig,
    Only,
    ParallelConfig,
    ScenarioConfig,
    WorkloadConfig,
)
from dcpbench.config.schema import SEED_STRIDE, Config, TimeoutsConfig
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import HOW_RUN
from dcpbench.executors.machine import Machine
from support.alone import config

GPUS = Machine(gpus=2, description={})
NO_GPU = Machine(gpus=0, description={})


def hsdp(**sizes: int) -> ParallelConfig:
    given = {"dp_replicate": 2, "dp_shard": -1, **sizes}
    return ParallelConfig(name="hsdp", target="x", mesh=["dp_replicate", "dp_shard"], **given)


def test_every_axis_is_a_key() -> None:
    """What is declared of an axis is what its field in the configuration is."""
    made = {item.name: item for item in fields(Config)}
    assert {*AXES} <= {*made}
    assert {name for name in AXES if made[name].metadata.get(HOW_RUN)} == set()
    assert {name for name, spec in AXES.items() if spec.group != is_group(Config, name)} == set()


def is_group(config: type, name: str) -> bool:
    hint = get_type_hints(config)[name]
    return any(map(is_dataclass, (hint, *get_args(hint))))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"save_at": -1}, "save_at=-1: must be at least 0"),
        ({"executor": ExecutorConfig(hosts=0)}, "executor.hosts=0: must be at least 1"),
        (
            {"timeouts": TimeoutsConfig(cell_s=float("inf"))},
            "timeouts.cell_s=inf: must be a number of seconds",
        ),
        ({"retry": 2}, "retry=2: must be 0 or 1"),
        (
            {"workload": WorkloadConfig("src/mine.py::build")},
            "workload.target=src/mine.py::build: must be a dotted name, such as mine.build",
        ),
    ],
)
def test_value_below_its_least_is_refused(words: dict[str, Any], told: str) -> None:
    refuse_impossible(Config())
    with pytest.raises(ConfigError, match=re.escape(told)):
        refuse_impossible(Config(**words))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_rest_of_a_mesh_follows_the_world_size(world_size: int) -> None:
    assert hsdp().mesh_sizes(world_size) == {"dp_replicate": 2, "dp_shard": world_size // 2}


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (hsdp(dp_replicate=3), "cannot be made to multiply to the world size 4"),
        (hsdp(dp_shard=4), "multiplies to 8, not to the world size 4"),
        (hsdp(dp_replicate=0), "at least 1"),
        (hsdp(dp_replicate=-1), "only one of"),
        (hsdp(tp=2), "has no tp dimension"),
        (ParallelConfig(name="x", target="x", mesh=["cp"]), "unknown dimension 'cp'"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(parallel: ParallelConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parallel.mesh_sizes(4)


def test_a_plan_saves_while_it_trains() -> None:
    config = Config(train_steps=2, saves=3, resume_steps=5)
    assert config.save_steps == [2, 4, 6]
    assert config.last_step == 11
    assert Config(train_steps=2, saves=2, resume_steps=1, save_at=0).save_steps == [0, 2, 4]
    assert Config(train_steps=2, saves=2, resume_steps=1, save_at=4).save_steps == [2, 4]


def test_auto_device_depends_on_gpus() -> None:
    assert resolve(Config(), NO_GPU).device is Device.cpu
    assert resolve(Config(), NO_GPU).world_size == 4
    assert resolve(Config(), GPUS).device is Device.cuda
    assert resolve(Config(), GPUS).world_size == 2


@pytest.mark.parametrize(
    ("group", "value", "package"),
    [
        ("component", "data_loader", "torchdata"),
        ("storage", "hf_sharded", "safetensors"),
        ("storage", "fsspec_s3", "s3fs"),
    ],
)
def test_missing_package_is_skipped_with_its_name(
    monkeypatch: pytest.MonkeyPatch, group: str, value: str, package: str
) -> None:
    asked = config(**{group: value})
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    sys.modules[package].__spec__ = ModuleSpec(package, None)
    assert skipped(asked) is None
    monkeypatch.setitem(sys.modules, package, None)
    assert skipped(asked) == f"{group}={value} needs the package {package}, which is not installed"


def skipped(asked: Config, machine: Machine = NO_GPU, **how: Any) -> str | None:
    """Return why a cell is skipped there, if it is."""
    return why_skip(asked, resolve(asked, machine), machine, **how)


def scenario(**given: object) -> ScenarioConfig:
    return ScenarioConfig(name="mine", target="x", **given)  # type: ignore[arg-type]


OWN = Config(
    scenario=scenario(), model=ModelConfig("dummy", "x", batch_size=5), workload=WorkloadConfig("mine.build")
)
TP = ParallelConfig("tp", "x", mesh=["tp"], tp=4)
STALE = Config(scenario=scenario(), fault=FaultConfig("stale", "mine.stale", saves=2), saves=1)
CONVERT = scenario(converts=True)
GRAPHS = {"compile": Only(["true"], "it is about graphs")}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            Config(scenario=scenario(only=GRAPHS)),
            "scenario=mine takes compile=true and not false: it",
        ),
        (
            Config(scenario=CONVERT, load_parallel=ParallelConfig("flat", refuses=GRAPHS), compile=True),
            "load_parallel=flat does not take compile=true: it is about graphs",
        ),
        (Config(scenario=scenario(process_group=False), world_size=4), "one process without a process group"),
        (
            Config(scenario=scenario(), load_parallel=hsdp()),
            "load_parallel=hsdp: scenario=mine loads under the parallelism that it saved with",
        ),
        (
            Config(scenario=CONVERT, load_parallel=TP, model=ModelConfig(name="plain", target="x")),
            "parallel=tp: model=plain has no tp_plan",
        ),
        (STALE, "fault=stale: it needs an earlier checkpoint, and saves=1"),
        (replace(STALE, save_at=1), ""),
        (replace(OWN, parallel=hsdp()), ""),  # whose batches are not those of the group model
        (replace(OWN, parallel=TP, model=replace(OWN.model, tp_plan={"net1": "colwise"})), ""),
    ],
)
def test_senseless_cell_is_skipped_with_a_reason(config: Config, told: str) -> None:
    reason = skipped(config)
    assert bool(reason) == bool(told)
    assert told in (reason or "")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config(parallel=hsdp(dp_replicate=4), world_size=2), "world size 2"),
        (Config(parallel=hsdp(), model=ModelConfig(batch_size=5)), "model.batch_size=5"),
        (Config(scenario=CONVERT, load_parallel=hsdp(dp_replicate=3)), "cannot be made to multiply"),
        (
            Config(scenario=scenario(only={"paralel": Only(["ddp"], "of a typo")})),
            "only.paralel: unknown axis",
        ),
    ],
)
def test_what_fits_no_ranks_is_refused(config: Config, told: str) -> None:
    """Or skipped, in a sweep of several world sizes, or on a machine with too few GPUs."""
    with pytest.raises(ConfigError, match=re.escape(told)):
        skipped(config)
    if "unknown" not in told:
        assert told in (skipped(config, several_sizes=True) or "")
    assert "all that this machine has" in (skipped(Config(parallel=hsdp(dp_replicate=4)), GPUS) or "")


@pytest.mark.parametrize("asked", ["optimizer=sgd", "+model.options.width=3", "model=nested"])
def test_workload_refuses_keys_of_its_own_parts(asked: str) -> None:
    assert resolve(OWN, NO_GPU).value_of("model") == "mine.build"
    told = f"{asked}: workload.target=mine.build has its own "
    assert (skipped(OWN, overrides=["parallel=ddp", asked]) or "").startswith(told)
    assert skipped(Config(scenario=scenario()), overrides=[asked]) is None


def test_workload_ignores_the_plan_of_a_model() -> None:
    """It can have a plan, which only ranks find out."""
    asked = replace(OWN, model=replace(OWN.model, tp_plan={"net1": "colwise"}), parallel=TP)
    assert resolve(asked, NO_GPU).parallel.tp_plan == {}
    own = replace(asked, parallel=replace(TP, tp_plan={"layer": "colwise"}))
    assert resolve(own, NO_GPU).parallel.tp_plan == {"layer": "colwise"}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (ParallelConfig("tp", mesh=["tp"]), ({"net1": "colwise"}, [])),
        (ParallelConfig("tp", mesh=["tp"], sequence_parallel=True), ({"net1": "rowwise_to_sequence"}, [])),
        (ParallelConfig("tp", mesh=["tp"], tp_plan={"net2": "rowwise"}), ({"net2": "rowwise"}, [])),
        (ParallelConfig("ep", mesh=["dp_shard", "ep"]), ({}, ["experts"])),
        (ParallelConfig("ddp", mesh=["dp_replicate"]), ({}, [])),
    ],
)
def test_parallelism_takes_plans_of_the_model(
    given: ParallelConfig, taken: tuple[dict[str, str], list[str]]
) -> None:
    plans = {"tp_plan": {"net1": "colwise"}, "sp_plan": {"net1": "rowwise_to_sequence"}}
    config = Config(parallel=given, load_parallel=given)
    decided = resolve(replace(config, model=ModelConfig("m", "m", **plans, ep_plan=["experts"])), NO_GPU)
    assert decided.load_parallel
    for parallel in (decided.parallel, decided.load_parallel):
        assert (parallel.tp_plan, parallel.ep_plan) == taken


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 // SEED_STRIDE + 1, -(2**63)])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"seed={seed}: must be between -92233443668.. and 184466887"):
        refuse_impossible(Config(seed=seed))
