"""Start ranks of one kind on this host, run stages on them, and end them."""

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from selectors import EVENT_READ, BaseSelector, DefaultSelector

from dcpbench.config.groups import Ending
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.mismatch import RaisedError
from dcpbench.core.stage_end import WHOLE_STAGE, Failed, RankEnd, StageEnd
from dcpbench.executors import cleanup, stack_dumps
from dcpbench.executors.agent import Agent
from dcpbench.executors.base import OnPhase
from dcpbench.executors.rank_handle import Rank
from dcpbench.rank.messages import (
    CellSpec,
    Descriptor,
    Message,
    PhaseBegun,
    RankSpec,
    StoreAddress,
    WorldSpec,
    torchrun_variables,
)

_GRACE_S = 0.5
"""Time to wait after the first failure for the report of an earlier one."""
_ECHO_GRACE_S = 3.0
"""Time to wait after a secondary failure for the death that caused it: a dying process first releases its
memory and its device."""
_SURVIVORS_S = 5.0
"""Time to wait after an intended death for the other ranks to detect it."""
_LEAVE_S = 10.0
_MESSAGE_LIMIT_S = 5
"""Time limit for one message after it has begun, since a rank can be stopped in the middle."""
_LISTEN_S = 60.0
_RANK = "dcpbench.rank.main"


@dataclass(frozen=True)
class RanksOfHost:
    """The ranks of a group on one host: the device of each by its number, in the order of local ranks."""

    host: str
    devices: dict[int, str]


@contextmanager
def store_file() -> Iterator[Descriptor]:
    """Context manager: a file in memory through which ranks rendezvous, open until they have started."""
    descriptor = os.memfd_create("dcpbench-store")
    try:
        os.fchmod(descriptor, 0o600)
        yield Descriptor(descriptor)
    finally:
        os.close(descriptor)


