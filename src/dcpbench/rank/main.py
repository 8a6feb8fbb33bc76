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
import multiprocessing.shared_memory
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.core.mismatch import RaisedError
from dcpbench.core.plugins import load_plugins
from dcpbench.core.rank_report import NothingToInjectError, RankReport
from dcpbench.core.sentences import place_sentence, rank_sentence
from dcpbench.core.stage_end import Failed
from dcpbench.rank.left_behind import Fingerprint
from dcpbench.rank.messages import (
    OF_RANK,
    CellSpec,
    Message,
    PhaseBegun,
    RankSpec,
    StoreFile,
    UploadsUnderWay,
    segments_of,
    semaphores_of,
)
from dcpbench.rank.run_cell import free_memory, run_cell
from dcpbench.records.installation import import_from_current_folder
from dcpbench.records.plain_values import plain_report
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


def main(spec: RankSpec, connection: Connection) -> None:
    """Join, then run stages of cells until told to leave; the process ends here."""
    # What the server had imported is never garbage: not looking at it again saves every collection
    # half a second and the copying of its pages.
    gc.freeze()
    if spec.device == "cpu":
        # Where there is a GPU, torch's checkpointing would start CUDA: seconds, and 500 MB of it, a rank.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(spec.kind.environment)
    _detach()
    # Else what Python leaves in shared memory when it is killed has a name as any other program's.
    multiprocessing.shared_memory._SHM_NAME_PREFIX = f"/{segments_of(spec.token)}"  # type: ignore[attr-defined]
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{semaphores_of(spec.token)}"
    rank = _Rank(spec.rank, connection)
    world: World | None = None
    born: Fingerprint | None = None
    try:
        while (cell := _next_cell(connection)) is not None:
            report = RankReport(spec.rank, host=spec.host, local_rank=spec.local_rank)
            if spec.kind.python:
                report.interpreter = f"{sys.executable}: torch {torch.__version__}"
            rank.cell, rank.report = cell, report
            _log_to(Path(cell.folder) / f"rank{spec.rank}.log", spec)
            if world is None:
                load_plugins()
                world = _join(spec)
                import_from_current_folder()
            born = born or Fingerprint(world.device)
            rank.announce("start")
            run_cell(cell, world, report, rank.announce, lambda since: rank.tell(UploadsUnderWay(since)))
            report.left_behind = born.left_behind()
            rank.report = None  # it may be what cannot be sent
            rank.tell(report)
            rank.phase = "between cells"
            if world.device.type == "cuda":
                free_memory(world.device)
    except BaseException as error:  # noqa: BLE001 - a SystemExit in a cell is a finding as well
        with suppress(OSError):  # the disk that the log lies on may be full, which must be told
            traceback.print_exc()
        rank.tell(_failed(error, rank))
        # Stay until the driver ends this process: peers would take its end for the first cause.
        with suppress(EOFError):
            connection.recv()
        _exit(1)
    _leave()


def _next_cell(connection: Connection) -> CellSpec | None:
    """What to run next, None to leave; the process ends here where the driver is gone."""
    try:
        cell = connection.recv()
    except EOFError:
        _exit(1)
    assert cell is None or isinstance(cell, CellSpec)
    return cell


@dataclass
class _Rank:
    """This process as the driver knows it, and what it has seen of the stage that it runs."""

    number: int
    connection: Connection
    cell: CellSpec | None = None
    phase: str = "join"
    report: RankReport | None = None
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, content: PhaseBegun | UploadsUnderWay | Failed | RankReport) -> None:
        """Send a message about the running stage."""
        run = self.cell.run if self.cell else None
        if isinstance(content, RankReport):
            content = plain_report(content)
        elif isinstance(content, Failed) and content.report:
            content = replace(content, report=plain_report(content.report))
        with self._one_at_a_time:  # an upload ends in a thread of its own
            self.connection.send(Message(run, self.number, content))

    def announce(self, phase: str) -> None:
        """A phase of the running stage begins."""
        self.phase = phase
        self.tell(PhaseBegun(phase))


