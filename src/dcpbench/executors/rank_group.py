"""Ranks of one kind that live on this host: started, sent a stage, listened to, ended."""

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext

from dcpbench.config.groups import Ending
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.mismatch import RaisedError
from dcpbench.core.stage_end import WHOLE_STAGE, Failed, RankEnd, StageEnd
from dcpbench.executors import cleanup, fork_server, stack_dumps
from dcpbench.executors.base import OnPhase
from dcpbench.executors.rank_handle import Rank
from dcpbench.rank.messages import (
    CellSpec,
    Descriptor,
    Message,
    PhaseBegun,
    RankSpec,
    StoreAddress,
    StoreFile,
    WorldKind,
)

_GRACE_S = 0.5
"""How long after the first failure its peers may still tell of an earlier one."""
_ECHO_GRACE_S = 3.0
"""How long after what sounds like the echo of a death the death itself may take to be seen: a process
first gives back its memory and its device."""
_SURVIVORS_S = 5.0
"""How long after a death that a stage is there for the other ranks may take to see that it was one."""
_LEAVE_S = 10.0
_TALK_S = 5
"""How long a rank may take over one message once it has begun it: it may be stopped in the middle."""
_LISTEN_S = 60.0


@dataclass(frozen=True)
class Part:
    """The ranks of a group that are started together on a host: the device of each by its number, in the
    order of their local ranks."""

    host: str
    devices: dict[int, str]


@contextmanager
def store_file() -> Iterator[StoreFile]:
    """A file in memory for the ranks of a group to meet at, until they are started."""
    descriptor = os.memfd_create("dcpbench-store")
    try:
        os.fchmod(descriptor, 0o600)
        yield StoreFile(Descriptor(descriptor))
    finally:
        os.close(descriptor)


class Conclusion:
    """By which another thread tells a group that its stage is over: something went wrong on another host."""

    def __init__(self) -> None:
        self._told, self._tells = socket.socketpair()
        self.dumps = False

    def reach(self, dumps: bool) -> None:
        """The stage is over; `dumps` where the ranks' stacks are wanted."""
        self.dumps = dumps
        with suppress(OSError):
            self._tells.send(b".")

    def fileno(self) -> int:
        """What can be read from once it is told."""
        return self._told.fileno()

    def close(self) -> None:
        self._told.close()
        self._tells.close()


class RankGroup:
    """Ranks of one kind, good for further stages until one ends in anything but reports."""

    def __init__(
        self, context: ForkServerContext, kind: WorldKind, part: Part, store: StoreFile | StoreAddress
    ) -> None:
        """Fork the ranks of this host; they join when they get their first stage. At `store` they meet.

        Raises:
            OSError, EOFError: they could not be started; none is left behind.
        """
        self._ranks: list[Rank] = []
        self._started = time.time()
        self._shared_before = cleanup.shared_memory()
        self._token = secrets.token_hex(3)
        try:
            for local_rank, (number, device) in enumerate(part.devices.items()):
                if number and isinstance(store, StoreAddress):
                    store = replace(store, listener=None)  # one process listens
                spec = RankSpec(kind, number, device, store, part.host, local_rank, self._token)
                self._ranks.append(_fork(context, spec))
        except BaseException:
            self.kill()
            raise

    def run(
        self,
        spec: CellSpec,
        timeouts: TimeoutsConfig,
        on_phase: OnPhase,
        conclusion: Conclusion | None = None,
    ) -> StageEnd:
        """Run a stage on all ranks, until it ends, or has taken longer than it may, or is concluded;
        anything but reports leaves the group unusable: `kill` it."""
        began = time.monotonic()
        limits = timeouts.by_phase()
        self._conclusion, self._concluded = conclusion, False
        dies = spec.config.stages[spec.run.stage].ends is Ending.crash
        self._death_grace_s = _SURVIVORS_S if dies else _GRACE_S
        for rank in self._ranks:
            rank.begin(spec)
            try:
                rank.connection.send(spec)
            except OSError:
                rank.end.exited_at = time.monotonic()
        limit_at, phase = _next_limit(limits, began, self._ranks)
        deadline = limit_at
        while any(rank.end.waiting for rank in self._ranks):
            now = time.monotonic()
            deadline = min(deadline, now + grace) if (grace := self._grace_s()) else limit_at
            if now >= deadline:
                break
            self._listen(min(deadline - now, _LISTEN_S), on_phase)
            limit_at, phase = _next_limit(limits, began, self._ranks)
        if self._concluded and conclusion:
            return _stage_end(self._ranks, None, conclusion.dumps)
        return _stage_end(self._ranks, (phase, limits[phase]), dumps=True)

    def usable(self) -> bool:
        """Whether every rank still runs, as far as one can see from outside."""
        return all(rank.process.is_alive() and not rank.stopped() for rank in self._ranks)

    def leave(self) -> None:
        """Have the ranks end by themselves; waits, but not for ever: `kill` is still to be called."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.connection.send(None)
        deadline = time.monotonic() + _LEAVE_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the ranks and whatever they started, at once; `kill` is still to be called."""
        cleanup.end_families({rank.process.pid for rank in self._ranks})

    def kill(self) -> list[str]:
        """`end` the ranks, wait until they are gone, and remove the shared memory that they leave.

        Returns:
            the names of what stays there because it may be another program's.
        """
        pids = {rank.process.pid for rank in self._ranks}
        held = cleanup.held_shared_memory(pids)
        self.end()
        for rank in self._ranks:
            rank.process.join(1.0)
            rank.connection.close()
        if any(rank.unreported() for rank in self._ranks):  # at exit they would be waited for, for ever
            fork_server.end_server()
        own = cleanup.SharedMemoryOf(held, pids, self._token)
        new = cleanup.shared_memory() - self._shared_before
        return cleanup.remove_shared_memory(new, own, self._started)

    def _grace_s(self) -> float | None:
        """How long to listen on after what has gone wrong; None if nothing has."""
        over, ends = self._concluded, [rank.end for rank in self._ranks]
        if over or any(one.exited_at or (one.failed and not one.failed.secondary) for one in ends):
            return _GRACE_S if over else self._death_grace_s
        return _ECHO_GRACE_S if any(end.failed for end in ends) else None

    def _listen(self, timeout_s: float, on_phase: OnPhase) -> None:
        """Take what the ranks have to say, as soon as one says something."""
        waiting = [rank for rank in self._ranks if rank.end.waiting]
        heard: list[Connection | int] = [
            at for rank in waiting for at in (rank.connection, rank.process.sentinel)
        ]
        over = [self._conclusion.fileno()] if self._conclusion and not self._concluded else []
        ready = wait([*heard, *over], timeout_s)
        seen_at = time.monotonic()
        self._concluded = self._concluded or any(at in ready for at in over)
        for rank in waiting:
            if not rank.connection.poll():
                if rank.process.sentinel in ready:
                    rank.end.exited_at = seen_at
                continue
            try:
                message = rank.connection.recv()
            except (EOFError, OSError):
                rank.wait_ended()
                rank.end.exited_at = seen_at
                continue
            except Exception as error:  # noqa: BLE001 - a cell may have put anything into its report
                text = f"its report cannot be read: {error}"
                raised = RaisedError(rank.number, rank.end.phase, type(error).__name__, text)
                message = Message(rank.stage.run, rank.number, Failed(seen_at, raised, secondary=False))
            if rank.take(message) and isinstance(message.content, PhaseBegun):
                on_phase(rank.number, message.content.phase)


