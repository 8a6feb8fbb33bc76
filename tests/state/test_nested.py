"""Keys of nested containers: the function with which DCP flattens a state dict says what is right."""

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dcpbench.compare.controls import perturb_optimizer
from dcpbench.compare.leaves import same_leaves
from dcpbench.core.state import text_of
from dcpbench.state.snapshot import leaf_slots, map_leaves, retained, snapshot_nested, snapshot_optimizer
from support.names import by_text

KEYS = st.sampled_from(["a", "b", "a.b", 0, 1])
VALUES = st.one_of(
    st.integers(0, 3), st.none(), st.builds(torch.ones, st.integers(0, 2)), st.just((torch.ones(1),))
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(KEYS, inner, max_size=3)
    kinds = st.sampled_from([dict, OrderedDict, UserDict, MappingProxyType])
    return st.one_of(st.lists(inner, max_size=3), st.builds(lambda kind, items: kind(items), kinds, mappings))


STATES = st.dictionaries(KEYS, st.recursive(VALUES, containers, max_leaves=12), max_size=3)


@given(STATES)
def test_keys_and_values_are_those_of_dcp(state: dict[Any, Any]) -> None:
    try:
        expected, _ = flatten_state_dict(state)
    except ValueError:  # DCP refuses two values under one key
        assume(False)
    assert {text_of(name): id(holder[key]) for holder, key, name in leaf_slots(state)} == {
        key: id(value) for key, value in expected.items()
    }
    assert by_text(snapshot_nested(state)).keys() == expected.keys()
    copied = map_leaves(state, lambda value, name: (value, text_of(name)))
    assert sorted(copied_key for _, copied_key in leaves(copied)) == sorted(expected)


def leaves(nested: Any) -> list[tuple[Any, str]]:
    if isinstance(nested, tuple):
        return [nested]
    values = nested.values() if isinstance(nested, dict) else nested
    return [leaf for value in values for leaf in leaves(value)]


def test_state_of_an_optimizer_is_flattened_and_changed_at_every_depth() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["rates"] = [[torch.ones(1)], {"last": 1}]
    optimizer.state[model.weight] = {"history": [[torch.zeros(2, 2)], [torch.ones(3), 5]]}
    before = retained(snapshot_optimizer(model, optimizer))
    assert by_text(before).keys() >= {
        "state.weight.history.0.0",
        "state.weight.history.1.0",
        "state.weight.history.1.1",
        "param_groups.0.rates.0.0",
        "param_groups.0.rates.1.last",
    }
    perturb_optimizer(optimizer, seed=1)
    assert same_leaves(before, snapshot_optimizer(model, optimizer)) == {("param_groups", 0, "params")}
