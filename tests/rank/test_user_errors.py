"""What an exception reports of the code that raised it, and of what torch was given."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dcpbench.rank.user_errors import is_raised_in_torch, subjects, user_code, user_line


class Early(nn.Module):
    """Has a layer before it is a module."""

    def __init__(self) -> None:
        self.layer = nn.Linear(1, 1)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError(
                "needs a closure",
            )


def error_of(function: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as raised:
        function()
    error: BaseException = raised.value
    return error


def test_half_built_module_is_described() -> None:
    error = error_of(Early)
    assert is_raised_in_torch(error)
    assert "Early" in subjects(error)
    assert user_code(error) == "self.layer = nn.Linear(1, 1)"


def test_code_has_all_of_its_lines() -> None:
    optimizer = NeedsClosure(nn.Linear(1, 1).parameters(), 0.1)
    error = error_of(optimizer.step)
    assert user_code(error) == 'raise RuntimeError( "needs a closure", )'
    assert not is_raised_in_torch(error)
    names = subjects(error)
    assert {"NeedsClosure", "SGD", "Optimizer", "parameter without state"} <= {*names}


def test_state_of_no_parameter_is_named() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(layer.parameters())
    optimizer.state["step"] = {}  # type: ignore[index]
    for one in layer.parameters():
        optimizer.state[one] = {"sum": 0}
    error = error_of(optimizer.step)  # type: ignore[arg-type]
    assert is_raised_in_torch(error)
    assert "state[str]" in subjects(error)
    assert "parameter without state" not in subjects(error)


def test_library_called_by_user_is_not_torch() -> None:
    """The innermost module is the one that cannot be copied, not the one that contains it."""
    inner = nn.Linear(1, 1)
    inner.functions = copy  # type: ignore[assignment]
    error = error_of(lambda: copy.deepcopy(nn.Sequential(inner)))
    assert not is_raised_in_torch(error)
    assert subjects(error)[:2] == ("Linear", "Module")
    assert user_line(error)


def test_names_of_a_shared_module_are_listed() -> None:
    model = nn.Module()
    model.first = model.second = nn.Linear(1, 1)
    model.other = nn.Linear(1, 1)
    error = error_of(lambda: model.load_state_dict({}))
    assert {"first", "second"} <= {*subjects(error)}
    assert "other" not in subjects(error)
