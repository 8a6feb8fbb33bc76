"""The process of a rank. It joins the group, runs stages that the driver sends, reports, and exits.

It is forked from an agent that has already imported torch. It leads a new session, so that the processes
that it starts can be ended with it. It dies with the agent, so that it cannot outlive a killed driver.
"""

import faulthandler
import gc
import multiprocessing.shared_memory
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.code.provenance import import_from_current_folder
from dcpbench.core.mismatch import DISK_FULL, RaisedError
from dcpbench.core.plugins import load_plugins
from dcpbench.core.rank_report import RankReport
from dcpbench.core.sentences import place_sentence, rank_sentence
from dcpbench.core.stage_end import Failed
from dcpbench.rank.agent import leave
from dcpbench.rank.imports import imported_since
from dcpbench.rank.messages import (
    OF_RANK,
    CellSpec,
    Descriptor,
    Message,
    PhaseBegun,
    RankSpec,
    UploadsInFlight,
    segments_of,
    semaphores_of,
)
from dcpbench.rank.run_cell import free_memory, left_behind, run_cell
from dcpbench.rank.user_errors import is_raised_in_torch, message_of, subjects, user_code, user_line
from dcpbench.records.plain_values import plain_report
from dcpbench.state.process_state import ProcessState
from dcpbench.workloads.world import COLLECTIVE_TIMEOUT, World, new_group

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
"""A disk with less free space is full: a failed write can leave a few blocks free."""


def main(connection: Connection, spec: RankSpec) -> None:
    """Join the group, run stages until the driver sends None, and exit."""
    # Objects of the agent's imports are never garbage. Excluding them saves half a second per collection,
    # and copies of memory pages.
    gc.freeze()
    modules, variables = {*sys.modules}, dict(os.environ)
    if spec.device == "cpu":
        # Otherwise torch's checkpointing would start CUDA if there is a GPU: seconds and 500 MB per rank.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(spec.environment)
    os.environ.update(spec.kind.environment)
    _detach()
    # Shared memory that Python leaks when it is killed can then be distinguished from other programs'.
    multiprocessing.shared_memory._SHM_NAME_PREFIX = f"/{segments_of(spec.token)}"  # type: ignore[attr-defined]
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{semaphores_of(spec.token)}"
    rank = _Rank(spec.rank, connection)
    world: World | None = None
    before: ProcessState | None = None
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
            before = before or ProcessState.now(world.device)
            rank.announce("start")
            run_cell(cell, world, report, rank.announce, lambda since: rank.send(UploadsInFlight(since)))
            report.imports = imported_since(modules, variables)
            for text in left_behind(before, world.device):
                report.note("left_behind", text)
            rank.report = None  # if sending it fails, the error must not contain it
            rank.send(report)
            rank.phase = "between cells"
            if world.device.type == "cuda":
                free_memory(world.device)
    except BaseException as error:  # noqa: BLE001 - a SystemExit in a cell is reported, too
        with suppress(OSError):  # if the disk of the log is full, the error must still be sent
            traceback.print_exc()
        rank.send(_failed(error, rank))
        # Wait until the driver ends this process: its exit would cause errors in its peers.
        with suppress(EOFError):
            connection.recv()
        _exit(1)
    _leave()


def _next_cell(connection: Connection) -> CellSpec | None:
    """Return the next stage, or None to exit. Exit at once if the driver has."""
    try:
        cell = connection.recv()
    except EOFError:
        _exit(1)
    assert cell is None or isinstance(cell, CellSpec)
    return cell


@dataclass
class _Rank:
    """The connection of this process to the driver, and the state of the running stage."""

    number: int
    connection: Connection
    cell: CellSpec | None = None
    phase: str = "join"
    report: RankReport | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, content: PhaseBegun | UploadsInFlight | Failed | RankReport) -> None:
        """Send a message about the running stage."""
        run = self.cell.run if self.cell else None
        if isinstance(content, RankReport):
            content = plain_report(content)
        elif isinstance(content, Failed) and content.report:
            content = replace(content, report=plain_report(content.report))
        with self._lock:  # an upload ends in a separate thread
            self.connection.send(Message(run, self.number, content))

    def announce(self, phase: str, note: str = "") -> None:
        """Report that a phase of the running stage begins."""
        self.phase = phase
        self.send(PhaseBegun(phase, note))


def _join(spec: RankSpec) -> World:
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # otherwise the first device mesh selects a device by rank
    kind = spec.kind
    if not kind.process_group:
        return World(spec.rank, kind.world_size, device, None, None)
    dist.init_process_group(
        f"cpu:gloo,cuda:{kind.backend}" if device.type == "cuda" else "gloo",
        store=_store(spec),
        rank=spec.rank,
        world_size=kind.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    number = 3 if device.type == "cpu" else 2
    return World(spec.rank, kind.world_size, device, *(new_group() for _ in range(number)))


def _store(spec: RankSpec) -> dist.Store:
    if isinstance(address := spec.store, Descriptor):
        return dist.FileStore(f"/proc/self/fd/{address.number}", spec.kind.world_size)
    return dist.TCPStore(
        address.host,
        address.port,
        spec.kind.world_size,
        is_master=address.listener is not None,
        timeout=COLLECTIVE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=address.listener.number if address.listener else None,
    )


def _detach() -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the agent ignores
    os.environ[OF_RANK] = str(os.getpid())
    # With this signal the driver requests every thread's stack before it ends a rank that hangs.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


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
    frames: Iterable[traceback.FrameSummary] = ()
    wrapped, origin, of_a_peer = None, None, False
    if isinstance(error, CheckpointException) and error.failures:
        # DCP raises every rank's failure on every rank: the cause is the exception inside.
        origin, (cause, frames) = min(error.failures.items())
        wrapped, of_a_peer = type(error).__name__, rank.number not in error.failures
    message, unprintable = message_of(cause)
    raised = RaisedError(
        rank.number,
        rank.phase,
        type(cause).__name__,
        message if len(message) <= _LONGEST_ERROR else f"{message[:_LONGEST_ERROR]} …",
        wrapped,
        origin,
        unprintable or _full(rank.cell.checkpoints if rank.cell else None),
        user_line(cause, frames),
        rank.report.during if rank.report and rank.phase in ("build", "train") else None,
        rank.report.raised_by if rank.report else None,
        user_code(cause, frames),
        is_raised_in_torch(cause, frames),
        subjects(cause),
    )
    secondary = of_a_peer or any(echo in message for echo in _ECHOES)
    return Failed(time.monotonic(), raised, secondary, rank.report)


def _full(checkpoints: str | None) -> str | None:
    """Return a sentence if the disk of the checkpoints is full.

    The error does not always show that: for a file that it cannot finish, torch reports a wrong position, and
    DCP does not send the original error to the other ranks.
    """
    with suppress(OSError):
        disk = shutil.disk_usage(checkpoints) if checkpoints else None
        if disk and disk.free < _FULL_BYTES:
            return f"{DISK_FULL}: {disk.free} bytes of {disk.total} are free"
    return None


def _leave() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    leave(0)


def _exit(status: int) -> NoReturn:
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk; a cell that closed it
            stream.flush()
