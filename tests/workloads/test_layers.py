"""The layers of a model that are sharded, recomputed or compiled separately."""

from typing import Any

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from dcpbench.config.groups import ActivationCheckpointing
from dcpbench.state.snapshot import plain_fqn
from dcpbench.workloads.parallelisms import fsdp2_per_layer, layers, with_layers, wrap_layers
from dcpbench.workloads.workload import workload_of
from support.alone import config, group_of_one
from support.ordinary_workloads import Blocks

BLOCKS = {"model.layers.0", "model.layers.1"}


def named(model: Any, kind: type) -> set[str]:
    names = [name for name, one in model.named_modules() if isinstance(one, kind)]
    return {plain_fqn(model, f"{name}.").rstrip(".") for name in names}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [((), {"model", "head"}), (("model.layers.*",), BLOCKS), (("*.layers.1",), {"model.layers.1"})],
)
def test_layers_are_recomputed_and_sharded(patterns: tuple[str, ...], names: set[str]) -> None:
    model = Blocks()
    wrap_layers(model, ActivationCheckpointing.layer, True, patterns)
    assert named(model, CheckpointWrapper) == names
    given = with_layers(config(parallel="fsdp2_per_layer").parallel, patterns, {})
    with group_of_one():
        fsdp2_per_layer(model, init_device_mesh("cpu", (1,)), given)
    assert named(model, FSDPModule) == {"", *names}


def test_plan_of_the_command_line_wins() -> None:
    given = config(parallel="tp").parallel
    assert with_layers(given, (), {"up": "colwise"}).tp_plan == {"up": "colwise"}
    given.tp_plan = {"down": "rowwise"}
    assert with_layers(given, (), {"up": "colwise"}).tp_plan == {"down": "rowwise"}


@pytest.mark.parametrize(
    ("patterns", "why"),
    [
        (["model.layer.*"], "layers: the model has no module model.layer.*"),
        (
            ["model.*.*", "head", "model.layers.1.up"],
            "layers: model.layers.1.up is inside model.layers.1; ",
        ),
        (["model.layers"], r"layers: model.layers is a ModuleList; pass model.layers.*"),
        ("model.layers.*", "layers='model.layers.*'; pass a list of names"),
    ],
)
def test_layers_that_cannot_be_used_are_refused(patterns: Any, why: str) -> None:
    target = "support.ordinary_workloads.blocks"
    with pytest.raises((TypeError, ValueError)) as refused:
        workload_of(config(workload={"target": target, "options": {"layers": patterns}}))
    assert str(refused.value).startswith(f"workload.target={target}: {why}")
    if not isinstance(patterns, str):
        with pytest.raises(ValueError, match="layers: "):
            layers(Blocks(), patterns)
