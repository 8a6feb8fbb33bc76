"""The newest complete checkpoint of a training run, in layouts of trainers."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpbench.cli.commands import main
from dcpbench.formats import on_disk

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


def test_checkpoints_of_sweeps_are_left_out(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "outputs/night"
    for folder in (tmp_path / "run/step-1", sweep / "parallel=ddp/checkpoints/step-2"):
        shutil.copytree(saved, folder)
    (sweep / "sweep.json").touch()
    (sweep / "environment.json").touch()
    assert main(["audit", str(tmp_path)]) == 0
    assert main(["audit", "--newest", str(tmp_path)]) == 0
    assert "step-2" not in capsys.readouterr().out
    for inside in (sweep, sweep / "parallel=ddp"):
        assert main(["audit", "--newest", str(inside)]) == 0
        assert "step-2" in capsys.readouterr().out
    for options in ([], ["--newest"]):
        assert main(["audit", *options, str(tmp_path / "outputs")]) == 2
        said = capsys.readouterr()
        assert "only sweeps of dcpbench; name one to audit it" in said.out + said.err


@pytest.fixture
def six(saved: Path, tmp_path: Path) -> Path:
    """A folder of six checkpoints: the second is damaged, the last is torn."""
    for number in range(1, 7):
        shutil.copytree(saved, tmp_path / "run" / f"step-{number}")
    os.truncate(tmp_path / "run/step-2" / DATA, 10)
    (tmp_path / "run/step-6" / METADATA).unlink()
    return tmp_path / "run"


def test_summary_counts_states(six: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(six)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    states = [line.rpartition("/")[2].split(": ")[:2] for line in lines if line.startswith("/")]
    assert [name for name, _ in states] == [f"step-{number}" for number in range(6, 0, -1)]
    assert [state for _, state in states] == ["torn", *["complete"] * 3, "damaged", "complete"]
    assert last == "6 checkpoints: 4 complete, 1 damaged, 1 torn"
    assert main(["audit", str(six / "step-1")]) == 0
    assert capsys.readouterr().out.endswith("\n1 checkpoint: 1 complete\n")
    file = six / "final.pt"
    torch.save({"step": 6}, file)
    assert main(["audit", str(six / "step-1"), str(file)]) == 2
    assert capsys.readouterr().out.endswith("\n1 checkpoint: 1 complete; not a checkpoint: 1 path\n")


def test_bad_leaves_out_complete_checkpoints(six: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--bad", str(six)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in lines if not line.startswith(" ")] == [
        [str(six / "step-6"), "torn"],
        [str(six / "step-2"), "damaged"],
        ["6 checkpoints", "4 complete, 1 damaged, 1 torn"],
    ]
    assert main(["audit", "--bad", "--json", str(six)]) == 1
    assert [audit["state"] for audit in json.loads(capsys.readouterr().out)] == ["torn", "damaged"]
    assert main(["audit", "--bad", str(six / "step-1")]) == 0
    assert capsys.readouterr().out == "1 checkpoint: 1 complete\n"
    for option in ("--bad", "--all", "--json"):
        assert main(["audit", "--newest", option, str(six)]) == 2
        assert "--newest prints one path" in capsys.readouterr().err


def test_path_without_checkpoint_is_explained(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "final.pt"
    torch.save({"step": 7}, file)
    (tmp_path / "empty").mkdir()
    reasons = {
        file: "a file; audit reads checkpoint folders that DCP or safetensors wrote",
        saved / METADATA: "a file of a checkpoint; audit the folder that contains it",
        saved / DATA: "a file of a checkpoint; audit the folder that contains it",
        tmp_path / "nowhere": "no such folder",
        tmp_path / "empty": "no DCP or safetensors checkpoint here or in a folder below",
    }
    for path, reason in reasons.items():
        assert main(["audit", str(path)]) == 2
        assert capsys.readouterr().out.startswith(f"{path}: {reason}\n")
        assert main(["audit", "--newest", str(path)]) == 2
        assert capsys.readouterr().err == f"dcpbench: {path}: {reason}\n"


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
    assert (seen.state, [*seen.beside]) == ("complete", [*beside])
    assert main(["audit", "--newest", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run / names[1]}\n"
    assert said.err.count("torn") == said.err.count("\n") == 1
