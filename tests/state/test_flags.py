"""Flags, modes, defaults, shared memory, gradients and hooks: each change is reported by its name."""

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dcpbench.compare.leaves import compare
from dcpbench.state.flags import sharing_memory, snapshot_flags
from dcpbench.state.layout import whole
from dcpbench.state.snapshot import Leaf, Leaves, TensorLeaf, snapshot_model
from dcpbench.workloads.models import Tied
from support.names import by_text


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Leaf]:
    return by_text(snapshot_flags(model, optimizer, snapshot_model(model)))


def tied() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(Tied(4, 3), nn.Linear(4, 2))
    groups = [{"params": list(each.parameters()), "of": number} for number, each in enumerate(model)]
    return model, torch.optim.SGD(groups, lr=0.1)


def observe(*_: object) -> None:
    """A hook."""


CHANGES: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], object], set[str]]] = {
    "first parameter": (
        lambda model, _: model[0].embed.weight.requires_grad_(False),
        {"requires_grad.0.embed.weight", "requires_grad.0.head.weight"},
    ),
    "last parameter": (lambda model, _: model[1].bias.requires_grad_(False), {"requires_grad.1.bias"}),
    "root": (lambda model, _: setattr(model, "training", False), {"training.model"}),
    "module": (lambda model, _: model[0].inner.eval(), {"training.model.0.inner"}),
    "last module": (lambda model, _: model[1].eval(), {"training.model.1"}),
    "default that every load sets": (lambda _, optimizer: optimizer.defaults.pop("differentiable"), set()),
    "another in its place": (
        lambda _, optimizer: optimizer.defaults.update(differentiable=True),
        {"defaults.differentiable"},
    ),
    "default": (lambda _, optimizer: optimizer.defaults.update(lr=0.2), {"defaults.lr"}),
    "first group": (lambda _, optimizer: optimizer.param_groups[0].update(new=1), {"param_groups.0.keys"}),
    "last group": (lambda _, optimizer: optimizer.param_groups[1].pop("of"), {"param_groups.1.keys"}),
    "no longer tied": (
        lambda model, _: setattr(model[0].head, "weight", copy.deepcopy(model[0].head.weight)),
        {"shared_memory"},
    ),
    "module's hook": (lambda model, _: model[1].register_forward_pre_hook(observe), {"hooks.model"}),
    "root's hook": (lambda model, _: model.register_full_backward_hook(observe), {"hooks.model"}),
    "state dict's hook": (lambda model, _: model.register_state_dict_post_hook(observe), {"hooks.model"}),
    "load's hook": (lambda model, _: model.register_load_state_dict_pre_hook(observe), {"hooks.model"}),
    "parameter's hook": (lambda model, _: model[1].bias.register_hook(observe), {"hooks.model"}),
    "hook on gradients": (
        lambda model, _: model[1].bias.register_post_accumulate_grad_hook(observe),
        {"hooks.model"},
    ),
    "optimizer's hook": (
        lambda _, optimizer: optimizer.register_step_pre_hook(observe),
        {"hooks.optimizer"},
    ),
    "gradient of the first": (
        lambda model, _: setattr(model[0].embed.weight, "grad", torch.zeros(4, 3)),
        {"gradients", "gradients.0.embed.weight", "gradients.0.head.weight"},
    ),
    "gradient of the last": (
        lambda model, _: setattr(model[1].bias, "grad", torch.zeros(2)),
        {"gradients", "gradients.1.bias"},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_reported_by_name(change: str) -> None:
    model, optimizer = tied()
    before = snapshot(model, optimizer)
    do, told = CHANGES[change]
    do(model, optimizer)
    assert {finding.name for finding in compare(before, snapshot(model, optimizer))} == told


def test_snapshot_lists_flags() -> None:
    model, optimizer = tied()
    model[1].bias.grad = torch.ones(2)
    model[0].inner.weight.grad = torch.ones(3, 3)
    flags = snapshot(model, optimizer)
    assert flags["shared_memory"] == "0.embed.weight, 0.head.weight"
    assert flags["gradients"] == "0.inner.weight, 1.bias"
    assert flags["param_groups.0.keys"].startswith("dampening, differentiable, ")
    inner = ("", ".0", ".0.embed", ".0.head", ".0.inner", ".1")
    assert {name for name in flags if name.startswith("training")} == {
        f"training.model{one}" for one in inner
    }
    without = by_text(snapshot_flags(model, optimizer, snapshot_model(model), gradients=False))
    assert flags.keys() - without.keys() == {"gradients", "gradients.0.inner.weight", "gradients.1.bias"}
    assert without.items() <= flags.items(), "a trainer may clear them when its next step begins"


class Counting:
    """A hook that is an object."""

    def __call__(self, *_: object) -> None: ...

    def method(self, *_: object) -> None: ...


def test_hook_is_named_by_kind_and_code() -> None:
    """Hooks are listed in the order of their calls, without those of a parallelism."""
    model, optimizer = tied()
    model = checkpoint_wrapper(model)
    inner = model._checkpoint_wrapped_module
    assert snapshot(model, optimizer)["hooks.model"] == "", "the wrapper has hooks of its own"
    inner[1].register_forward_hook(functools.partial(observe, 1))
    inner[1].register_forward_hook(Counting())
    inner[0].register_load_state_dict_post_hook(Counting().method)
    inner[1].bias.register_hook(Counting.method)
    inner[1].register_forward_hook(functools.partial(functools.partial(checkpoint_wrapper)))
    optimizer.register_step_post_hook(observe)
    line, method = observe.__code__.co_firstlineno, Counting.method.__code__.co_firstlineno
    flags = snapshot(model, optimizer)
    assert flags["hooks.optimizer"] == f"_optimizer_step_post_hooks {__name__}.observe:{line}"
    assert flags["hooks.model"].split("; ") == [
        f"1.bias _backward_hooks {__name__}.Counting.method:{method}",
        f"0 _load_state_dict_post_hooks {__name__}.Counting.method:{method}",
        f"1 _forward_hooks {__name__}.observe:{line}",
        f"1 _forward_hooks {__name__}.Counting",
    ]


def test_lists_of_hooks_are_observed() -> None:
    model, optimizer = tied()
    model[1].text_hooks = [observe, (observe, "with its state, as DDP lists its own"), 3]
    model[1].number_of_hooks = 3
    line = observe.__code__.co_firstlineno
    assert snapshot(model, optimizer)["hooks.model"] == f"1 text_hooks {__name__}.observe:{line}"


def test_module_with_two_names_has_two_modes() -> None:
    shared = nn.Linear(2, 2)
    model = checkpoint_wrapper(nn.Sequential(shared, shared))
    optimizer = torch.optim.SGD(model.parameters())
    shared.eval()
    flags = snapshot(model, optimizer)
    modes = {name: mode for name, mode in flags.items() if name.startswith("training")}
    assert modes == {"training.model": True, "training.model.0": False, "training.model.1": False}


views = st.tuples(st.integers(0, 40), st.lists(st.integers(0, 4), max_size=3), st.booleans(), st.booleans())


@settings(deadline=None, max_examples=100)
@given(cut=st.lists(views, max_size=6))
def test_shared_memory_matches_brute_force(
    cut: list[tuple[int, list[int], bool, bool]],
) -> None:
    """Return views of one storage at any offset, of any shape, of two dtypes, some of them transposed."""
    storage = torch.zeros(2 * (40 + 4**3))
    state: Leaves = {"lr": 0.1}
    addresses: dict[str, set[int]] = {}
    for number, (begin, shape, transposed, wide) in enumerate(cut):
        size = torch.Size(shape).numel() * (2 if wide else 1)
        view = storage[2 * begin : 2 * begin + size]
        view = (view.view(torch.float64) if wide else view).view(shape)
        view = view.movedim(0, -1) if transposed and shape else view
        name = f"w{len(cut) - number}"
        state[name] = TensorLeaf(view, whole(view), None)
        first = view.data_ptr()
        addresses[name] = set(range(first, first + view.nbytes))
    groups = [[name] for name in addresses]
    for one, other in itertools.combinations(addresses, 2):
        if addresses[one] & addresses[other]:
            (mine,) = (group for group in groups if one in group)
            (theirs,) = (group for group in groups if other in group)
            if mine is not theirs:
                mine += theirs
                groups.remove(theirs)
    order = list(addresses)
    assert sharing_memory(state) == sorted(
        sorted(group, key=order.index) for group in groups if len(group) > 1
    )


def test_span_covers_every_dimension() -> None:
    """For a transposed view, and one that is not."""
    storage = torch.zeros(12)
    columns, rest = storage[:6].view(2, 3).t(), storage[5:]
    for one in (columns, columns.t()):
        state: Leaves = {"a": TensorLeaf(rest, whole(rest), None), "b": TensorLeaf(one, whole(one), None)}
        assert sharing_memory(state) == [["a", "b"]]
    apart = storage[6:]
    assert sharing_memory({**state, "a": TensorLeaf(apart, whole(apart), None)}) == []
