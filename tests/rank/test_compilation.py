"""Graph breaks and uncompiled code are reported with their place; `backend="eager"` compiles no kernels."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from dcpbench.rank.run_cell import graph_breaks, why_not_compiled


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, backend="eager", dynamic=False)


def test_complete_graph_has_no_breaks() -> None:
    compiled(lambda x: x * 2)(torch.ones(2))
    assert why_not_compiled({"tests", "torch"}) is None
    assert graph_breaks() == []


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    return x if x.sum().item() > 0 else -x


def test_graph_break_names_its_place() -> None:
    compiled(broken)(torch.ones(2))
    assert why_not_compiled({"tests", "torch"}) is None, "both halves are compiled"
    (message,) = graph_breaks()
    assert "Tensor.item()" in message
    assert message.endswith(f"({Path(__file__)}:{broken.__code__.co_firstlineno + 2})")


def unsupported(x: torch.Tensor) -> torch.Tensor:
    with open("/dev/null"):  # noqa: PTH123 - Dynamo does not support it
        return x * 2


def test_uncompiled_function_names_its_place() -> None:
    compiled(unsupported)(torch.ones(2))
    message = str(why_not_compiled({"tests", "torch"}))
    assert message.startswith("nothing was compiled: Failed to trace builtin operator")
    assert message.endswith(f"({Path(__file__)}:{unsupported.__code__.co_firstlineno + 1})")


def test_recompile_limit_is_reported() -> None:
    scaled = compiled(lambda x, number: x * number)
    for number in range(torch._dynamo.config.recompile_limit):
        scaled(torch.ones(2), number)
    assert why_not_compiled({"tests", "torch"}) is None
    scaled(torch.ones(2), 100)
    assert "recompile limit" in str(why_not_compiled({"tests", "torch"}))


def test_stage_without_training_has_nothing_to_compile() -> None:
    assert why_not_compiled(set()) is None


def test_forwards_of_torch_alone_are_named() -> None:
    assert str(why_not_compiled({"torch"})).endswith("give the model a forward of its own")
    assert why_not_compiled({"tests", "torch"}) == "nothing was compiled"
