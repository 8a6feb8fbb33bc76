"""A model, data, loss and optimizer of a user's own, by `workload.target`."""

from pathlib import Path

import pytest
import torch

from conftest import ONE_STEP, Finished, run, selected, tiered
from dcpbench.config.groups import WorkloadConfig
from dcpbench.workloads.workload import each_tensor, workload_of
from support.alone import config, world

OWN = "workload.target=support.own_workload.build"


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    parallels = ",".join(selected(request, "parallel"))
    cells = ("-m", OWN, f"parallel={parallels}", "device=cpu", "world_size=2", "saves=1", *ONE_STEP)
    return run(tmp_path_factory.mktemp("own") / "sweep", *cells)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", tiered(["none", "ddp", "fsdp2"], "fsdp2"))
def test_a_language_model_with_dropout_resumes_exactly(sweep: Finished, parallel: str) -> None:
    row = sweep.row(parallel=parallel)
    assert row["status"] == "pass", row["reason"]
    compared = row["details"]["checks"]
    assert "layer.self_attn.in_proj_weight in the checkpoint of step 1" in compared["model_equal"]["control"]
    assert row["loss_at_save"] == pytest.approx(4, abs=0.5), "the cross entropy of 50 tokens"
    assert row["model"] == row["config"]["model.name"] == OWN.partition("=")[2]
    assert row["optimizer"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nowhere.build", "ModuleNotFoundError: No module named 'nowhere'"),
        ("mine.build", "AttributeError: module 'mine' has no attribute 'build'"),
        ("mine.number", "it cannot be called"),
        ("ends.build", "the process that imports it ends"),
        ("raises.build", "SystemExit: 3"),
    ],
)
def test_a_wrong_target_is_refused_before_a_cell(target: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('here')\nnumber = 3\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "raises.py").write_text("raise SystemExit(3)\n")
    words = (f"workload.target={target}", "device=cpu", "world_size=1", "parallel=none", "saves=1")
    ended = run(tmp_path / "sweep", *words, cwd=tmp_path)
    line = f"dcpbench: workload.target={target}: cannot be imported: {told}\n"
    assert (ended.status, ended.out, ended.err) == (2, "", line)
    assert not ended.folder.exists()


def test_what_is_no_workload_is_told() -> None:
    given = config()
    given.workload = WorkloadConfig("builtins.dict")
    with pytest.raises(TypeError, match=r"workload.target=builtins.dict: returned a dict, no Workload"):
        workload_of(given)


def test_batches_of_any_structure_are_shared() -> None:
    batch = {"ids": torch.arange(4), "pair": (torch.ones(4, 2), [torch.zeros(4)]), "name": "kept"}
    doubled = each_tensor(lambda tensor: tensor * 2, batch)
    assert doubled["ids"].tolist() == [0, 2, 4, 6]
    assert (doubled["pair"][0].sum().item(), type(doubled["pair"][1]), doubled["name"]) == (16, list, "kept")
    two = world(rank=1, size=2)
    assert two.share({"dp_shard": 2}, batch)["ids"].tolist() == [2, 3]
    with pytest.raises(ValueError, match="a batch of 4 samples does not divide over 3 ranks"):
        world(rank=1, size=3).share({"dp_shard": 3}, batch)
