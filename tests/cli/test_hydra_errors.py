"""Errors of Hydra and OmegaConf as one line."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from dcpbench.cli.by_hydra import register_groups
from dcpbench.cli.words import one_line
from dcpbench.config.errors import ConfigError

pytestmark = pytest.mark.usefixtures("hydra_loader")


def refused(word: str) -> str:
    with pytest.raises(Exception, match=r".") as error:
        compose("config", [word])
    return one_line(error.value, [word])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("compile=maybe", "compile=maybe: must be true or false"),
        ("optimizer.lr=fast", "optimizer.lr=fast: must be a number or null"),
        ("timeouts.cell_s=soon", "timeouts.cell_s=soon: must be a number"),
        ("train_steps=1.5", "train_steps=1.5: must be a whole number"),
        ("saves=null", "saves=null: must be a whole number"),
        ("load_world_size=x", "load_world_size=x: must be a whole number or null"),
        ("world_size=[1]", "world_size=[1]: must be a whole number or a text"),
        ("workload.target=[a]", "workload.target=[a]: must be a text or null"),
        ("parallel.mesh=dp", "parallel.mesh=dp: must be a list, such as [a,b]"),
        ("model.options=3", "model.options=3: must be a mapping, such as {a:1}"),
        ("device=tpu", "device=tpu: invalid value; did you mean cpu? Choose one of auto, cpu, cuda"),
        ("timeouts=3", "timeouts=3: is not one value; its keys are timeouts.cell_s, timeouts.join_s, "),
        ("optimizer.betas=[0.9,b]", "optimizer.betas[1]=b: must be a number"),
        ("parallel=fspd", "parallel=fspd: unknown value; did you mean fsdp?"),
        (
            "workload.options.a.b=3",
            "options.a: unknown key; to add it, write +workload.options.a.b=3",
        ),
        ("parallel.tpp=2", "parallel.tpp: unknown key; did you mean tp?"),
        ("trus=true", "trus: unknown key; the keys are scenario, parallel, "),
        ("seed=1,", "seed=1,: ends with a comma; write seed=1"),
        ("model=tiny.build", "model=tiny.build: unknown value; your model: workload.target=tiny.build"),
        ("model=tiny.py:make", "model=tiny.py:make: unknown value; your model: workload.target=tiny.make"),
        ("checkpointer=my.Trainer", "your trainer: checkpointer=trainer workload.target=my.Trainer"),
        ("model=conf/model/mine.yaml", "is a path; write model=mine for DIR/model/mine.yaml"),
        (
            "scheduler=my.Warm",
            "write target: my.Warm into DIR/scheduler/NAME.yaml, and pass --config-dir DIR",
        ),
    ],
)
def test_errors_are_one_line(word: str, message: str) -> None:
    line = refused(word)
    assert message in line
    assert "\n" not in line


def test_value_of_a_file_is_reported_like_a_word() -> None:
    """Its types are those of the schema too."""
    from omegaconf import OmegaConf

    from dcpbench.config.schema import schema_class

    asked: dict[str, Any] = {"model": {"batch_size": "many"}}
    with pytest.raises(Exception, match=r".") as error:
        OmegaConf.merge(OmegaConf.structured(schema_class()), asked)
    assert one_line(error.value) == "model.batch_size=many: must be a whole number"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("defaults:\n  - override /hydra/sweeper: basic\n", "hydra/sweeper"),
        ("hydra: {sweeper: {_target_: nowhere.Sweeper}}\n", "_target_"),
        ("# override /hydra/sweeper: basic, _target_\nseed: 1\n", ""),
    ],
)
def test_experiment_with_another_sweeper_is_refused(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{text}")
    refused = pytest.raises(ConfigError, match=f"^experiment=mine: {name} is that of dcpbench, ")
    with refused if name else nullcontext():
        register_groups(tmp_path, "mine")
