"""The ranks of one cell at a time, as the driver holds them: started, sent a cell, watched, ended."""

import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from dcpbench.config.groups import TimeoutsConfig
from dcpbench.executors import cleanup
from dcpbench.executors.base import OnPhase, Outcome, WorldKind
from dcpbench.executors.outcome import nearest, outcome_of
from dcpbench.executors.rank_handle import Rank
from dcpbench.records.findings import RaisedError
from dcpbench.worker.messages import CellSpec, Failed, Message, PhaseBegun, RankSpec

_GRACE_S = 0.5
"""How long after the first failure its peers may still tell of an earlier one."""
_ECHO_GRACE_S = 3.0
"""How long after what sounds like the echo of a death the death itself may take to be seen: a process
first gives back its memory and its device."""
_LEAVE_S = 10.0
_TALK_S = 5.0
"""How long a rank may take over one message once it has begun it: it may be stopped in the middle."""
_LISTEN_S = 60.0


@dataclass
class RankGroup:
    """Ranks of one kind on one host.

    A group is good for further cells until one of them ends in anything but reports.
    """

    _ranks: list[Rank] = field(default_factory=list)
    _started: float = field(default_factory=time.time)
    _shared_before: set[str] = field(default_factory=cleanup.shared_memory)

    @classmethod
    def start(
        cls, context: ForkServerContext, kind: WorldKind, folder: Path, gpus: tuple[int, ...]
    ) -> "RankGroup":
        """Fork the ranks; they join while the driver goes on. Until they get a cell they log to
        `folder`. `gpus` has the number of each rank's GPU, if they are to use any.

        Raises:
            OSError, EOFError: they could not be started; none is left behind.
        """
        group = cls()
        try:
            # Listening before any rank exists leaves no moment in which the port could be taken.
            with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
                for number in range(kind.world_size):
                    device = f"cuda:{gpus[number]}" if kind.device == "cuda" else kind.device
                    group._ranks.append(_fork(context, kind, number, device, listener, folder))
        except BaseException:
            group.kill()
            raise
        return group

    def run(self, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> Outcome:
        """Run a cell on all ranks and wait for its end, or until something has taken longer than it
        may; `on_phase(rank, phase)` is called as they get on. Anything but reports leaves the group
        unusable: `kill` it."""
        began = time.monotonic()
        for rank in self._ranks:
            rank.begin(spec.run, Path(spec.folder))
            try:
                rank.connection.send(spec)
            except OSError:
                rank.gone_at = time.monotonic()
        limit = nearest(timeouts, began, self._ranks)
        deadline = limit.at
        while any(rank.waiting for rank in self._ranks):
            now = time.monotonic()
            deadline = min(deadline, now + grace) if (grace := self._grace_s()) else limit.at
            if now >= deadline:
                break
            self._listen(min(deadline - now, _LISTEN_S), on_phase)
            limit = nearest(timeouts, began, self._ranks)
        return outcome_of(self._ranks, limit)

    def usable(self) -> bool:
        """Whether every rank still runs, as far as one can see from outside."""
        return all(rank.process.is_alive() and not rank.stopped() for rank in self._ranks)

    def close(self) -> None:
        """Ask the ranks to leave; does not wait for them."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.connection.send(None)

    def left(self) -> bool:
        """Whether every rank's process has ended."""
        return not any(rank.process.is_alive() for rank in self._ranks)

    def end(self) -> None:
        """End the ranks and whatever they started, at once; `kill` is still to be called."""
        cleanup.end_families(self._leaders())

    def kill(self) -> None:
        """`end` the ranks, wait until they are gone, and remove the shared memory that they leave."""
        held = cleanup.held_shared_memory(self._leaders())
        self.end()
        for rank in self._ranks:
            rank.process.join(1.0)
            rank.connection.close()
        cleanup.remove_shared_memory(cleanup.shared_memory() - self._shared_before, held, self._started)

    def join(self) -> None:
        """Wait until the ranks have left, and end those that have not in time."""
        deadline = time.monotonic() + _LEAVE_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def _grace_s(self) -> float | None:
        """How long to listen on after what has gone wrong; None if nothing has."""
        if any(rank.gone_at or (rank.failed and not rank.failed.secondary) for rank in self._ranks):
            return _GRACE_S
        return _ECHO_GRACE_S if any(rank.failed for rank in self._ranks) else None

    def _listen(self, timeout_s: float, on_phase: OnPhase) -> None:
        """Take what the ranks have to say, as soon as one says something."""
        by_source: dict[Any, Rank] = {
            source: rank
            for rank in self._ranks
            if rank.waiting
            for source in (rank.connection, rank.process.sentinel)
        }
        ready = wait(list(by_source), timeout_s)
        seen_at = time.monotonic()
        for source in ready:
            rank = by_source[source]
            if source is not rank.connection and not rank.connection.poll():
                rank.gone_at = seen_at
                continue
            try:
                message = rank.connection.recv()
            except (EOFError, OSError):
                rank.process.join(_GRACE_S)
                rank.gone_at = seen_at
                continue
            except Exception as error:  # noqa: BLE001 - a cell may have put anything into its report
                text = f"its report cannot be read: {error}"
                raised = RaisedError(rank.number, rank.phase, type(error).__name__, text)
                message = Message(rank.run, rank.number, Failed(seen_at, raised, secondary=False))
            if rank.take(message) and isinstance(message.content, PhaseBegun):
                on_phase(rank.number, message.content.phase)

    def _leaders(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]


def _fork(
    context: ForkServerContext,
    kind: WorldKind,
    number: int,
    device: str,
    listener: socket.socket,
    folder: Path,
) -> Rank:
    log = folder / f"rank{number}.log"
    port = listener.getsockname()[1]
    spec = RankSpec(number, kind.world_size, device, kind.process_group, port, str(log), kind.environment)
    here, there = context.Pipe()
    process = context.Process(
        target=_rank_main,
        args=(spec, listener if number == 0 else None, there),
        name=f"dcpbench-rank{number}",
        daemon=False,  # a daemon may have no children, which a process stager needs
    )
    process.start()
    there.close()
    _never_for_ever(here)
    return Rank(number, process, here, log)


def _never_for_ever(connection: Connection) -> None:
    """Let no read or write on a connection block for longer than `_TALK_S`."""
    seconds = struct.pack("ll", int(_TALK_S), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)


def _rank_main(spec: RankSpec, listener: socket.socket | None, connection: Connection) -> None:
    from dcpbench.worker.main import main

    main(spec, listener, connection)
