"""Retained snapshots: copies of small parts, digests of large ones, and what they can still show."""

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from dcpbench.compare.leaves import compare
from dcpbench.core.rank_report import Skip
from dcpbench.core.sentences import describe
from dcpbench.core.state import Name
from dcpbench.state import snapshot
from dcpbench.state.layout import Extent, ParameterPart, whole
from dcpbench.state.snapshot import (
    DigestedLeaf,
    EmptyShard,
    Leaves,
    TensorLeaf,
    kind_of,
    named_parts,
    plain_fqn,
    retained,
    snapshot_model,
    snapshot_nested,
    snapshot_optimizer,
)
from dcpbench.workloads.models import Tied
from support.names import by_text

WHOLE = torch.arange(4000, dtype=torch.float32).reshape(50, 80)
COLUMNS = Extent((50, 80), (0, 20), (50, 40), 0, 2000)
"""Half of its columns."""


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 1000)
    monkeypatch.setattr(snapshot, "BLOCK", 300)


def live() -> Leaves:
    return {
        "w": TensorLeaf(WHOLE[:, 20:60].clone(), COLUMNS, "[Shard(1)]", "param"),
        "b": TensorLeaf(torch.ones(3), whole(torch.ones(3)), None, "buffer"),
        "lr": 0.1,
    }