def _fork(context: ForkServerContext, spec: RankSpec) -> Rank:
    here, there = context.Pipe()
    process = context.Process(
        target=_rank_main,
        args=(spec, there),
        name=f"dcpbench-rank{spec.rank}",
        daemon=False,  # a daemon may have no children, which a process stager needs
    )
    fork_server.start(process)
    there.close()
    longest = struct.pack("ll", _TALK_S, 0)
    with socket.socket(fileno=os.dup(here.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, longest)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, longest)
    return Rank(process, here, RankEnd(spec.rank, spec.local_rank, spec.host))


def _rank_main(spec: RankSpec, connection: Connection) -> None:
    from dcpbench.rank.main import main

    main(spec, connection)


def _next_limit(limits: Mapping[str, float], began: float, ranks: Sequence[Rank]) -> tuple[float, str]:
    """When (`time.monotonic`) the first limit is reached if no rank gets any further, and of which phase.

    Args:
        limits: seconds by phase, for those that have a limit, and for the whole stage.
        began: when the stage did.
    """
    clocks = [(WHOLE_STAGE, began)]
    for rank in ranks:
        if rank.end.waiting:
            clocks += [(rank.end.phase, rank.since), *(("upload", since) for since in rank.end.uploads)]
    return min((since + limits[phase], phase) for phase, since in clocks if phase in limits)


def _stage_end(ranks: Sequence[Rank], limit: tuple[str, float] | None, dumps: bool) -> StageEnd:
    """How a stage has ended on these ranks.

    Args:
        limit: the phase and the seconds of the limit that the ranks ran into, if nothing else went wrong.
        dumps: have ranks that hang write their stacks in that case, or without a limit.
    """
    ends = tuple(rank.end for rank in ranks)
    dropped = tuple(told for rank in ranks for told in rank.dropped)
    if all(end.report for end in ends):
        return StageEnd(ends, dropped=dropped)
    hang = dumps and not any(end.failed or end.exited_at is not None for end in ends)
    doing = stack_dumps.dump(ranks) if hang else {}
    for rank in ranks:
        rank.end.exit_status = rank.process.exitcode
        rank.end.doing = doing.get(rank.number)
        if rank.end.exit_status is not None:
            rank.end.frame = stack_dumps.fatal(rank.log)
        rank.end.log_tail = tuple(stack_dumps.tail(rank.log))
    return StageEnd(ends, limit if hang else None, dropped=dropped)
