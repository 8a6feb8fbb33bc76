"""What this machine offers, and the fork server from which every rank is born."""

import ctypes
import multiprocessing
import os
import pkgutil
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import dcpbench
from dcpbench.config.errors import ConfigError
from dcpbench.core.plugins import plugins

_PRELOADED = (
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_OF_RANKS = ("cell", "checkpointers", "measure", "scenarios", "verify", "workloads")
"""What the server imports once, and all modules of which packages of dcpbench, so that a rank is born with it
and knows whether a cell has changed it. None of it may touch CUDA."""
_PROBE = "dcpbench.rank.machine_probe"

_ANSWER_LIMIT_S = 120.0
"""How long the server may take to fork, with the import of torch before the first time."""
_DETAILS_LIMIT_S = 10.0


def _no_other_interpreter(python: str) -> None:
    raise ConfigError(f"load_python={python}: needs executor=local; others have one interpreter alone")


@dataclass
class Machine:
    """How many GPUs there are, all that is said of it in `environment.json`, on how many hosts so many ranks
    of a kind of device are, and what versions another interpreter has, if ranks can run under it."""

    gpus: int
    description: dict[str, Any]
    _more: Connection | None = None
    hosts: Callable[[int, str], int] = lambda ranks, device: 1
    versions_of: Callable[[str], Any] = _no_other_interpreter
    import_error: Callable[[str], str | None] = lambda target: None
    """Why ranks cannot import a target; None if they can, or if it is not known."""

    @property
    def nccl(self) -> str | None:
        """The version of NCCL that ranks use, such as `2.30.7`."""
        return self.description.get("nccl")

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory of the smallest GPU, once the description is complete; None if it is unknown."""
        return min(self.description.get("gpu_memory_bytes", ()), default=None)

    def complete(self) -> None:
        """Add to the description what takes longer to find out; waits for it."""
        with suppress(EOFError):
            if self._more and self._more.poll(_DETAILS_LIMIT_S):
                self.description.update(self._more.recv())
        self._more = None


def rank_imports(compiles: bool) -> list[str]:
    """The modules of torch and dcpbench that ranks are born with, and the compiler's if cells compile."""
    package = Path(dcpbench.__path__[0])
    ours = [
        f"dcpbench.{name}.{one.name}" for name in _OF_RANKS for one in pkgutil.iter_modules([package / name])
    ]
    added = [name for plugin in plugins() for name in plugin.preload]
    compiler = ["dcpbench.rank.preload_compile"] if compiles else []
    return [*_PRELOADED, *ours, *added, *compiler, "dcpbench.rank.main"]


def fork_server(imports: Sequence[str] = ()) -> ForkServerContext:
    """The context whose processes are forked from a server that has torch imported already, and these
    modules: `rank_imports` where ranks are to be born, which takes up to three times as long.

    The defaults set here are inherited by every rank; what the user has set stays.
    """
    # Asked whether there is a GPU, torch then asks the driver's library instead of starting CUDA,
    # after which the server could not be forked from.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault(*dcpbench.SAFE_PATH)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS, where deterministic=true
    # The keys under which compiled graphs with a device mesh are kept hold Python hashes: with a random
    # hash seed no sweep finds what the one before it has compiled.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, as under torchrun
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no worker pools left behind
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A rank has two connections to each peer in a group of Gloo, and one in each further group: with some
    # hundred ranks that is more than the usual 1,024 files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PROBE, *imports])
    # It imports while the driver composes the cells.
    with _fixed_addresses():
        forkserver.ensure_running()
    return context


def start(process: ForkServerProcess) -> None:
    """Have the server fork a process. A server that does not answer (a signal may have stopped it) is ended;
    the next process comes from another one.

    Raises:
        OSError, EOFError: it did not answer, or died.
    """
    watchdog = threading.Timer(_ANSWER_LIMIT_S, end_server)
    watchdog.daemon = True
    watchdog.start()
    try:
        with _fixed_addresses():  # of a server that is started here
            process.start()
    finally:
        watchdog.cancel()


def end_server() -> None:
    """Kill the server, and with it whatever was forked from it; waits for its end, which multiprocessing sees
    when it is asked for the next process."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


@contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Have processes started here laid out at the same addresses every time, on Python below 3.12.

    There hash(None), which a device mesh's hash contains, is the address of None.
    """
    addr_no_randomize, ask = 0x0040000, 0xFFFFFFFF
    if sys.version_info >= (3, 12):
        yield
        return
    personality = ctypes.CDLL(None).personality
    before = personality(ask)
    personality(before | addr_no_randomize)
    try:
        yield
    finally:
        personality(before)


def probe(context: ForkServerContext, also: Callable[[], dict[str, Any]] = dict) -> Machine:
    """Ask a process forked from the server; the server then is warm for the ranks. `also` returns what else
    is to be in the description, and is called there.

    Raises:
        ConfigError: the process ended or went silent before it had answered, or `nccl` cannot be loaded.
    """
    here, there = context.Pipe()
    try:
        start(context.Process(target=_probe, args=(there, also), daemon=True))  # it does not outlive this one
        there.close()
        if not here.poll(_ANSWER_LIMIT_S):
            raise ConfigError(f"torch did not answer within {_ANSWER_LIMIT_S:.0f} s of its import")
        description = here.recv()
    except EOFError:
        raise ConfigError("torch cannot be imported here; see the error above") from None
    if error := description.pop("nccl_error"):
        raise ConfigError(error)
    return Machine(description["gpu_count"], description, here)


def import_error(context: ForkServerContext, target: str) -> str | None:
    """Import a target in a process like a rank's. Return why that failed, or None if it did not."""
    here, there = context.Pipe(duplex=False)
    start(context.Process(target=_import, args=(there, target), daemon=True))
    there.close()
    try:
        told: str | None = here.recv() if here.poll(_ANSWER_LIMIT_S) else None
    except EOFError:
        told = "the process that imports it ends"
    return told


def _import(connection: Connection, target: str) -> None:
    from dcpbench.records.installation import import_from_current_folder

    for stream in (1, 2):  # code of the user can print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    import_from_current_folder()
    try:
        told = None if callable(pkgutil.resolve_name(target)) else "it cannot be called"
    except BaseException as error:  # noqa: BLE001 - code of the user can raise anything
        told = f"{type(error).__name__}: {error}"
    connection.send(told)


def _probe(connection: Connection, also: Callable[[], dict[str, Any]]) -> None:
    from dcpbench.rank.machine_probe import main

    main(connection, also)
