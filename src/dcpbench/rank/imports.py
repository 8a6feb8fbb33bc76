"""Import installed packages once for many ranks. Ranks report which ones a user's code imports; a process
that imports them becomes an agent from which later ranks are forked. The user's own files are imported in
each rank, as in a job."""

import os
import sys
from collections.abc import Mapping, Set
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType

import torch

from dcpbench.code.provenance import is_installed, owner_of
from dcpbench.core.rank_report import Imports
from dcpbench.rank.agent import redirect, serve
from dcpbench.state.process_state import open_descriptors

_OF_AGENT = {"dcpbench", "torch"}
"""Packages that the first agent has imported, but for a few modules, which take no time."""


def imported_since(modules: Set[str], variables: Mapping[str, str]) -> Imports:
    """Return what this process has imported of other installed packages since it had these modules, and
    which environment variables differ from these."""
    added = [
        name
        for name in [*sys.modules]
        if name not in modules and name.partition(".")[0] not in _OF_AGENT and is_installed(_file_of(name))
    ]
    changed = [(name, value) for name, value in os.environ.items() if variables.get(name) != value]
    return Imports(tuple(added), tuple(changed))


def main(connection: Connection, imports: Imports) -> None:
    """Import modules, as a rank did. Exit if this process then cannot be forked as the first agent can, else
    send True and be an agent."""
    for stream in (1, 2):  # packages can print
        redirect(stream, os.O_WRONLY)
    before, variables, opened = {*sys.modules}, dict(os.environ), open_descriptors()
    os.environ.update(imports.variables)
    for name in imports.modules:
        with suppress(BaseException):  # it then is imported in each rank
            import_module(name)
    os.environ.clear()
    os.environ.update(variables)
    added = {*sys.modules} - before
    own_files = [file for file in map(_file_of, added) if file and owner_of(file) == "user"]
    has_threads = len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208
    if own_files or has_threads or torch.cuda.is_initialized() or open_descriptors() != opened:
        return
    connection.send(True)
    serve(connection)


def _file_of(name: str) -> str:
    module = sys.modules.get(name)
    return str(vars(module).get("__file__") or "") if isinstance(module, ModuleType) else ""