class Nested(nn.Module):
    """A model with both kinds of buffers, a module with two names, and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.BatchNorm1d(3)
        self.module = Tied(3, 2)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        for module in (self, self.module):
            module.register_buffer("kept", torch.ones(2))
            module.register_buffer("table", torch.ones(2), persistent=False)


def test_plain_model_matches_its_state_dict() -> None:
    model = Nested()
    leaves, held = by_text(snapshot_model(model)), model.state_dict(keep_vars=True)
    assert leaves.keys() == held.keys()
    for name, leaf in leaves.items():
        assert leaf.local.data_ptr() == held[name].data_ptr()
        assert leaf.kind == ("param" if isinstance(held[name], nn.Parameter) else "buffer")


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_optimizer_entries_use_the_first_name() -> None:
    model = Nested()
    optimizer = stepped(model)
    leaves = by_text(snapshot_optimizer(model, optimizer))
    names = [name for name, _ in model.named_parameters()]
    entries = {f"state.{name}.{entry}" for name in names for entry in ("step", "exp_avg", "exp_avg_sq")}
    keys = {f"param_groups.0.{key}" for key in optimizer.param_groups[0]}
    assert leaves.keys() == entries | keys
    assert leaves["param_groups.0.params"] == names
    assert not any(isinstance(leaf, EmptyShard) for leaf in leaves.values()), (
        "of a parameter without elements too"
    )
    elsewhere = ParameterPart(model.nothing, Extent((4,), (4,), (0,), 0, 0))
    leaves = by_text(snapshot_optimizer(model, optimizer, named_parts(model) | {"nothing": elsewhere}))
    idle = {name for name, leaf in leaves.items() if isinstance(leaf, EmptyShard)}
    assert idle == {name for name in entries if name.startswith("state.nothing.")}


def test_only_moments_have_the_parameters_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3, bias=False)
    optimizer = stepped(model)
    place = Extent((6, 2), (3, 0), (3, 2), 0, 6)
    parts = {"weight": ParameterPart(model.weight, place)}
    monkeypatch.setattr(snapshot, "parameter_parts", lambda model: parts)
    leaves = snapshot_optimizer(model, optimizer)
    assert leaves["state", "weight", "exp_avg"].extent == snapshot_model(model)["weight",].extent == place
    assert leaves["state", "weight", "step"].extent == whole(torch.tensor(1.0))


def test_wrappers_keep_names_and_parts(mesh: DeviceMesh) -> None:
    plain = Nested()
    expected = snapshot_model(plain)
    assert snapshot_model(DistributedDataParallel(plain)).keys() == expected.keys()
    assert snapshot_model(checkpoint_wrapper(plain)).keys() == expected.keys()
    sharded = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(WHOLE, mesh, [Shard(0)]))})
    (leaf,) = snapshot_model(sharded).values()
    assert not isinstance(leaf.local, DTensor)
    assert torch.equal(leaf.local, WHOLE)
    assert leaf.placements == "(Shard(dim=0),)"


@pytest.mark.parametrize("wrapped", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_are_not_part_of_names(wrapped: str) -> None:
    assert plain_fqn(nn.Linear(1, 1), f"{wrapped}.module.{wrapped}.0.{wrapped}.weight") == "module.0.weight"
    assert plain_fqn(nn.Linear(1, 1), f"my{wrapped}.{wrapped}.weight") == f"my{wrapped}.weight"
    assert plain_fqn(nn.Linear(1, 1), f"{wrapped}s.weight") == f"{wrapped}s.weight"


@pytest.mark.parametrize(
    ("name", "leaf", "kind"),
    [
        (("w",), live()["w"], "param"),
        (("w",), retained(live())["w"], "param"),
        (("state", "w", "exp_avg"), EmptyShard(TensorLeaf(WHOLE, whole(WHOLE), None, "exp_avg")), "exp_avg"),
        (("state", "w", "step"), 3, "step"),
        (("param_groups", 0, "lr"), 0.1, "lr"),
        (("scheduler", "last_epoch"), 3, "scheduler"),
        (("epoch",), 3, "epoch"),
        (("state",), 3, "state"),
    ],
)
def test_every_leaf_has_a_kind(name: Name, leaf: object, kind: str) -> None:
    assert kind_of(name, leaf) == kind


def test_retained_leaves_do_not_change_in_any_order() -> None:
    large = live()["w"]
    state = {"one": large, "idle": EmptyShard(live()["b"]), "other": large}
    before = retained(state)
    assert all(isinstance(before[name], DigestedLeaf) for name in ("one", "other"))
    state["idle"].leaf.local[0] += 1
    assert [found.name for found in compare(before, state)] == ["idle"]


def test_small_parts_are_copied_large_ones_digested() -> None:
    state = live()
    before = retained(state)
    assert isinstance(before["w"], DigestedLeaf)
    assert len(before["w"].blocks) == math.ceil(2000 / 300)
    assert compare(before, state) == []
    for name in ("w", "b"):
        state[name].local[0] += 1
    assert [found.name for found in compare(before, state)] == ["w", "b"]


@pytest.mark.parametrize("at", [0, 299, 300, 1999])
def test_differing_blocks_are_located(at: int) -> None:
    state = live()
    before = retained(state)
    state["w"].local.view(-1).view(torch.int32)[at] ^= 1
    (found,) = compare(before, state)
    first, last = at // 300 * 300, min(at // 300 * 300 + 299, 1999)
    between = f"between index {COLUMNS.global_index(first)} and {COLUMNS.global_index(last)}"
    assert describe(found) == f"digests differ in 1 of 7 blocks, first {between}"


def test_properties_of_large_parts_are_compared() -> None:
    state = live()
    before = retained(state)
    leaf = state["w"]
    for changed, told in (
        (replace(leaf, local=leaf.local.double()), "dtype"),
        (replace(leaf, extent=replace(COLUMNS, offset=(0, 0))), "extent"),
        (replace(leaf, placements="[Replicate()]"), "placements"),
    ):
        (found,) = compare(before, {**state, "w": changed})
        assert describe(found).startswith(told)


def test_names_equal_dcps() -> None:
    rate = torch.tensor(0.1)
    state = {
        "base_lrs": [rate, 3],
        "betas": (0.9, 0.99),
        "last_lrs": [3, rate],
        "milestones": [1, 2],
        "of": {"step": rate, "names": []},
    }
    assert list(by_text(snapshot_nested(state))) == list(flatten_state_dict(state)[0])
    assert not compare(snapshot_nested(state), snapshot_nested(state))
    other = {**state, "base_lrs": [rate, 4]}
    assert [one.name for one in compare(snapshot_nested(state), snapshot_nested(other))] == ["base_lrs.1"]


def test_state_of_a_subclass_is_named() -> None:
    state = {"average": {"moment": TwoTensor(torch.zeros(2), torch.ones(2))}}
    with pytest.raises(Skip, match=r"'average\.moment' in the state, of type TwoTensor, cannot be compared"):
        snapshot_nested(state)
    with pytest.raises(Skip, match=r"'edges' in the state, of type torch.sparse_coo, cannot be compared"):
        snapshot_nested({"edges": torch.eye(2).to_sparse()})


def test_object_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(TypeError, match=r"'reader\.lock' in the state cannot be saved: cannot pickle"):
        snapshot_nested({"reader": {"lock": threading.Lock()}})
