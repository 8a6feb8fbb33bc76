"""A scenario that dies as told, in the phase told, on the rank told; its peers go on into the next
collective."""

import ctypes
import multiprocessing
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.cell.cell import Cell
from dcpbench.checkpointers.base import PendingSave
from dcpbench.scenarios.save_load import save_load

LATE_S = 3.0
"""How long a process that `ends_late` takes to end."""

_NOBODY = 65534
_TOLD_S = 30.0


def dies(cell: Cell, how: str, phase: str, rank: int, once: bool = False, unless: str | None = None) -> None:
    """`save_load`, in which `rank` dies in `phase`, unless a file is there; `once` leaves the retry alone."""
    died = cell.folder.parent / "died"
    if (once and cell.config.repeat) or (unless and Path(unless).exists()):
        how = "not"
    if how == "not" or cell.world.rank != rank:
        save_load(cell)
        return

    def die() -> None:
        died.touch()
        WAYS[how](cell)

    if phase == "upload":  # in the thread that uploads, while the main thread continues
        honest, follow, followed = FileSystemWriter.write_data, cell.uploads.follow, threading.Event()

        def tell(pending: PendingSave) -> None:
            follow(pending)
            followed.set()

        def write_data(*arguments: Any) -> Any:
            assert followed.wait(_TOLD_S), "nobody was told that an upload is under way"
            die()
            return honest(*arguments)

        telling = mock.patch.object(cell.uploads, "follow", tell)
        with telling, mock.patch.object(FileSystemWriter, "write_data", write_data):
            save_load(cell)
    else:

        def announce(name: str) -> None:
            cell.announce(name)
            if name == phase:
                die()

        save_load(replace(cell, announce=announce))


def _raises(_: Cell) -> None:
    raise ValueError("planted")


def _raises_end_of_file(_: Cell) -> None:
    """As a pickle that was cut off does, and a pipe whose other end is gone."""
    raise EOFError("Ran out of input")


def _raises_unprintable(_: Cell) -> None:
    class Unprintable(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError

    raise Unprintable


def _out_of_memory(_: Cell) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
    torch.zeros(2**30)


def _device_out_of_memory(cell: Cell) -> None:
    torch.zeros(2**45, device=cell.world.device)


def _loops(_: Cell) -> None:
    while True:
        pass


def _receives(cell: Cell) -> None:
    """It waits for what no peer ever sends."""
    dist.recv(torch.ones(1), src=(cell.world.rank + 1) % cell.world.size)


def _sleeps(_: Cell) -> None:
    while True:
        time.sleep(60)


def _waits_for_thread(cell: Cell) -> None:
    thread = threading.Thread(target=_sleeps, args=(cell,), daemon=True)
    thread.start()
    thread.join()


def _ends_late(_: Cell) -> None:
    """As a process whose memory takes a while to be given back, or whose main thread is not the last to end:
    its connections are closed long before it is gone."""
    exit_of_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
    pipes = psutil.Process().net_connections("unix")  # which cannot be asked for once the main thread is gone

    def end() -> None:
        for pipe in pipes:
            os.close(pipe.fd)
        time.sleep(LATE_S)
        os._exit(7)

    threading.Thread(target=end).start()
    ctypes.CDLL(None).syscall(exit_of_thread, 0)


def _full_disk(cell: Cell) -> None:
    """Redirect this rank's writes to a device that is always full."""
    (checkpoint,) = cell.folder.glob("step-*")
    (checkpoint / f"__{cell.world.rank}_0.distcp").symlink_to("/dev/full")


def _file_size_limit(_: Cell) -> None:
    """Forbid every file of this rank to grow, its log like its checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


def _read_only(cell: Cell) -> None:
    """Forbid writes into the checkpoint; root could still write, so it stops being root."""
    (checkpoint,) = cell.folder.glob("step-*")
    checkpoint.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(_NOBODY)


def _leaves_child(cell: Cell) -> None:
    program = "import pathlib, sys, time\nwhile True: pathlib.Path(sys.argv[1]).touch(); time.sleep(0.02)"
    alive = cell.folder / "child.alive"
    child = subprocess.Popen([sys.executable, "-c", program, str(alive)], start_new_session=True)
    (cell.folder / "child.pid").write_text(str(child.pid))
    while not alive.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves_shared_memory(cell: Cell) -> None:
    segment = shared_memory.SharedMemory(create=True, size=1)
    other = Path(f"/dev/shm/torch_{os.getpid()}_test")
    other.write_bytes(b"1")
    lock = multiprocessing.get_context("spawn").Lock()
    semaphore = f"sem.{lock._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    (cell.folder / "segments").write_text(f"{segment.name} {other.name} {semaphore}")
    os.kill(os.getpid(), signal.SIGKILL)


def _stops_agent(_: Cell) -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    raise ValueError("planted")


def _kills_actor(_: Cell) -> None:
    """The process that owns the ranks of this host, and with it its agent and them."""
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    _sleeps(_)


def _stops_actor(_: Cell) -> None:
    """Stop that process, so that its ranks hang."""
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGSTOP)
    _sleeps(_)


def _cut_link() -> None:
    """Cut this host, a separate network namespace, off the network."""
    (link,) = {name for _, name in socket.if_nameindex()} - {"lo"}
    subprocess.run(["ip", "link", "set", link, "down"], check=True)


def _cuts_link(cell: Cell) -> None:
    _cut_link()
    _sleeps(cell)


def _writes_late(cell: Cell) -> None:
    """It is cut off, and still writes its checkpoint, once that of the retry is complete."""
    _cut_link()
    while not (complete := [*cell.folder.parents[1].glob("*/*/step-*/.metadata")]):
        time.sleep(0.005)
    late = cell.folder / complete[0].parent.name
    late.mkdir(parents=True, exist_ok=True)
    for file in complete[0].parent.iterdir():
        (late / file.name).write_bytes(b"late")
    (cell.folder.parent / "late").touch()
    _sleeps(cell)


def _kills_host(_: Cell) -> None:
    """All that there is of this host: Ray's daemon, and what it has started."""
    daemon = psutil.Process(int(os.environ["RAY_RAYLET_PID"]))
    for process in (daemon, *daemon.children(recursive=True)):
        if process.pid != os.getpid():
            process.kill()
    _sleeps(_)


WAYS: dict[str, Callable[[Cell], None]] = {
    "raises": _raises,
    "raises_end_of_file": _raises_end_of_file,
    "raises_unprintable": _raises_unprintable,
    "sys_exit": lambda _: sys.exit(3),
    "ends_late": _ends_late,
    "os_exit": lambda _: os._exit(7),
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda _: ctypes.memset(0, 0, 1) and None,
    "out_of_memory": _out_of_memory,
    "device_out_of_memory": _device_out_of_memory,
    "loops": _loops,
    "receives": _receives,
    "sleeps": _sleeps,
    "waits_for_thread": _waits_for_thread,
    "stops": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "full_disk": _full_disk,
    "file_size_limit": _file_size_limit,
    "read_only": _read_only,
    "stops_agent": _stops_agent,
    "kills_agent": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "leaves_child": _leaves_child,
    "leaves_shared_memory": _leaves_shared_memory,
    "kills_actor": _kills_actor,
    "stops_actor": _stops_actor,
    "kills_host": _kills_host,
    "cuts_link": _cuts_link,
    "writes_late": _writes_late,
}
