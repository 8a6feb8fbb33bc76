"""The ranks of one cell at a time, as the driver holds them: started, sent a cell, watched, ended."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from dcpbench.rank.messages import CellSpec, Failed, PhaseBegun, Seat
from dcpbench.verify.verdict import RankReport

_GRACE_S = 0.5
"""How long after the first failure its peers may still tell of an earlier one."""
_STACKS_S = 2.0
_LEAVE_S = 10.0


@dataclass(frozen=True)
class Ended:
    """How a cell ended on its ranks: all reports, or a status with its reason."""

    reports: list[RankReport]
    status: str | None = None
    reason: str | None = None


@dataclass
class _Rank:
    """One rank process and what it has said of the running cell."""

    number: int
    process: ForkServerProcess
    connection: Connection
    log: Path
    phase: str = "join"
    report: RankReport | None = None
    failed: Failed | None = None
    gone: bool = False

    @property
    def waiting(self) -> bool:
        return self.report is None and self.failed is None and not self.gone


@dataclass(frozen=True)
class GroupKind:
    """What ranks must have in common to run one cell after another."""

    world_size: int
    device: str
    process_group: bool


@dataclass
class RankGroup:
    """Ranks of one kind on one host.

    A group is good for further cells until one of them ends in anything but reports.
    """

    kind: GroupKind
    _ranks: list[_Rank] = field(default_factory=list)

    @classmethod
    def start(cls, context: ForkServerContext, kind: GroupKind, folder: Path) -> "RankGroup":
        """Fork the ranks; they join while the driver goes on. Until they get a cell they log to
        `folder`."""
        group = cls(kind)
        # Listening before any rank exists leaves no moment in which the port could be taken.
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            for number in range(kind.world_size):
                log = folder / f"rank{number}.log"
                seat = Seat(
                    rank=number,
                    world_size=kind.world_size,
                    device=f"cuda:{number}" if kind.device == "cuda" else kind.device,
                    process_group=kind.process_group,
                    store_port=listener.getsockname()[1],
                    log=str(log),
                )
                here, there = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(seat, listener if number == 0 else None, there),
                    name=f"dcpbench-rank{number}",
                    daemon=False,  # a daemon may have no children, which a process stager needs
                )
                process.start()
                there.close()
                group._ranks.append(_Rank(number, process, here, log))
        return group

    def run(self, spec: CellSpec, timeout_s: float, on_phase: Callable[[int, str], None]) -> Ended:
        """Run a cell on all ranks and wait for its end, at most `timeout_s`; `on_phase(rank, phase)`
        is called as they get on. Anything but reports leaves the group unusable: `kill` it."""
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            rank.report = rank.failed = None
            rank.log = Path(spec.folder) / f"rank{rank.number}.log"
            try:
                rank.connection.send(spec)
            except OSError:
                rank.gone = True
        while any(rank.waiting for rank in self._ranks):
            if any(rank.failed or rank.gone for rank in self._ranks):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            left = deadline - time.monotonic()
            if left <= 0 or not self._listen(left, on_phase):
                break
        return self._ended(timeout_s)

    def close(self) -> None:
        """Ask the ranks to leave; does not wait for them."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.connection.send(None)

    def left(self) -> bool:
        """Whether every rank's process has ended."""
        return not any(rank.process.is_alive() for rank in self._ranks)

    def kill(self) -> None:
        """End the ranks and whatever they started, at once, and wait until they are gone."""
        doomed = [item for rank in self._ranks for item in _family(rank.process.pid)]
        for process in doomed:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(doomed, timeout=_LEAVE_S)
        for rank in self._ranks:
            rank.process.join(_LEAVE_S)
            rank.connection.close()

    def join(self, timeout_s: float = _LEAVE_S) -> None:
        """Wait until the ranks have left, and end those that have not by then."""
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def _listen(self, timeout_s: float, on_phase: Callable[[int, str], None]) -> bool:
        """Take what the ranks have to say; False if nobody said anything in time."""
        by_source: dict[Any, _Rank] = {
            source: rank
            for rank in self._ranks
            if rank.waiting
            for source in (rank.connection, rank.process.sentinel)
        }
        ready = wait(list(by_source), timeout_s)
        for source in ready:
            rank = by_source[source]
            if source is not rank.connection and not rank.connection.poll():
                rank.gone = True
                continue
            try:
                message = rank.connection.recv()
            except (EOFError, OSError):
                rank.process.join(_GRACE_S)
                rank.gone = True
                continue
            if isinstance(message, PhaseBegun):
                rank.phase = message.phase
                on_phase(rank.number, message.phase)
            elif isinstance(message, Failed):
                rank.failed = message
            else:
                assert isinstance(message, RankReport)
                rank.report = message
        return bool(ready)

    def _ended(self, timeout_s: float) -> Ended:
        reports = [rank.report for rank in self._ranks if rank.report is not None]
        if len(reports) == self.kind.world_size:
            return Ended(reports)
        failures = [rank for rank in self._ranks if rank.failed]
        own = [rank for rank in failures if rank.failed and not rank.failed.secondary]
        dead = [rank for rank in self._ranks if rank.gone]
        if own or (failures and not dead):
            first = min(own or failures, key=lambda rank: rank.failed.at if rank.failed else 0.0)
            assert first.failed
            return Ended(
                reports,
                "error",
                f"rank {first.number} in {first.failed.phase}: {first.failed.error}",
            )
        if dead:
            first = dead[0]
            return Ended(reports, "crash", f"rank {first.number} {_end_of(first)} in {first.phase}")
        self._dump_stacks()
        where: dict[str, list[int]] = {}
        for rank in self._ranks:
            if rank.waiting:
                where.setdefault(rank.phase, []).append(rank.number)
        phases = "; ".join(
            f"{phase} (rank {', '.join(map(str, numbers))})" for phase, numbers in where.items()
        )
        return Ended(
            reports,
            "timeout",
            f"after {timeout_s:g} s (timeouts.cell_s) still in {phases}; stacks are in the ranks' logs",
        )

    def _dump_stacks(self) -> None:
        """Have every rank that still runs write its threads' stacks to its log."""
        asked = [rank for rank in self._ranks if rank.process.is_alive()]
        before = {rank.number: _size(rank.log) for rank in asked}
        for rank in asked:
            assert rank.process.pid
            with suppress(ProcessLookupError):  # it may end at this very moment
                os.kill(rank.process.pid, signal.SIGUSR1)
        # faulthandler writes line by line and marks no end: logs that grew and then stay are done.
        seen: dict[int, int] = {}
        deadline = time.monotonic() + _STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = {rank.number: _size(rank.log) for rank in asked}
            if now == seen and all(now[number] > size for number, size in before.items()):
                return
            seen = now


def _family(pid: int | None) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _end_of(rank: _Rank) -> str:
    code = rank.process.exitcode
    if code is None:
        return "was lost"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def _rank_main(seat: Seat, listener: socket.socket | None, connection: Connection) -> None:
    from dcpbench.rank.process import main

    main(seat, listener, connection)
