"""Lists in the blocks of an experiment, as YAML can write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Finished, dcpbench
from dcpbench.cli import reference
from dcpbench.core.axes import AXES

Planned = Callable[..., Finished]

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


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """Plan an experiment with these blocks, or with this text in the place of its blocks."""

    def plan(blocks: Any, *words: str, above: str = "") -> Finished:
        matrix = blocks if isinstance(blocks, str) else yaml.safe_dump(blocks, default_flow_style=True)
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment/mine.yaml").write_text(
            f"# @package _global_\n{above}\nhydra:\n  sweeper: {{matrix: {matrix}}}\n"
        )
        command = ("plan", "--json", "--config-dir", str(tmp_path), "experiment=mine", *words)
        return dcpbench(*command, folder=tmp_path / "sweep")

    return plan


@pytest.mark.slow
def test_a_list_is_a_list_of_values_for_every_axis(planned: Planned) -> None:
    groups = {name: [*key.values][:2] for name, key in reference.groups().items() if name in AXES}
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
    ended = planned({**blocks, "both": both})
    assert ended.status == 0, ended.err
    counts = {name: block["cells"] for name, block in json.loads(ended.out)["blocks"].items()}
    # Here `auto` is another spelling of `cpu`, and two spellings of a cell are one cell.
    assert counts == {**dict.fromkeys(blocks, 2), "device": 1, "both": 4}


@pytest.mark.slow
@pytest.mark.extended
def test_a_list_of_a_list_key_is_one_value(planned: Planned) -> None:
    ended = planned({"b": {"optimizer.betas": [0.9, 0.99], "save": "sync,async", "seed": [1, 2]}})
    names = [cell["cell"] for cell in json.loads(ended.out)["cells"]]
    assert names == [
        f"optimizer.betas=_0.9,0.99_,save={save},seed={seed}" for save in ("sync", "async") for seed in (1, 2)
    ]


REFUSED = {
    "flags without brackets": (
        "{b: {compile: true,false, saves: 1}}",
        "block b: false has no value; write a list in brackets: compile: [true, false]",
    ),
    "names without brackets": (
        "{b: {save: sync,async}}",
        "block b: async has no value; write a list in brackets: save: [sync, async]",
    ),
    "numbers without brackets": (
        "{b: {world_size: 2,4}}",
        "block b: 4 has no value; write a list in brackets: world_size: [2, 4]",
    ),
    "a name that is a group": (
        "{b: {compile_scope: layer,model}}",
        "block b: model has no value; write a list in brackets: compile_scope: [layer, model]",
    ),
    "null without brackets": ("{b: {save_at: 0,null}}", "null is not a key; write a list in brackets"),
    "an empty list": ("{b: {save: []}}", "save=[]: use save=a,b"),
    "a list of the command line": ('{b: {save: "[sync,async]"}}', "save=[sync,async]: use save=sync,async"),
    "a list in a list": ("{b: {save: [[sync, async]]}}", "save=[sync,async]: use save=sync,async"),
    "null of a group that needs a value": ("{b: {save: [null, sync]}}", "save=null: cannot be null"),
    "a list in a list of numbers": (
        "{b: {optimizer.betas: [[[0.9, 0.99]]]}}",
        "optimizer.betas=[[0.9,0.99]]: has a list or a mapping in its list",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*REFUSED][:1] + [pytest.param(case, marks=pytest.mark.extended) for case in [*REFUSED][1:]]
)
def test_other_lists_get_one_line(case: str, planned: Planned) -> None:
    matrix, message = REFUSED[case]
    ended = planned(matrix)
    assert (ended.status, len(ended.err.splitlines())) == (2, 1), ended.err
    assert message in ended.err


@pytest.mark.slow
@pytest.mark.extended
def test_list_in_a_defaults_list_is_refused(planned: Planned) -> None:
    ended = planned({"b": {"parallel": "ddp"}}, above="defaults: [{override /save: [sync, async]}]")
    assert ended.status == 2
    assert "save: has several values in a defaults list" in ended.err


@pytest.mark.slow
@pytest.mark.extended
def test_params_of_an_experiment_can_be_lists(planned: Planned) -> None:
    ended = planned("{b: {parallel: [ddp, hsdp]}}, params: {seed: [0, 1], save_at: [null, 0]}")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["blocks"]["b"]["cells"] == 8
