"""Values from Python and names of folders reach the configuration as they are."""

from enum import Enum, StrEnum
from pathlib import PurePosixPath
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.config.overrides import quoted

TEXTS = (
    st.text(alphabet="\\${}'\"a1,: \n:é.-[]()=~#%", max_size=12)
    | st.sampled_from(["true", "null", "1", "1e3", "nan", "a.b", "1_0", "", "range(3)", "${oc.env:HOME}"])
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
)
NAMES = (
    st.text(alphabet="ab1_$.:=,(){}[] \\+/-", max_size=6).map("a{}".format) | st.integers() | st.booleans()
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(NAMES, inside, max_size=3),
    max_leaves=12,
)
parse = OverridesParser.create().parse_override


def typed(value: Any) -> Any:
    """The value and the types of all that is in it: True is not 1."""
    if isinstance(value, dict):
        return [(type(name), name, typed(inside)) for name, inside in value.items()]
    return [typed(one) for one in value] if isinstance(value, list) else (type(value), value)


def configured(words: str) -> Any:
    """What Hydra makes of these words, in the configuration."""
    override = parse(f"key={words}")
    assert not override.is_sweep_override()
    config = OmegaConf.create({"key": {}})
    OmegaConf.update(config, "key.own", override.value(), merge=True, force_add=True)
    return OmegaConf.to_object(config)["key"]["own"]  # type: ignore[call-overload, index]


@settings(deadline=None)
@given(VALUES)
def test_every_value_stays_what_it_is(value: Any) -> None:
    words = quoted(value)
    assert typed(configured(words)) == typed(value)
    # Sweeps write the values of their lists again.
    again = parse(f"key={words}").get_value_element_as_str()
    assert typed(configured(again)) == typed(value)


def test_values_that_yaml_has_not_become_near_ones() -> None:
    color = Enum("color", "red")
    mood = StrEnum("mood", {"good": "fine"})
    given = {"a": (1, (2,)), "b": PurePosixPath("x y"), "c": color.red, "d": mood.good}
    assert configured(quoted(given)) == {"a": [1, [2]], "b": "x y", "c": "red", "d": "fine"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (range(3), "must be a number, text, list, mapping"),
        ({"a": [object]}, "must be a number, text, list, mapping"),
        ({"a": {"1": 2}}, "'1': cannot be a name in a mapping"),
        ({None: 2}, "None: cannot be a name in a mapping"),
        ({"é": 2}, "'é': cannot be a name in a mapping"),
        ("???", "stands for a missing value"),
    ],
)
def test_values_without_a_notation_are_refused(value: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        quoted(value)
    assert problem in str(raised.value)
