"""The description of this machine, and the server that every rank is forked from."""

import ctypes
import multiprocessing
import os
import pkgutil
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import dcpbench
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.core.plugins import plugins
from dcpbench.core.rank_report import Imports
from dcpbench.rank.messages import Descriptor

_PRELOADED = (
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_PRELOADED_PACKAGES = ("cell", "checkpointers", "scenarios", "verify", "workloads")
"""Modules, and packages of dcpbench, that the server imports once for all ranks, which then detect whether a
cell has changed them. None of them may start CUDA."""
HASH_SEED = "PYTHONHASHSEED"
ENVIRONMENT = dict([dcpbench.SAFE_PATH]) | {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS, where deterministic=true
    # Cache keys of compiled graphs with a device mesh contain Python hashes: with a random hash seed, a
    # sweep would not find the graphs of an earlier one.
    HASH_SEED: "0",
    "OMP_NUM_THREADS": "1",  # ranks share the cores, as under torchrun
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no leaked worker pools
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Variables of every rank; those set by the user are kept."""
_PROBE = "dcpbench.rank.machine_probe"
_IMPORTING = "dcpbench.rank.import_server"

_FIRST = forkserver._forkserver
_SERVER = ContextVar("server", default=_FIRST)
"""The server that forks the next process of this thread: `multiprocessing` knows only the first one."""
forkserver.connect_to_new_process = lambda fds: _SERVER.get().connect_to_new_process(fds)

_ANSWER_LIMIT_S = 120.0
"""Time limit for the server to fork a process; before the first one it imports torch."""
_DETAILS_LIMIT_S = 10.0


@dataclass(frozen=True)
class Machine:
    """Hardware and software that cells can use. The description goes into `environment.json`. With
    `has_interpreters` ranks can run under a second interpreter."""

    gpus: int
    description: dict[str, Any]
    has_interpreters: bool = False

    @property
    def nccl(self) -> str | None:
        """Version of NCCL that ranks use, such as `2.30.7`."""
        return self.description.get("nccl")

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Memory of the smallest GPU; None if unknown, as before `Engine.details`."""
        return min(self.description.get("gpu_memory_bytes", ()), default=None)


def rank_imports(compiles: bool) -> list[str]:
    """Return the modules that the server imports for ranks, with the compiler if cells compile."""
    package = Path(dcpbench.__path__[0])
    own = [
        f"dcpbench.{name}.{module.name}"
        for name in _PRELOADED_PACKAGES
        for module in pkgutil.iter_modules([package / name])
    ]
    of_plugins = [name for plugin in plugins() for name in plugin.preload]
    compiler = ["dcpbench.rank.preload_compile"] if compiles else []
    return [*_PRELOADED, *own, *of_plugins, *compiler, "dcpbench.rank.main"]


def fork_server(imports: Sequence[str] = ()) -> ForkServerContext:
    """Return a context that forks processes from a server that has imported torch and `imports`. Pass
    `rank_imports` if ranks will be forked, which triples the time of the import."""
    # torch then counts GPUs through the driver's library. Starting CUDA would make it impossible to fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A rank has two connections to each peer in one group of Gloo, and one in each further group. A few
    # hundred ranks exceed the usual limit of 1,024 open files.
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PROBE, *imports])
    # The server imports while the driver composes the cells.
    _run(_FIRST)
    return context


def start(
    context: ForkServerContext,
    module: str,
    *arguments: Any,
    server: forkserver.ForkServer = _FIRST,
    **options: Any,
) -> tuple[Connection, ForkServerProcess]:
    """Fork a process from a server, which calls `main` of a module with a connection and these arguments;
    return the other end. `options` are of `Process`. If the server does not answer, as after SIGSTOP, the
    first one is killed, and all with it; the next process is forked from a new one.

    Raises:
        OSError, EOFError: the server did not answer, or died.
    """
    here, there = context.Pipe()
    process = context.Process(target=_main_of, args=(module, there, *arguments), **options)
    watchdog = threading.Timer(_ANSWER_LIMIT_S, end_server)
    watchdog.daemon = True
    watchdog.start()
    chosen = _SERVER.set(server)
    try:
        _run(server)
        process.start()
    finally:
        _SERVER.reset(chosen)
        watchdog.cancel()
    there.close()
    return here, process


