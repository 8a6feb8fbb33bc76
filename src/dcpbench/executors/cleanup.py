"""Find and end the processes that ranks leak, and remove their shared memory.

The driver adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER). A process started by a rank therefore stays a
descendant of the driver, even if the rank is dead and the process has a separate session.
"""

import ctypes
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from dcpbench.rank.messages import OF_RANK, segments_of, semaphores_of

_EXIT_LIMIT_S = 4.0
_ROUNDS = 5
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not a temporary file: the folder to clean up
_KINDS = ("torch_", "psm_", "nccl-", "sem.mp-")
"""Name prefixes of the shared memory that torch, Python and NCCL leak when a program is killed."""


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent exits."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_families(leaders: Collection[int | None]) -> None:
    """End processes, their sessions, and the descendants of both."""
    _end(lambda: _families(leaders))


def end_orphans() -> None:
    """End the processes that dead ranks started. Call this only while no rank or agent runs."""
    _end(lambda: _with_descendants(lambda child: child.ppid() == os.getpid()))


def shared_memory() -> set[str]:
    """Return the names of all segments."""
    with suppress(OSError):
        return {path.name for path in _SHARED_MEMORY.iterdir()}
    return set()


def shared_memory_opened_by(leaders: Collection[int | None]) -> set[str]:
    """Return the segments that processes, their sessions and descendants have open."""
    return _opened_by(_families(leaders))


def remove_shared_memory(
    suspects: set[str], opened: Collection[str], processes: Collection[int | None], token: str, since: float
) -> list[str]:
    """Remove those segments that belong to a group of ranks and to this user, have changed after `since`
    (seconds of the epoch), and are not open in any process of this machine.

    Args:
        opened: names that the ranks had open.
        processes: ids of the ranks' processes, which torch puts into names.
        token: the group's token, which Python's names contain.

    Returns:
        segments that were not removed because another program might have made them.
    """
    unclear = []
    by_process = (f"torch_{pid}_" for pid in processes)
    prefixes = (segments_of(token), f"sem.{semaphores_of(token)}-", *by_process)
    for name in sorted(suspects - _opened_by(psutil.process_iter())) if suspects else ():
        path = _SHARED_MEMORY / name
        with suppress(OSError):
            status = path.stat()
            if status.st_uid != os.getuid() or status.st_ctime < since:
                continue
            if name not in opened and not name.startswith(prefixes):
                unclear += [name] if name.startswith(_KINDS) else []
                continue
            path.unlink()
    return unclear


def _opened_by(processes: Iterable[psutil.Process]) -> set[str]:
    """Find segments that are mapped or open by inode: a semaphore is mapped under a different name."""
    inodes: set[int] = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        with suppress(OSError):
            maps = (folder / "maps").read_text(errors="replace").splitlines()
            inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if f" {_SHARED_MEMORY}/" in line}
        with suppress(OSError):
            for file in (folder / "fd").iterdir():
                with suppress(OSError):
                    inodes |= {file.stat().st_ino} if file.readlink().parent == _SHARED_MEMORY else set()
    with suppress(OSError):
        return {segment.name for segment in os.scandir(_SHARED_MEMORY) if segment.inode() in inodes}
    return set()


def _families(leaders: Collection[int | None]) -> set[psutil.Process]:
    # A process with a separate session and a dead parent is recognized by its environment.
    names = {str(leader) for leader in leaders}
    return _with_descendants(
        lambda process: (
            not {process.pid, os.getsid(process.pid)}.isdisjoint(leaders)
            or process.environ().get(OF_RANK) in names
        )
    )


def _with_descendants(condition: Callable[[psutil.Process], bool]) -> set[psutil.Process]:
    """Return the driver's descendants that meet a condition, and the descendants of these."""
    matching: set[psutil.Process] = set()
    for process in _descendants():
        with suppress(OSError, psutil.Error):
            if condition(process):
                matching |= {process, *process.children(recursive=True)}
    return matching


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _end(find: Callable[[], Collection[psutil.Process]]) -> None:
    """Kill processes until none is found: one can start another while it is being killed."""
    for _ in range(_ROUNDS):
        doomed = find()
        for process in doomed:
            with suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(doomed, timeout=_EXIT_LIMIT_S)
        if alive or not doomed:  # the kernel does not release a process, or all have exited
            return