class Conclusion:
    """A signal from another thread that a stage is over because something went wrong on another host."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self.dumps = False

    def reach(self, dumps: bool) -> None:
        """End the stage; with `dumps`, ranks that hang write their stacks."""
        self.dumps = dumps
        with suppress(OSError):
            self._sender.send(b".")

    def fileno(self) -> int:
        """Return a descriptor that is readable after `reach`."""
        return self._receiver.fileno()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class RankGroup:
    """Ranks of one kind. They can run further stages until one ends without every rank's report."""

    def __init__(
        self, agent: Agent, kind: WorldSpec, part: RanksOfHost, store: Descriptor | StoreAddress
    ) -> None:
        """Fork the ranks of this host. They rendezvous through `store` when they get their first stage.

        Raises:
            OSError, EOFError: they could not be started; all that had been started are ended.
        """
        self._agent = agent
        self._ranks: list[Rank] = []
        self._started = time.time()
        self._shared_before = cleanup.shared_memory()
        self._token = secrets.token_hex(3)
        master = store if isinstance(store, StoreAddress) else StoreAddress.unused()
        try:
            for local_rank, (number, device) in enumerate(part.devices.items()):
                if number and isinstance(store, StoreAddress):
                    store = replace(store, listener=None)  # only rank 0 listens
                environment = torchrun_variables(
                    number, kind.world_size, local_rank, len(part.devices), master
                )
                spec = RankSpec(kind, number, device, store, part.host, local_rank, self._token, environment)
                self._ranks.append(_fork(agent, spec))
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
        """Run a stage on all ranks until it ends, exceeds a time limit, or is concluded. Unless every rank
        reports, the group cannot be reused: `kill` it."""
        began = time.monotonic()
        limits = timeouts.by_phase()
        self._conclusion, self._concluded = conclusion, False
        dies = spec.config.processes[spec.run.stage][-1].ends is Ending.crash
        self._death_grace_s = _SURVIVORS_S if dies else _GRACE_S
        for rank in self._ranks:
            rank.begin(spec)
            try:
                rank.connection.send(spec)
            except OSError:
                rank.end.exited_at = time.monotonic()
        limit_at, phase = _next_limit(limits, began, self._ranks)
        deadline = limit_at
        with self._selector(conclusion) as selector:
            while any(rank.end.waiting for rank in self._ranks):
                now = time.monotonic()
                deadline = min(deadline, now + grace) if (grace := self._grace_s()) else limit_at
                if now >= deadline:
                    break
                self._listen(selector, min(deadline - now, _LISTEN_S), on_phase)
                limit_at, phase = _next_limit(limits, began, self._ranks)
        if self._concluded and conclusion:
            return _stage_end(self._ranks, None, conclusion.dumps)
        return _stage_end(self._ranks, (phase, limits[phase]), dumps=True)

    def usable(self) -> bool:
        """Return whether every process runs and none is stopped."""
        return all(rank.process.is_alive() and not rank.stopped() for rank in self._ranks)

    def leave(self) -> None:
        """Let the ranks exit, and wait up to a limit. Call `kill` afterwards."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.connection.send(None)
        deadline = time.monotonic() + _LEAVE_S
        for rank in self._ranks:
            rank.process.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the ranks and the processes that they started. Call `kill` afterwards."""
        cleanup.end_families({rank.process.pid for rank in self._ranks})

    def kill(self) -> list[str]:
        """`end` the ranks, wait until they have exited, and remove the shared memory that they leaked.

        Returns:
            names of segments that were not removed because they might belong to another program.
        """
        pids = {rank.process.pid for rank in self._ranks}
        opened = cleanup.shared_memory_opened_by(pids)
        self.end()
        for rank in self._ranks:
            rank.process.wait(1.0)
            rank.connection.close()
        if any(rank.unreported() for rank in self._ranks):  # nor would it fork the next ones
            self._agent.kill()
        new = cleanup.shared_memory() - self._shared_before
        return cleanup.remove_shared_memory(new, opened, pids, self._token, self._started)

    def _grace_s(self) -> float | None:
        """Return how long to continue listening after a failure; None if there was none."""
        if self._concluded:
            return _GRACE_S
        ends = [rank.end for rank in self._ranks]
        if any(end.exited_at or (end.failed and not end.failed.secondary) for end in ends):
            return self._death_grace_s
        return _ECHO_GRACE_S if any(end.failed for end in ends) else None

    def _selector(self, conclusion: Conclusion | None) -> BaseSelector:
        """Return a selector for the messages and the ends of waiting ranks, and for the conclusion."""
        selector = DefaultSelector()
        for rank in self._ranks:
            if rank.end.waiting:
                selector.register(rank.connection, EVENT_READ)
                selector.register(rank.process.sentinel, EVENT_READ)
        if conclusion:
            selector.register(conclusion, EVENT_READ)
        return selector

    def _listen(self, selector: BaseSelector, timeout_s: float, on_phase: OnPhase) -> None:
        """Wait for messages or the end of ranks, and process them."""
        ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        now = time.monotonic()
        if self._conclusion and self._conclusion in ready:
            self._concluded = True
            selector.unregister(self._conclusion)
        for rank in self._ranks:
            if rank.connection in ready:
                self._receive(rank, now, on_phase)
            elif rank.process.sentinel in ready:
                rank.end.exited_at = now
            else:
                continue
            if not rank.end.waiting:
                selector.unregister(rank.connection)
                selector.unregister(rank.process.sentinel)

    def _receive(self, rank: Rank, now: float, on_phase: OnPhase) -> None:
        try:
            message = rank.connection.recv()
        except (EOFError, OSError):
            rank.wait_ended()
            rank.end.exited_at = now
            return
        except Exception as error:  # noqa: BLE001 - a report can contain any object
            text = f"cannot read its report: {error}"
            raised = RaisedError(rank.number, rank.end.phase, type(error).__name__, text)
            message = Message(rank.stage.run, rank.number, Failed(now, raised, secondary=False))
        if rank.take(message) and isinstance(message.content, PhaseBegun):
            on_phase(rank.number, message.content.phase, message.content.note)


def _fork(agent: Agent, spec: RankSpec) -> Rank:
    here, process = agent.importing(spec.kind.imports).fork(_RANK, spec)
    timeout = struct.pack("ll", _MESSAGE_LIMIT_S, 0)
    with socket.socket(fileno=os.dup(here.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    return Rank(process, here, RankEnd(spec.rank, spec.local_rank, spec.host))


def _next_limit(limits: Mapping[str, float], began: float, ranks: Sequence[Rank]) -> tuple[float, str]:
    """Return when (`time.monotonic`) the next time limit expires, and the phase of that limit.

    Args:
        limits: seconds by phase, for phases that have a limit, and for the complete stage.
        began: start of the stage.
    """
    clocks = [(WHOLE_STAGE, began)]
    for rank in ranks:
        if rank.end.waiting:
            clocks += [(rank.end.phase, rank.since), *(("upload", since) for since in rank.end.uploads)]
    return min((since + limits[phase], phase) for phase, since in clocks if phase in limits)


def _stage_end(ranks: Sequence[Rank], limit: tuple[str, float] | None, dumps: bool) -> StageEnd:
    """Return the end of a stage on these ranks, with the logs and stacks of a failure.

    Args:
        limit: phase and seconds of the time limit that the ranks exceeded, unless one failed or exited.
        dumps: let ranks that hang write their stacks.
    """
    ends = tuple(rank.end for rank in ranks)
    dropped = tuple(sentence for rank in ranks for sentence in rank.dropped)
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
