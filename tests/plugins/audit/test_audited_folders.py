"""`dcpbench audit`: what it prints of checkpoints, and which one is the newest complete one of a run."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conftest import Command
from support.commands import python

DATA, METADATA = "__0_0.distcp", ".metadata"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    state = {"weight": torch.rand(4, 6), "bias": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.save({"model": state, "epoch": 7}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_checkpoint_in_json_has_its_keys(saved: Path, command: Command) -> None:
    (seen,) = command("audit", "--json", saved).json()
    assert (seen["state"], seen["because"], seen["findings"]) == ("complete", None, [])
    assert seen["bytes"] == sum(item.stat().st_size for item in saved.iterdir())
    chunk = {"offsets": [0, 0], "sizes": [4, 6], "file": DATA}
    weight = {"dtype": "torch.float32", "shape": [4, 6], "chunks": [chunk]}
    assert seen["keys"]["model.weight"] == weight
    value = {"dtype": None, "shape": None, "chunks": [{"offsets": [], "sizes": [], "file": DATA}]}
    assert seen["keys"]["epoch"] == value


def test_audit_does_not_import_torch(saved: Path) -> None:
    ended = python("-X", "importtime", "-m", "dcpbench", "audit", str(saved), check=True)
    assert "| torch\n" not in ended.stderr
    assert "| pandas\n" not in ended.stderr


def test_other_files_are_listed_separately(saved: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(saved, tmp_path / "step-1")
    (tmp_path / "step-1/trainer").mkdir()
    (tmp_path / "step-1/trainer/config.json").write_text("{}")
    assert command("audit", "--json", tmp_path).json()[0]["beside"] == ["trainer/config.json"]
    assert "\n  2 B in 1 unreferenced file: trainer/config.json\n" in command("audit", tmp_path).out


@pytest.fixture
def six(saved: Path, tmp_path: Path) -> Path:
    """A folder of six checkpoints: the second is damaged, the last is torn."""
    for number in range(1, 7):
        shutil.copytree(saved, tmp_path / "run" / f"step-{number}")
    os.truncate(tmp_path / "run/step-2" / DATA, 10)
    (tmp_path / "run/step-6" / METADATA).unlink()
    return tmp_path / "run"


def test_several_checkpoints_are_counted(six: Path, command: Command) -> None:
    out = command("audit", six, status=1).out
    *lines, last = out.splitlines()
    states = [line.rpartition("/")[2].split(": ")[:2] for line in lines if line.startswith("/")]
    assert [name for name, _ in states] == [f"step-{number}" for number in range(6, 0, -1)]
    assert [state for _, state in states] == ["torn", *["complete"] * 3, "damaged", "complete"]
    assert last == "6 checkpoints: 4 complete, 1 damaged, 1 torn"
    assert "chunks" not in out, "with several, only their states are printed"
    torch.save({"step": 6}, six / "final.pt")
    out = command("audit", six / "step-1", six / "final.pt", "/nowhere", status=2).out
    assert out.splitlines()[-1] == "1 checkpoint: 1 complete; not a checkpoint: 2 paths"


def test_bad_leaves_out_complete_checkpoints(six: Path, command: Command) -> None:
    out = command("audit", "--bad", six, status=1).out
    assert [line.split(": ")[:2] for line in out.splitlines() if not line.startswith(" ")] == [
        [str(six / "step-6"), "torn"],
        [str(six / "step-2"), "damaged"],
        ["6 checkpoints", "4 complete, 1 damaged, 1 torn"],
    ]
    bad = command("audit", "--bad", "--json", six, status=1).json()
    assert [one["state"] for one in bad] == ["torn", "damaged"]
    assert command("audit", "--bad", six / "step-1").out == "1 checkpoint: 1 complete\n"
    for option in ("--bad", "--all", "--json"):
        assert "--newest prints one path" in command("audit", "--newest", option, six, status=2).err


def test_path_without_checkpoint_is_explained(saved: Path, tmp_path: Path, command: Command) -> None:
    torch.save({"step": 7}, tmp_path / "final.pt")
    (tmp_path / "empty").mkdir()
    reasons = {
        tmp_path / "final.pt": "a file; audit reads checkpoint folders that DCP or safetensors wrote",
        saved / METADATA: "a file of a checkpoint; audit the folder that contains it",
        saved / DATA: "a file of a checkpoint; audit the folder that contains it",
        tmp_path / "nowhere": "no such folder",
        tmp_path / "empty": "no DCP or safetensors checkpoint here or in a folder below",
    }
    for path, reason in reasons.items():
        assert command("audit", path, status=2).out.startswith(f"{path}: {reason}\n")
        newest = command("audit", "--newest", path, status=2)
        assert newest.refusal() == f"dcpbench: {path}: {reason}\n"


def test_checkpoints_of_sweeps_are_left_out(saved: Path, tmp_path: Path, command: Command) -> None:
    sweep = tmp_path / "outputs/night"
    for folder in (tmp_path / "run/step-1", sweep / "parallel=ddp/checkpoints/step-2"):
        shutil.copytree(saved, folder)
    (sweep / "sweep.json").touch()
    (sweep / "environment.json").touch()
    for options in ([], ["--newest"]):
        assert "step-2" not in command("audit", *options, tmp_path).out
        refused = command("audit", *options, tmp_path / "outputs", status=2)
        assert "only sweeps of dcpbench; name one to audit it" in refused.out + refused.err
    for inside in (sweep, sweep / "parallel=ddp"):
        assert "step-2" in command("audit", "--newest", inside).out


def test_newest_checkpoint_is_the_last_written(saved: Path, tmp_path: Path, command: Command) -> None:
    for number, name in enumerate(("step-10", "run/step-20", "run/step-30", "step-40")):
        shutil.copytree(saved, tmp_path / name)
        for item in (tmp_path / name).iterdir():
            os.utime(item, (1e9 + number, 1e9 + number))
    (tmp_path / "run/step-30" / DATA).unlink()
    (tmp_path / "step-40" / METADATA).unlink()
    newest = command("audit", "--newest", tmp_path)
    assert newest.out == f"{tmp_path / 'run/step-20'}\n"
    assert f"{tmp_path / 'step-40'}: torn" in newest.err
    assert f"{tmp_path / 'run/step-30'}: damaged: {DATA}: " in newest.err
    command("audit", "--newest", tmp_path / "run/step-30", status=1)


@pytest.mark.parametrize(
    "names",
    [
        ("step-900", "step-1000", "step-1100"),
        ("epoch=0-step=9.ckpt", "epoch=0-step=10.ckpt", "epoch=1-step=2.ckpt"),
    ],
    ids=["torchtitan", "Lightning"],
)
def test_newest_checkpoint_has_the_highest_number(
    names: tuple[str, ...], saved: Path, tmp_path: Path, command: Command
) -> None:
    """A copy of a folder has different times; the last checkpoint is still being written. A file is of zeros
    after a power loss; Lightning refuses a folder without `meta.pt`, though the part of DCP is complete."""
    run = tmp_path / "run 7" / "checkpoint"
    for age, name in enumerate(names):
        shutil.copytree(saved, run / name)
        (run / name / "meta.pt").write_bytes(b"hyper")
        for item in (run / name).iterdir():
            os.utime(item, (2e9 - age, 2e9 - age))
    first, newest, last = (run / name for name in names)
    (run / "last.ckpt").symlink_to(last)
    (last / METADATA).rename(last / ".metadata.tmp")

    def found(*words: str) -> tuple[str, list[str]]:
        newest = command("audit", "--newest", *words, tmp_path)
        return newest.out.strip(), newest.err.splitlines()

    path, complaints = found("--beside", "meta.pt", "--data")
    assert (path, [line.partition(":")[2] for line in complaints]) == (
        str(newest),
        [f" {last}: torn: no .metadata, which is written last: its save did not finish"],
    )
    (newest / "meta.pt").unlink()
    assert found()[0] == str(newest)
    path, complaints = found("--beside", "meta.pt")
    assert (path, complaints[1]) == (str(first), f"dcpbench: {newest}: damaged: meta.pt: no such file")
    (newest / DATA).write_bytes(bytes((newest / DATA).stat().st_size))
    assert found()[0] == str(newest)
    assert found("--data")[0] == str(first)
