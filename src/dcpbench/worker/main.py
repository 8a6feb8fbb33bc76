"""The process of one rank: it joins the group, runs the cells it is sent, reports, and leaves.

It is forked from a server that has torch imported. It is the leader of a session of its own, so that
whatever it starts can be ended with it, and it dies with the server, so that nothing outlives a
driver that was killed.
"""

import ctypes
import datetime
import faulthandler
import gc
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.worker.messages import OF_RANK, CellSpec, Failed, PhaseBegun, Seat, UploadsUnderWay
from dcpbench.worker.run_cell import run_cell
from dcpbench.workloads.world import World

# Longer than any cell: a hang is the driver's to end, which then has every rank's stack.
_COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)

_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "recvValue failed",
    "sendBytes failed",
    "remote process exited",
)
_LONGEST_ERROR = 2000

_FULL_BYTES = 64 * 1024
"""A disk is full when no more than a few of its blocks are free: a write takes what there is."""


def main(seat: Seat, listener: socket.socket | None, connection: Connection) -> None:
    """Join, then run cells until told to leave; the process ends here."""
    # What the server had imported is never garbage: not looking at it again saves every collection
    # half a second and the copying of its pages.
    gc.freeze()
    _detach()
    _log_to(seat.log)
    phase, checkpoints = "join", None
    one_at_a_time = threading.Lock()

    def tell(message: Any) -> None:
        with one_at_a_time:  # an upload ends in a thread of its own
            connection.send(message)

    def announce(name: str) -> None:
        nonlocal phase
        phase = name
        tell(PhaseBegun(name))

    try:
        world = _join(seat, listener)
        while (spec := connection.recv()) is not None:
            assert isinstance(spec, CellSpec)
            checkpoints = spec.checkpoints
            announce("start")
            _log_to(str(Path(spec.folder) / f"rank{seat.rank}.log"))
            tell(run_cell(spec, world, announce, lambda since: tell(UploadsUnderWay(since))))
            phase = "between cells"
    except EOFError:
        _exit(1)  # the driver is gone
    except BaseException as error:  # noqa: BLE001 - a SystemExit in a cell is a finding as well
        with suppress(OSError):  # the disk that the log lies on may be full, which must be told
            traceback.print_exc()
        tell(_failed(error, phase, seat.rank, checkpoints))
        # Stay until the driver ends this process: peers would take its end for the first cause.
        _wait_for_the_end(connection)
    _leave()


def _join(seat: Seat, listener: socket.socket | None) -> World:
    device = torch.device(seat.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not seat.process_group:
        return World(seat.rank, seat.world_size, device, None)
    store = dist.TCPStore(
        "127.0.0.1",
        seat.store_port,
        seat.world_size,
        is_master=listener is not None,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    group: Any = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
    return World(seat.rank, seat.world_size, device, group)


def _detach() -> None:
    os.setsid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # The server ends when nobody holds the other end of this pipe any more. A rank inherits it, and
    # would keep the server, and so itself, alive after the driver.
    server = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # type: ignore[attr-defined]
    server._forkserver_alive_fd = None  # type: ignore[attr-defined]
    os.environ[OF_RANK] = str(os.getpid())
    # The driver asks for every thread's stack this way before it ends a rank that hangs.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _log_to(path: str) -> None:
    _flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _failed(error: BaseException, phase: str, own_rank: int, checkpoints: str | None) -> Failed:
    said = _in_words(error)
    of_a_peer = False
    if isinstance(error, CheckpointException) and error.failures:
        # DCP tells every rank of every rank's failure: the cause is the one inside.
        rank, (cause, _) = min(error.failures.items())
        said = f"CheckpointException: on rank {rank}: {_in_words(cause)}"
        of_a_peer = own_rank not in error.failures
    found = "; ".join(getattr(error, "__notes__", []))
    if found:
        said = f"{said} (before that {found})"
    secondary = of_a_peer or any(echo in said for echo in _ECHOES)
    return Failed(time.monotonic(), phase, _short(" ".join(said.split())) + _full(checkpoints), secondary)


def _full(checkpoints: str | None) -> str:
    """That the disk of the checkpoints is full, if it is.

    The error may not say so: a file that torch cannot finish on a full disk is told as a wrong position
    in it, and of what came before DCP sends the other ranks nothing.
    """
    try:
        disk = shutil.disk_usage(checkpoints) if checkpoints else None
    except OSError:
        return ""
    if disk is None or disk.free >= _FULL_BYTES:
        return ""
    return f" (the disk of its checkpoints is full: {disk.free} bytes of {disk.total} are free)"


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception as broken:  # noqa: BLE001 - somebody's __str__ must not hide their error
        return f"{type(error).__name__} (its message raised {type(broken).__name__})"


def _short(said: str) -> str:
    return said if len(said) <= _LONGEST_ERROR else f"{said[:_LONGEST_ERROR]} …"


def _wait_for_the_end(connection: Connection) -> None:
    with suppress(EOFError):
        connection.recv()
    _exit(1)


def _leave() -> None:
    """Finished gloo ranks sometimes abort while the interpreter shuts down, so it never does."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # What a process that ends by itself does: its semaphores go.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    _exit(0)


def _exit(status: int) -> None:
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk; a cell that closed it
            stream.flush()