class _ImportServer(forkserver.ForkServer):
    """A server forked from the first one, which then imports modules. It ends with the first one, and with
    the last of its clients."""

    def __init__(self, context: ForkServerContext, imports: Imports) -> None:
        """Start it, and wait for its imports. It exits if it cannot be used.

        Raises:
            OSError, EOFError: the first server could not fork it.
        """
        super().__init__()
        self._forkserver_address = str(Path(get_temp_dir(), secrets.token_hex(4)))
        alive, self._forkserver_alive_fd = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._forkserver_address)
            listener.listen()
            descriptors = Descriptor(listener.fileno()), Descriptor(alive)
            here, self.process = start(context, _IMPORTING, imports, *descriptors, daemon=True)
        os.close(alive)
        with suppress(EOFError):
            if here.poll(_ANSWER_LIMIT_S) and here.recv():
                return
        self.process.kill()
        self.process.join()

    def ensure_running(self) -> None:
        """Do nothing: it is started once."""


def server_for(context: ForkServerContext, imports: Imports) -> forkserver.ForkServer:
    """Return the server that forks ranks which import these modules: one that has imported them, unless it
    has exited, or the first one.

    Raises:
        OSError, EOFError: the first server could not fork another one.
    """
    with _starting:
        if imports.modules and imports not in _servers:
            _servers[imports] = _ImportServer(context, imports)
    server = _servers.get(imports)
    return server if server and server.process.is_alive() else _FIRST


_starting = threading.Lock()
_servers: dict[Imports, _ImportServer] = {}


def end_server() -> None:
    """Kill the server, if there is one, and all processes forked from it, and wait for its end.
    multiprocessing detects that and starts a new server for the next process."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    with suppress(ProcessLookupError, ChildProcessError):
        if server is None:
            return
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def _run(server: forkserver.ForkServer) -> None:
    """Start a server unless it runs. Until it ignores Ctrl-C, which a terminal sends to it as well, that is
    blocked."""
    resource_tracker.ensure_running()  # it unblocks Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with fixed_addresses():
            server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def fixed_addresses() -> Iterator[None]:
    """Context manager: disable address randomization for new processes, before Python 3.12.

    There hash(None), which is part of a device mesh's hash, is the address of None.
    """
    addr_no_randomize, query = 0x0040000, 0xFFFFFFFF
    if sys.version_info >= (3, 12):
        yield
        return
    personality = ctypes.CDLL(None).personality
    before = personality(query)
    personality(before | addr_no_randomize)
    try:
        yield
    finally:
        personality(before)


def probe(
    context: ForkServerContext, also: Callable[[], dict[str, Any]] = dict
) -> tuple[dict[str, Any], Connection]:
    """Describe this machine from a process forked from the server, which has then imported its modules.
    `details` receives the rest from the connection.

    Args:
        also: returns further entries of the description; called in that process.

    Raises:
        ConfigError: the process exited or did not answer, or `nccl` cannot be loaded.
    """
    began, late = time.monotonic(), f"torch was not imported within {_ANSWER_LIMIT_S:.0f} s"
    try:
        here, _ = start(context, _PROBE, also, daemon=True)  # it ends with this process
        if not here.poll(_ANSWER_LIMIT_S):
            raise ConfigError(late)
        description = here.recv()
    except (EOFError, ConnectionError):
        is_late = time.monotonic() - began > _ANSWER_LIMIT_S  # then the server was ended
        raise ConfigError(late if is_late else "torch cannot be imported here; see the error above") from None
    if error := description.pop("nccl_error"):
        raise ConfigError(error)
    return description, here


def details(connection: Connection) -> dict[str, Any]:
    """Wait for the slower part of the description of this machine. It is received once."""
    with suppress(EOFError):
        if connection.poll(_DETAILS_LIMIT_S):
            return dict(connection.recv())
    return {}


def target_error(context: ForkServerContext, configs: Sequence[Config]) -> str | None:
    """Import the `workload.target` that these configurations have in a process like a rank's. Return why no
    cell can use it, or None. Nothing of it is called. An import that takes too long is left to ranks.
    """
    # Not a daemon: an import can start processes.
    here, process = start(context, "dcpbench.rank.workload_check", configs, daemon=False)
    try:
        return here.recv() if here.poll(_ANSWER_LIMIT_S) else None
    except EOFError:
        return "cannot be imported: the process that imports it ends"
    finally:
        process.kill()


def _main_of(module: str, *arguments: Any) -> None:
    """Call `main` of a module that imports torch, in a process forked from the server."""
    import_module(module).main(*arguments)
