"""The server that ranks are forked from imports what is there: it would pass over what is not."""

from importlib.util import find_spec

from dcpbench.executors.fork_server import _PRELOADED_PACKAGES, rank_imports
from support.commands import python


def test_all_that_ranks_import_exists() -> None:
    modules = rank_imports(compiles=True)
    packages = {name.split(".")[1] for name in modules if name.startswith("dcpbench.")}
    assert {*_PRELOADED_PACKAGES} <= packages
    assert [name for name in modules if find_spec(name) is None] == []


SLOW = """
from dcpbench.executors import fork_server
fork_server._ANSWER_LIMIT_S = 0.1
fork_server.probe(fork_server.fork_server())
"""


def test_slow_import_is_no_failing_import() -> None:
    """As on a host under load: the server is ended before it has imported torch."""
    assert "ConfigError: torch was not imported within 0 s" in python("-c", SLOW).stderr
