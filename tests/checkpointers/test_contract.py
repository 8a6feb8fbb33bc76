"""Every checkpointer loads, reads, describes and removes what it saved."""

import io
import os
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dcpbench.checkpointers.base import Checkpointer
from dcpbench.checkpointers.torch_save import TorchSaveCheckpointer
from dcpbench.code.provenance import conf_folders
from dcpbench.compare.stored import compare_stored
from dcpbench.config.groups import SaveConfig, StorageConfig
from dcpbench.config.schema import Config
from dcpbench.core.mismatch import Problem
from dcpbench.formats.audit import Entry, audit, controls
from dcpbench.state.layout import whole
from dcpbench.state.snapshot import TensorLeaf

FILES = {path.stem: path for folder in conf_folders() for path in folder.glob("checkpointer/*.yaml")}
NAMES = sorted(FILES.keys() - {"trainer"})  # which saves a trainer, and no keys
KEYS = {
    "model.w": Entry((4, 6), "torch.float32"),
    "model.half": Entry((3,), "torch.bfloat16"),
    "optimizer.param_groups.0.lr": Entry(),
    "optimizer.param_groups.0.betas": Entry(),
    "counter.seen": Entry(),
}


@dataclass
class Alone:
    """One process without a group."""

    rank: int = 0
    size: int = 1

    def group_of(self, slot: int) -> None:
        return None

    def meet(self) -> None:
        return None


class Counter:
    """A stateful object with a stream."""

    def __init__(self, seen: bytes) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": io.BytesIO(self.seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"].getvalue()


def state(factor: int) -> dict[str, Any]:
    return {
        "model": {
            "w": torch.arange(24.0).reshape(4, 6) * factor,
            "half": torch.full((3,), factor).bfloat16(),
        },
        "optimizer": {"param_groups": [{"lr": 0.1 * factor, "betas": (0.9, 0.1 * factor)}]},
        "counter": Counter(bytes([factor])),
    }


