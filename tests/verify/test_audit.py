"""The audit of a real checkpoint: a whole one has nothing to tell, and every way of damage is told."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from dcpbench.checkpointers.dcp import manifest_of
from dcpbench.records.sentences import describe
from dcpbench.verify.audit import Entry, Manifest, audit, controls, damaged_copies, expected_of
from dcpbench.verify.layout import whole
from dcpbench.verify.snapshot import Idle, TensorLeaf


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Manifest, dict[str, Entry]]:
    tensors = {"weight": torch.rand(4, 6), "count": torch.tensor(3)}
    dcp.save({"model": dict(tensors), "epoch": 7}, checkpoint_id=tmp_path, no_dist=True)
    leaves = {name: TensorLeaf(value, whole(value), None) for name, value in tensors.items()}
    metadata = FileSystemReader(tmp_path).read_metadata()
    lengths = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    return manifest_of(metadata, lengths), {**expected_of(leaves, "model."), **expected_of({"epoch": 7})}


def test_a_whole_checkpoint_has_nothing_to_tell(checkpoint: tuple) -> None:
    assert audit(*checkpoint) == []


def test_every_way_of_damage_is_told(checkpoint: tuple) -> None:
    manifest, expected = checkpoint
    damages = damaged_copies(manifest, "model.weight")
    assert len(damages) == 14
    assert [damage for damage, copy in damages.items() if not audit(copy, expected)] == []


def test_the_control_tries_every_way_and_leaves_the_checkpoint_alone(checkpoint: tuple) -> None:
    assert controls(*checkpoint) == dict.fromkeys(damaged_copies(checkpoint[0], "model.weight"), True)
    assert audit(*checkpoint) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.weight": Entry((6, 4), "torch.float32")}, "shape: to be saved (6, 4)"),
        ({"model.weight": Entry((4, 6), "torch.bfloat16")}, "dtype: to be saved torch.bfloat16"),
        ({"epoch": Entry((), "torch.int64")}, "dtype: to be saved torch.int64, in the checkpoint no tensor"),
        ({"model.weight": Entry()}, "dtype: to be saved a value, in the checkpoint torch.float32"),
        ({"model.bias": Entry()}, "to be saved, but not in the checkpoint"),
    ],
)
def test_what_was_not_to_be_saved_so_is_told(checkpoint: tuple, change: dict, told: str) -> None:
    manifest, expected = checkpoint
    found = audit(manifest, {**expected, **change})
    assert [told in describe(finding) for finding in found] == [True]


def test_entries_of_parameters_without_elements_promise_nothing() -> None:
    assert expected_of({"state.w.step": Idle(1.0), "lr": 0.1}) == {"lr": Entry()}
