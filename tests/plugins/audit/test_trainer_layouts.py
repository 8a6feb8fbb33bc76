"""Folders of torchtitan and Lightning, written by real ranks with the calls of these trainers."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from dcpbench.cli.commands import main
from dcpbench.plugins.audit import audit
from support.gloo_ranks import WORLD_SIZE, Ask

TITAN, LIGHTNING = "checkpoint/step-{}", "checkpoints/epoch=0-step={}.ckpt"
STEPS = (9, 10, 11)


def save_as_torchtitan(folder: str) -> None:
    """Save keys of the model, flattened keys of the optimizer, a data loader of each rank, and streams."""
    model, optimizer = _trained()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    losses = io.BytesIO()
    torch.save([0.5], losses)
    for step in STEPS:
        states: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
            "lr_scheduler": {"last_epoch": step},
            "dataloader": {f"dp_rank_{dist.get_rank()}": io.BytesIO(b"state"), "world_size": WORLD_SIZE},
            "train_state": {"step": torch.tensor(step, dtype=torch.int32), "losses": losses},
        }
        dcp.save(states, checkpoint_id=f"{folder}/{TITAN.format(step)}")


def save_as_lightning(folder: str) -> None:
    """Save model and optimizers by DCP; rank 0 then writes the rest to `meta.pt`."""
    model, optimizer = _trained()
    options = StateDictOptions(cpu_offload=True)
    for step in STEPS:
        path = Path(folder) / LIGHTNING.format(step)
        states = {
            "model": get_model_state_dict(model, options=options),
            "optimizer_0": get_optimizer_state_dict(model, optimizer, options=options),
        }
        dcp.save(states, checkpoint_id=path)
        if dist.get_rank() == 0:
            torch.save({"epoch": 0, "global_step": step, "loops": {}}, path / "meta.pt")


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    ask(save_as_torchtitan, str(folder / "titan"))
    ask(save_as_lightning, str(folder / "lightning"))
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Copy a folder, with the same time for all files."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def test_torchtitan_checkpoint_is_complete(saved: Path) -> None:
    seen = audit.audited(saved / "titan" / TITAN.format(9), data=True)
    assert (seen.state, seen.beside) == ("complete", {})
    assert len(seen.entries["optimizer.state.0.weight.exp_avg"].chunks) == WORLD_SIZE
    loaders = {f"dataloader.dp_rank_{rank}" for rank in range(WORLD_SIZE)}
    assert seen.entries.keys() > loaders | {"model.1.bias", "train_state.losses", "lr_scheduler.last_epoch"}


def test_lightning_checkpoint_is_complete(saved: Path) -> None:
    seen = audit.audited(saved / "lightning" / LIGHTNING.format(9), data=True, required=["meta.pt"])
    assert (seen.state, [*seen.beside]) == ("complete", ["meta.pt"])
    assert "optimizer_0.state.0.weight.exp_avg" in seen.entries


@pytest.mark.parametrize(("trainer", "name"), [("titan", TITAN), ("lightning", LIGHTNING)])
def test_missing_data_of_a_rank_is_reported(
    trainer: str, name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, before = (run / trainer / name.format(step) for step in (11, 10))
    (newest / "__2_0.distcp").unlink()
    assert main(["audit", str(newest)]) == 1
    assert "__2_0.distcp: " in capsys.readouterr().out
    assert main(["audit", "--newest", str(run / trainer)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{before}\n"
    assert said.err.startswith(f"dcpbench: {newest}: damaged: __2_0.distcp")


def test_folder_without_the_last_file_is_skipped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning refuses this folder, although the part of DCP is complete."""
    newest, before = (run / "lightning" / LIGHTNING.format(step) for step in (11, 10))
    (newest / "meta.pt").unlink()
    assert main(["audit", "--newest", str(run / "lightning")]) == 0
    assert capsys.readouterr().out == f"{newest}\n"
    assert main(["audit", "--newest", "--beside", "meta.pt", str(run / "lightning")]) == 0
    said = capsys.readouterr()
    assert said.out == f"{before}\n"
    assert said.err == f"dcpbench: {newest}: damaged: meta.pt: no such file\n"


def test_newest_checkpoint_with_intact_data_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a power loss a file can have its length and contain zeros."""
    newest, before = (run / "titan" / TITAN.format(step) for step in (11, 10))
    lost = newest / "__1_0.distcp"
    lost.write_bytes(bytes(lost.stat().st_size))
    assert main(["audit", "--newest", str(run / "titan")]) == 0
    assert capsys.readouterr().out == f"{newest}\n"
    assert main(["audit", "--newest", "--data", str(run / "titan")]) == 0
    assert capsys.readouterr().out == f"{before}\n"