@pytest.fixture(params=NAMES)
def checkpointer(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpointer:
    target = str(OmegaConf.load(FILES[request.param]).target)
    config = Config(
        save=SaveConfig("sync", "dcpbench.checkpointers.dcp.sync"),
        storage=StorageConfig("file", "dcpbench.checkpointers.storage.file"),
    )
    try:
        made: Checkpointer = pkgutil.resolve_name(target)(tmp_path, config, Alone())
    except ModuleNotFoundError as error:  # the package that a plug-in's is about
        pytest.skip(str(error))
    return made


@pytest.fixture
def readable(checkpointer: Checkpointer) -> Checkpointer:
    """Checkpointers with a `manifest`."""
    if checkpointer.unreadable:
        pytest.skip(checkpointer.unreadable)
    return checkpointer


@pytest.fixture
def saved(checkpointer: Checkpointer, tmp_path: Path) -> str:
    place = str(tmp_path / "one")
    assert checkpointer.save(state(1), place).wait() > 0
    return place


def test_state_is_loaded_in_place(checkpointer: Checkpointer, saved: str) -> None:
    target = state(2)
    weight = target["model"]["w"]
    checkpointer.load(target, saved)
    assert target["model"]["w"] is weight
    assert torch.equal(weight, state(1)["model"]["w"])
    assert torch.equal(target["model"]["half"], state(1)["model"]["half"])
    assert target["optimizer"] == state(1)["optimizer"]
    assert target["counter"].seen == b"\x01"


def test_manifest_lists_the_contents(readable: Checkpointer, saved: str) -> None:
    manifest = readable.manifest(saved)
    assert audit(manifest, KEYS) == []
    assert all(controls(manifest, KEYS).values())
    assert readable.size(saved) == sum(manifest.found.values())


def test_readable_checkpoints_need_a_manifest(checkpointer: Checkpointer, saved: str) -> None:
    """Else a library without one would be blamed for a checkpoint without contents."""
    if checkpointer.unreadable:
        assert Checkpointer.manifest(checkpointer, saved).found == checkpointer.lengths(saved)
    else:
        with pytest.raises(TypeError, match=r"defines neither manifest\(\) nor why it is `unreadable`"):
            Checkpointer.manifest(checkpointer, saved)


def test_list_with_a_tensor_is_flattened(readable: Checkpointer, tmp_path: Path) -> None:
    """Such as the learning rates of a scheduler, if they are tensors."""
    place = str(tmp_path / "one")
    readable.save({"scheduler": {"base_lrs": [torch.ones(1), 2], "steps": [1, 2]}}, place).wait()
    held = {"scheduler.base_lrs.0", "scheduler.base_lrs.1", "scheduler.steps"}
    assert readable.manifest(place).entries.keys() == held


def test_single_tensors_are_read(readable: Checkpointer, saved: str) -> None:
    read = readable.read_tensor(saved, "model.w")
    assert read is not None
    assert torch.equal(read, state(1)["model"]["w"])
    assert readable.read_tensor(saved, "optimizer.param_groups.0.lr") is None
    assert readable.read_tensor(saved, "model.sentinel") is None


def test_files_are_read_without_the_library(readable: Checkpointer, saved: str) -> None:
    leaves = {
        f"model.{name}": TensorLeaf(value, whole(value), None) for name, value in state(1)["model"].items()
    }
    stored = readable.stored(saved)
    read = compare_stored(leaves, stored, torch.device("cpu")).compared
    assert (read.found, read.detected) == ([], dict.fromkeys(leaves, True))
    leaves["model.w"].local[3, 5] *= -1
    (finding,) = compare_stored(leaves, stored, torch.device("cpu")).compared.found
    assert (finding.name, finding.facts["index"]) == ("model.w", [3, 5])
    for path in Path(saved).iterdir():
        os.truncate(path, 10)
    read = compare_stored(leaves, stored, torch.device("cpu")).compared
    assert {finding.problem for finding in read.found} == {Problem.unreadable}


def test_checkpoint_is_replaced_and_removed(checkpointer: Checkpointer, saved: str) -> None:
    checkpointer.save(state(3), saved).wait()
    target = state(2)
    checkpointer.load(target, saved)
    assert target["counter"].seen == b"\x03"
    checkpointer.remove(saved)
    assert not Path(saved).exists()


def test_state_that_does_not_fit_is_refused(checkpointer: Checkpointer, saved: str) -> None:
    # DCP raises a CheckpointException, which is a BaseException, with the cause inside.
    other_shape = {"model": {"w": torch.zeros(5, 6)}}
    with pytest.raises(BaseException, match=r"Size mismatch between saved .* for model\.w"):
        checkpointer.load(other_shape, saved)
    with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: model\.sentinel"):
        checkpointer.load({"model": {"sentinel": torch.zeros(1)}}, saved)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"w": torch.zeros(6, 10, dtype=torch.float64)}, "Dtype mismatch between saved torch.float32 and"),
        ({"w": torch.zeros(6, 10, dtype=torch.bfloat16)}, "Dtype mismatch between saved torch.float32 and"),
    ],
)
def test_torch_save_converts_no_values(model: dict[str, torch.Tensor], told: str, tmp_path: Path) -> None:
    """DCP does, silently (docs/findings)."""
    alone = TorchSaveCheckpointer(tmp_path, Config(), Alone())
    alone.save({"model": {"w": torch.ones(6, 10)}, "epoch": 3}, str(tmp_path / "one"))
    with pytest.raises(ValueError, match=told):
        alone.load({"model": model}, str(tmp_path / "one"))
    with pytest.raises(ValueError, match="Type mismatch between saved int and a tensor for epoch"):
        alone.load({"epoch": torch.tensor(3)}, str(tmp_path / "one"))


def test_torch_save_writes_atomically(tmp_path: Path) -> None:
    alone = TorchSaveCheckpointer(tmp_path, Config(), Alone())
    place = tmp_path / "one"
    with pytest.raises(Exception, match="pickle" if sys.version_info < (3, 13) else "get local object"):
        alone.save({"model": {"w": lambda: None}}, str(place))
    assert [*place.iterdir()] == []
    alone.save(state(1), str(place))
    assert [path.name for path in place.iterdir()] == ["state.pt"]
