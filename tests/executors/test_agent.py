"""The agent that ranks are forked from imports what is there: it would pass over what is not."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from dcpbench.executors.machine import _PRELOADED_PACKAGES, rank_imports
from support.commands import python


def test_all_that_ranks_import_exists() -> None:
    modules = rank_imports(compiles=True)
    packages = {name.split(".")[1] for name in modules if name.startswith("dcpbench.")}
    assert {*_PRELOADED_PACKAGES} <= packages
    assert [name for name in modules if find_spec(name) is None] == []


SLOW = """
from dcpbench.executors import agent, machine
agent.ANSWER_LIMIT_S = 0.1
machine.probe(agent.own_agent())
"""


def test_slow_import_is_no_failing_import() -> None:
    """As on a host under load: the agent is killed before it has imported torch."""
    assert "ConfigError: torch was not imported within 0 s" in python("-c", SLOW).stderr


KILLED = """
from dcpbench.executors import agent, machine
machine.probe(agent.own_agent())
agent.end_own_agent()
"""


def test_killed_agent_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    python("-c", KILLED, check=True)
    assert list(tmp_path.iterdir()) == []
