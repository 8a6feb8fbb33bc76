"""Processes and shared memory that ranks leave behind: found, ended, removed.

The driver adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER): whatever a rank started stays a descendant
of the driver, also when the rank is dead and the child has a session of its own.
"""

import ctypes
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

from dcpbench.rank.messages import OF_RANK, segments_of, semaphores_of

_ENDED_S = 4.0
_ROUNDS = 5
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is what is looked after
_KINDS = ("torch_", "psm_", "nccl-", "sem.mp-")
"""How torch, Python and NCCL begin the names of what they leave in shared memory when they are killed, in any
program."""


@dataclass(frozen=True)
class SharedMemoryOf:
    """Knows what some ranks have made: what they had open (`held`), and what has the id of one of their
    processes or their `token` in its name."""

    held: Collection[str]
    processes: Collection[int | None]
    token: str

    def has(self, name: str) -> bool:
        """Whether a segment is theirs."""
        by_token = segments_of(self.token), f"sem.{semaphores_of(self.token)}-"
        by_process = (f"torch_{pid}_" for pid in self.processes)
        return name in self.held or name.startswith((*by_token, *by_process))


def adopt_orphans() -> None:
    """Have processes whose parent ends become children of this one."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_families(leaders: Collection[int | None]) -> None:
    """End processes, all of their sessions, and all that descends from either."""
    _end(lambda: _families(leaders))


def end_orphans() -> None:
    """End what was started by ranks that are no more; only where no rank runs any longer.

    Python's own helpers end when this process does, but for one that a signal has stopped.
    """
    helpers = {
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }

    def is_orphan(child: psutil.Process) -> bool:
        helps = child.pid in helpers and child.status() != psutil.STATUS_STOPPED
        return child.ppid() == os.getpid() and not helps

    _end(lambda: _with_descendants(is_orphan))


def shared_memory() -> set[str]:
    """The names of all segments."""
    with suppress(OSError):
        return {path.name for path in _SHARED_MEMORY.iterdir()}
    return set()


def held_shared_memory(leaders: Collection[int | None]) -> set[str]:
    """The segments that processes, their sessions and descendants have open."""
    return _held(_families(leaders))


def remove_shared_memory(suspects: set[str], own: SharedMemoryOf, since: float) -> list[str]:
    """Remove those of the segments that are the ranks' `own`, are this user's, have changed after `since`
    (seconds of the epoch), and that no process on this machine has open any more.

    Returns:
        those that stay although they may be the ranks': nobody knows which program has made them.
    """
    unclear = []
    for name in sorted(suspects - _held(psutil.process_iter())) if suspects else ():
        path = _SHARED_MEMORY / name
        with suppress(OSError):
            seen = path.stat()
            if seen.st_uid != os.getuid() or seen.st_ctime < since:
                continue
            if not own.has(name):
                unclear += [name] if name.startswith(_KINDS) else []
                continue
            path.unlink()
            # Else Python complains of them at the end of the sweep.
            if name.startswith(("psm_", segments_of(own.token))):
                resource_tracker.unregister(f"/{name}", "shared_memory")
            elif name.startswith("sem."):
                resource_tracker.unregister(f"/{name.removeprefix('sem.')}", "semaphore")
    return unclear


def _held(processes: Iterable[psutil.Process]) -> set[str]:
    """The segments that processes have mapped or open, by inode: a semaphore is mapped under another name."""
    inodes: set[int] = set()
    for process in processes:
        own = Path(f"/proc/{process.pid}")
        with suppress(OSError):
            maps = (own / "maps").read_text(errors="replace").splitlines()
            inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if f" {_SHARED_MEMORY}/" in line}
        with suppress(OSError):
            for opened in (own / "fd").iterdir():
                with suppress(OSError):
                    inodes |= {opened.stat().st_ino} if opened.readlink().parent == _SHARED_MEMORY else set()
    with suppress(OSError):
        return {entry.name for entry in os.scandir(_SHARED_MEMORY) if entry.inode() in inodes}
    return set()


def _families(leaders: Collection[int | None]) -> set[psutil.Process]:
    # What has a session of its own, and a parent that is gone, says in its environment whose it is.
    named = {str(leader) for leader in leaders}
    return _with_descendants(
        lambda process: (
            not {process.pid, os.getsid(process.pid)}.isdisjoint(leaders)
            or process.environ().get(OF_RANK) in named
        )
    )


def _with_descendants(of: Callable[[psutil.Process], bool]) -> set[psutil.Process]:
    """Those of the driver's descendants of which that is true, and all that descends from them."""
    found: set[psutil.Process] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError, psutil.Error):
            if of(process):
                found |= {process, *process.children(recursive=True)}
    return found


def _end(find: Callable[[], Collection[psutil.Process]]) -> None:
    """Kill what is found until nothing is: a process may start another while it is being ended."""
    for _ in range(_ROUNDS):
        doomed = find()
        for process in doomed:
            with suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(doomed, timeout=_ENDED_S)
        if alive or not doomed:  # the kernel does not let go of it, or all are gone
            return
