"""Import installed packages once for many ranks. Ranks report which ones a user's code imports; a process
that imports them becomes a server from which later ranks are forked. The user's own files are imported in
each rank, as in a job."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Set
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import ModuleType

import torch

from dcpbench.code.provenance import is_installed, owner_of
from dcpbench.core.rank_report import Imports
from dcpbench.rank.messages import Descriptor
from dcpbench.verify.process_state import open_descriptors

_OF_SERVER = {"dcpbench", "torch"}
"""Packages that the first server has imported, but for a few modules, which take no time."""


def imported_since(modules: Set[str], variables: Mapping[str, str]) -> Imports:
    """Return what this process has imported of other installed packages since it had these modules, and
    which environment variables differ from these."""
    added = [
        name
        for name in [*sys.modules]
        if name not in modules and name.partition(".")[0] not in _OF_SERVER and is_installed(_file_of(name))
    ]
    changed = [(name, value) for name, value in os.environ.items() if variables.get(name) != value]
    return Imports(tuple(added), tuple(changed))


def main(connection: Connection, imports: Imports, listener: Descriptor, alive: Descriptor) -> None:
    """Import modules, as a rank did. Exit if this process then cannot be forked as the first server can, else
    send True and fork processes, as requested at `listener`, until `alive` is closed."""
    die_with_server()
    for stream in (1, 2):  # packages can print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    before, variables, opened = {*sys.modules}, dict(os.environ), open_descriptors()
    os.environ.update(imports.variables)
    for name in imports.modules:
        with suppress(BaseException):  # it then is imported in each rank
            import_module(name)
    os.environ.clear()
    os.environ.update(variables)
    added = {*sys.modules} - before | {"__mp_main__"}  # that can be a user's script
    own_files = [file for file in map(_file_of, added) if file and owner_of(file) == "user"]
    has_threads = len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208
    if own_files or has_threads or torch.cuda.is_initialized() or open_descriptors() != opened:
        return
    connection.send(True)
    connection.close()
    forkserver.main(listener.number, alive.number, [])


def die_with_server() -> None:
    """Let this process die with its server, and let the server exit with the driver.

    The server exits when the other end of this pipe is closed in all processes. Ranks inherit that end, and
    would keep the server, and so themselves, alive after the driver.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    server = forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # type: ignore[attr-defined]
    server._forkserver_alive_fd = None  # type: ignore[attr-defined]


def _file_of(name: str) -> str:
    module = sys.modules.get(name)
    return str(vars(module).get("__file__") or "") if isinstance(module, ModuleType) else ""
