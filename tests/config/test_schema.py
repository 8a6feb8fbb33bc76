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
    assert why_skip(asked, resolve(asked, NO_GPU), NO_GPU) is None
    monkeypatch.setitem(sys.modules, package, None)
    why = f"{group}={value} needs the package {package}, which is not installed"
    assert why_skip(asked, resolve(asked, NO_GPU), NO_GPU) == why


def test_a_mesh_too_large_for_the_machine_is_skipped() -> None:
    wide = hsdp(dp_replicate=4)
    asked = Config(parallel=wide)
    assert "all that this machine has" in (why_skip(asked, resolve(asked, GPUS), GPUS) or "")
    asked = Config(parallel=wide, world_size=2)
    with pytest.raises(ConfigError, match="world size 2"):
        why_skip(asked, resolve(asked, GPUS), GPUS)


def test_several_world_sizes_skip_what_does_not_fit() -> None:
    asked = Config(parallel=hsdp(dp_replicate=4), world_size=2)
    assert "world size 2" in (why_skip(asked, resolve(asked, GPUS), GPUS, several_sizes=True) or "")
    asked = Config(parallel=hsdp())
    asked.model.batch_size = 5
    assert "model.batch_size=5" in (why_skip(asked, resolve(asked, NO_GPU), NO_GPU, several_sizes=True) or "")


def test_batch_must_divide_over_ranks() -> None:
    asked = Config(parallel=hsdp())
    asked.model.batch_size = 5
    with pytest.raises(ConfigError, match=r"model\.batch_size=5"):
        why_skip(asked, resolve(asked, NO_GPU), NO_GPU)


def scenario(**given: object) -> ScenarioConfig:
    return ScenarioConfig(name="mine", target="x", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            Config(scenario=scenario(only={"compile": Only(["true"], "it is about graphs")})),
            "scenario=mine takes compile=true and not false: it is about graphs",
        ),
        (
            Config(
                scenario=scenario(converts=True),
                load_parallel=ParallelConfig(name="flat", refuses={"compile": Only(["true"], "it says so")}),
                compile=True,
            ),
            "load_parallel=flat does not take compile=true: it says so",
        ),
        (Config(scenario=scenario(process_group=False), world_size=4), "one process without a process group"),
        (
            Config(scenario=scenario(), load_parallel=hsdp()),
            "load_parallel=hsdp: scenario=mine loads under the parallelism that it saved with",
        ),
        (
            Config(
                scenario=scenario(converts=True),
                load_parallel=ParallelConfig(name="tp", target="x", mesh=["tp"], tp=4),
                model=ModelConfig(name="plain", target="x"),
            ),
            "parallel=tp: model=plain has no tp_plan",
        ),
    ],
)
def test_senseless_cell_is_skipped_with_a_reason(config: Config, told: str) -> None:
    reason = why_skip(config, resolve(config, NO_GPU), NO_GPU)
    assert reason is not None
    assert told in reason


def test_fault_of_an_earlier_checkpoint_needs_one() -> None:
    asked = Config(scenario=scenario(), fault=FaultConfig("stale", "mine.stale", saves=2), saves=1)
    assert (
        why_skip(asked, resolve(asked, NO_GPU), NO_GPU)
        == "fault=stale: it needs an earlier checkpoint, and saves=1"
    )
    asked.save_at = 1
    assert why_skip(asked, resolve(asked, NO_GPU), NO_GPU) is None


OWN = Config(
    scenario=scenario(), model=ModelConfig("dummy", "x", batch_size=5), workload=WorkloadConfig("mine.build")
)


def test_workload_replaces_model_and_optimizer() -> None:
    decided = resolve(OWN, NO_GPU)
    assert decided.value_of("model") == "mine.build"
    wide = replace(OWN, parallel=hsdp())
    assert why_skip(wide, resolve(wide, NO_GPU), NO_GPU) is None, (
        "its batches are not those of the group model"
    )


@pytest.mark.parametrize("asked", ["optimizer=sgd", "+model.options.width=3", "model=nested"])
def test_workload_refuses_keys_of_its_own_parts(asked: str) -> None:
    told = why_skip(OWN, resolve(OWN, NO_GPU), NO_GPU, overrides=["parallel=ddp", asked])
    assert told is not None
    assert told.startswith(f"{asked}: workload.target=mine.build has its own ")
    assert why_skip(Config(scenario=scenario()), resolve(Config(), NO_GPU), NO_GPU, overrides=[asked]) is None


def test_workload_ignores_the_plan_of_a_model() -> None:
    """It can have a plan, which only ranks find out."""
    plan = {"net1": "colwise"}
    tp = ParallelConfig("tp", "x", mesh=["tp"], tp=4)
    asked = replace(OWN, model=replace(OWN.model, tp_plan=plan), parallel=tp)
    assert resolve(asked, NO_GPU).parallel.tp_plan == {}
    assert why_skip(asked, resolve(asked, NO_GPU), NO_GPU) is None
    own = replace(asked, parallel=replace(tp, tp_plan={"layer": "colwise"}))
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


def test_unknown_axis_in_only_is_refused() -> None:
    config = Config(scenario=scenario(only={"paralel": Only(["ddp"], "of a typo")}))
    with pytest.raises(ConfigError, match=r"only\.paralel: unknown axis"):
        why_skip(config, resolve(config, NO_GPU), NO_GPU)


def test_mesh_of_the_load_must_fit() -> None:
    config = Config(scenario=scenario(converts=True), load_parallel=hsdp(dp_replicate=3))
    with pytest.raises(ConfigError, match="cannot be made to multiply"):
        why_skip(config, resolve(config, NO_GPU), NO_GPU)


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 // SEED_STRIDE + 1, -(2**63)])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"seed={seed}: must be between -92233443668.. and 184466887"):
        refuse_impossible(Config(seed=seed))
