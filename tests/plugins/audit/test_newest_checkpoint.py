"""The newest complete checkpoint of a training run, in layouts of trainers."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpbench.checkpointers import on_disk
from dcpbench.cli.commands import main

DATA, METADATA = "__0_0.distcp", ".metadata"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    dcp.save({"model": {"weight": torch.rand(4, 6)}, "epoch": 7}, checkpoint_id=folder, no_dist=True)
    return folder


def test_newest_complete_checkpoint_is_printed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("step-10", "run/step-20", "run/step-30", "step-40")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for item in saved.iterdir():
            (folder / item.name).write_bytes(item.read_bytes())
        for item in folder.iterdir():
            os.utime(item, (1e9 + number, 1e9 + number))
    (tmp_path / "run/step-30" / DATA).unlink()
    (tmp_path / "step-40" / METADATA).unlink()
    assert main(["audit", "--newest", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'run/step-20'}\n"
    assert f"{tmp_path / 'step-40'}: torn" in said.err
    assert f"{tmp_path / 'run/step-30'}: damaged" in said.err
    assert main(["audit", "--newest", str(tmp_path / "run/step-30")]) == 1
    assert main(["audit", "--newest", str(tmp_path / "nowhere")]) == 2


def test_folder_of_checkpoints_is_listed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("step-9", "step-10", "step-11"):
        shutil.copytree(saved, tmp_path / name)
    (tmp_path / "step-11" / METADATA).unlink()
    assert main(["audit", str(tmp_path)]) == 1
    said = [line.split(": ")[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("/")]
    states = {"step-11": "torn", "step-10": "whole", "step-9": "whole"}
    assert said == [[str(tmp_path / name), state] for name, state in states.items()]


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        (("step-900", "step-1000", "step-1100"), {}),  # torchtitan's
        (("epoch=0-step=9.ckpt", "epoch=0-step=10.ckpt", "epoch=1-step=2.ckpt"), {"meta.pt": b"hyper"}),
    ],
    ids=["torchtitan", "Lightning"],
)
def test_newest_checkpoint_has_the_highest_number(
    names: tuple[str, ...],
    beside: dict[str, bytes],
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A copy of a folder has different times; the last checkpoint is still being written."""
    run = tmp_path / "run 7" / "checkpoint"
    for age, name in enumerate(names):
        (run / name).mkdir(parents=True)
        for item in saved.iterdir():
            (run / name / item.name).write_bytes(item.read_bytes())
            os.utime(run / name / item.name, (2e9 - age, 2e9 - age))
        for item, content in beside.items():
            (run / name / item).write_bytes(content)
    (run / "last.ckpt").symlink_to(names[-1])
    (run / names[-1] / METADATA).rename(run / names[-1] / ".metadata.tmp")
    seen = on_disk.audited(run / names[0])
    assert (seen.state, [*seen.beside]) == ("whole", [*beside])
    assert main(["audit", "--newest", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run / names[1]}\n"
    assert said.err.count("torn") == said.err.count("\n") == 1
