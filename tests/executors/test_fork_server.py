"""The server that ranks are forked from imports what is there: it would pass over what is not."""

from importlib.util import find_spec

from dcpbench.executors.fork_server import _PRELOADED_PACKAGES, rank_imports


def test_all_that_ranks_import_exists() -> None:
    modules = rank_imports(compiles=True)
    packages = {name.split(".")[1] for name in modules if name.startswith("dcpbench.")}
    assert {*_PRELOADED_PACKAGES} <= packages
    assert [name for name in modules if find_spec(name) is None] == []