def _join(spec: RankSpec) -> World:
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # else the first device mesh selects a device by the rank
    kind = spec.kind
    if not kind.process_group:
        return World(spec.rank, kind.world_size, device, None, None)
    dist.init_process_group(
        f"cpu:gloo,cuda:{kind.backend}" if device.type == "cuda" else "gloo",
        store=_store(spec),
        rank=spec.rank,
        world_size=kind.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    number = 3 if device.type == "cpu" else 2
    groups: list[Any] = [dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT) for _ in range(number)]
    return World(spec.rank, kind.world_size, device, *groups)


def _store(spec: RankSpec) -> dist.Store:
    if isinstance(spec.store, StoreFile):
        return dist.FileStore(f"/proc/self/fd/{spec.store.file.number}", spec.kind.world_size)
    at = spec.store
    return dist.TCPStore(
        at.host,
        at.port,
        spec.kind.world_size,
        is_master=at.listener is not None,
        timeout=_COLLECTIVE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=at.listener.number if at.listener else None,
    )


def _detach() -> None:
    os.setsid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    let_server_go()
    # What a cell starts is started by Python's default, as in a program of the user's: a process that was
    # forked from a server has another server as its default, which imports everything again.
    multiprocessing.set_start_method(None, force=True)
    os.environ[OF_RANK] = str(os.getpid())
    # The driver asks for every thread's stack this way before it ends a rank that hangs.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def let_server_go() -> None:
    """In a process that was forked from the server: have that end with the driver.

    It does when nobody holds the other end of this pipe any more. What is forked from it inherits that, and
    would keep the server, and so itself, alive after the driver.
    """
    server = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)  # type: ignore[attr-defined]
    server._forkserver_alive_fd = None  # type: ignore[attr-defined]


def _log_to(path: Path, spec: RankSpec) -> None:
    _flush()
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    where = rank_sentence(spec.rank, place_sentence(spec.local_rank, spec.host))
    with suppress(OSError):  # a full disk
        os.write(2, f"{where}, process {os.getpid()}\n".encode())


def _failed(error: BaseException, rank: _Rank) -> Failed:
    cause: BaseException = error
    wrapped, origin, of_a_peer = None, None, False
    if isinstance(error, CheckpointException) and error.failures:
        # DCP tells every rank of every rank's failure: the cause is the one inside.
        origin, (cause, _) = min(error.failures.items())
        wrapped, of_a_peer = type(error).__name__, rank.number not in error.failures
    message, unprintable = _message(cause)
    raised = RaisedError(
        rank.number,
        rank.phase,
        type(cause).__name__,
        message if len(message) <= _LONGEST_ERROR else f"{message[:_LONGEST_ERROR]} …",
        wrapped,
        origin,
        unprintable or _full(rank.cell.checkpoints if rank.cell else None),
        isinstance(cause, NothingToInjectError),
    )
    secondary = of_a_peer or any(echo in message for echo in _ECHOES)
    return Failed(time.monotonic(), raised, secondary, rank.report)


def _message(error: BaseException) -> tuple[str, str | None]:
    """An exception's text on one line, or why it has none: somebody's __str__ must not hide their error."""
    try:
        return " ".join(str(error).split()), None
    except Exception as broken:  # noqa: BLE001
        return "", f"its message raised {type(broken).__name__}"


def _full(checkpoints: str | None) -> str | None:
    """That the disk of the checkpoints is full, if it is.

    The error may not say so: a file that torch cannot finish on a full disk is told as a wrong position
    in it, and of what came before DCP sends the other ranks nothing.
    """
    with suppress(OSError):
        disk = shutil.disk_usage(checkpoints) if checkpoints else None
        if disk and disk.free < _FULL_BYTES:
            return f"the disk of its checkpoints is full: {disk.free} bytes of {disk.total} are free"
    return None


def _leave() -> None:
    """Finished gloo ranks sometimes abort while the interpreter shuts down, so it never does."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # What a process that ends by itself does: its semaphores go.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    _exit(0)


def _exit(status: int) -> NoReturn:
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk; a cell that closed it
            stream.flush()
