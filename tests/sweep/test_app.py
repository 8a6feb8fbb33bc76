"""The agent of the ranks, which starts before the configuration is read."""

from typing import Any

import pytest

from dcpbench.cli import run
from dcpbench.cli.commands import main


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        ("seed=1 sead=1", ["torch._dynamo", "dcpbench.rank.main"]),
        ("seed=1 sead=1 compile=true", ["dcpbench.rank.preload_compile"]),
        ("plan sead=1", []),
        ("sead=1 executor=ray", None),
        ("sead=1 --cfg job", None),
    ],
)
def test_agent_of_a_refused_sweep_is_ended(
    words: str, begun: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on importing torch, with the pipes of the driver open."""
    calls: list[Any] = []
    monkeypatch.setattr(run, "own_agent", calls.append)
    monkeypatch.setattr(run, "end_own_agent", lambda: calls.append("ended"))
    assert main(words.split()) == 2
    *imports, last = calls
    assert last == "ended"
    assert len(imports) == (begun is not None)
    for imported in imports:
        assert {*imported} >= {*(begun or ())}
        assert bool(imported) == bool(begun)
