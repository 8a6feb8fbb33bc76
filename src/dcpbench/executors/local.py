"""The executor of one host: ranks forked from a server that has torch imported, watched, and ended."""

import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext

from dcpbench.config.schema import TimeoutsConfig
from dcpbench.executors import cleanup, fork_server
from dcpbench.executors.base import Executor, OnPhase, Outcome
from dcpbench.executors.outcome import next_limit, outcome_of
from dcpbench.executors.rank_handle import Rank
from dcpbench.records.findings import RaisedError
from dcpbench.worker.messages import CellSpec, Failed, Message, PhaseBegun, RankSpec, StoreFile, WorldKind

_GRACE_S = 0.5
"""How long after the first failure its peers may still tell of an earlier one."""
_ECHO_GRACE_S = 3.0
"""How long after what sounds like the echo of a death the death itself may take to be seen: a process
first gives back its memory and its device."""
_LEAVE_S = 10.0
_TALK_S = 5
"""How long a rank may take over one message once it has begun it: it may be stopped in the middle."""
_LISTEN_S = 60.0


@dataclass
class LocalExecutor(Executor):
    """Runs stages on ranks of this host; on a device of their own out of `gpus` each, if they use any.

    Groups of several kinds stay up side by side, so that the stages of a cell need not start them anew.
    """

    context: ForkServerContext
    gpus: tuple[int, ...] = ()
    _groups: dict[WorldKind, "_RankGroup"] = field(default_factory=dict)
    interrupted: bool = False

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> Outcome:
        """Run a stage and wait for its end, or until something has taken longer than it may.

        Ranks of the kind are started if there are none or one has died since the last stage; where one
        did not report, or is not as it was born, all are ended. `on_phase` is called as they get on.
        """
        try:
            if kind in self._groups and not self._groups[kind].usable():
                self._kill(kind)
            if kind not in self._groups:
                self._groups[kind] = self._started(kind)
        except (OSError, EOFError) as error:
            return Outcome([], "error", problem=f"the ranks could not be started: {error}")
        if self.interrupted:  # while the ranks were on their way
            return Outcome([], "error", problem="interrupted")
        outcome = self._groups[kind].run(spec, timeouts, on_phase)
        if outcome.status or any(report.left_behind for report in outcome.reports):
            self._kill(kind)
        return outcome

    def _started(self, kind: WorldKind) -> "_RankGroup":
        try:
            return _RankGroup(self.context, kind, self.gpus)
        except EOFError:  # the server did not answer, or died: the next one may
            return _RankGroup(self.context, kind, self.gpus)

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """Have the ranks of other kinds leave: they would only take up room, or are to be fresh again."""
        for kind in self._groups.keys() - kinds:
            self._groups[kind].leave()
            self._kill(kind)

    def interrupt(self) -> None:
        """End what runs in another thread: its stage ends at once, and no other begins."""
        self.interrupted = True
        for group in list(self._groups.values()):
            group.end()

    def end(self) -> None:
        """End all ranks, and wait until they and whatever they started are gone."""
        for kind in list(self._groups):
            self._kill(kind)

    def _kill(self, kind: WorldKind) -> None:
        self._groups[kind].kill()
        del self._groups[kind]


class _RankGroup:
    """Ranks of one kind, good for further stages until one ends in anything but reports."""

    def __init__(self, context: ForkServerContext, kind: WorldKind, gpus: tuple[int, ...]) -> None:
        """Fork the ranks; they join when they get their first stage. `gpus` has the number of each rank's
        GPU, if they are to use any.

        Raises:
            OSError, EOFError: they could not be started; none is left behind.
        """
        self._ranks: list[Rank] = []
        self._started = time.time()
        self._shared_before = cleanup.shared_memory()
        store = StoreFile(os.memfd_create("dcpbench-store"))
        os.fchmod(store.descriptor, 0o600)
        try:
            for number in range(kind.world_size):
                device = f"cuda:{gpus[number]}" if kind.device == "cuda" else kind.device
                self._ranks.append(_fork(context, RankSpec(kind, number, device, store)))
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(store.descriptor)

    def run(self, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> Outcome:
        """Run a stage on all ranks; anything but reports leaves the group unusable: `kill` it."""
        began = time.monotonic()
        limits = timeouts.by_phase()
        for rank in self._ranks:
            rank.begin(spec)
            try:
                rank.connection.send(spec)
            except OSError:
                rank.gone_at = time.monotonic()
        limit_at, phase = next_limit(limits, began, self._ranks)
        deadline = limit_at
        while any(rank.waiting for rank in self._ranks):
            now = time.monotonic()
            deadline = min(deadline, now + grace) if (grace := self._grace_s()) else limit_at
            if now >= deadline:
                break
            self._listen(min(deadline - now, _LISTEN_S), on_phase)
            limit_at, phase = next_limit(limits, began, self._ranks)
        dropped = [told for rank in self._ranks for told in rank.dropped]
        return replace(outcome_of(self._ranks, phase, limits[phase]), dropped=tuple(dropped))

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

    def kill(self) -> None:
        """`end` the ranks, wait until they are gone, and remove the shared memory that they leave."""
        held = cleanup.held_shared_memory({rank.process.pid for rank in self._ranks})
        self.end()
        for rank in self._ranks:
            rank.process.join(1.0)
            rank.connection.close()
        if any(rank.unreported() for rank in self._ranks):  # at exit they would be waited for, for ever
            fork_server.end_server()
        cleanup.remove_shared_memory(cleanup.shared_memory() - self._shared_before, held, self._started)

    def _grace_s(self) -> float | None:
        """How long to listen on after what has gone wrong; None if nothing has."""
        if any(rank.gone_at or (rank.failed and not rank.failed.secondary) for rank in self._ranks):
            return _GRACE_S
        return _ECHO_GRACE_S if any(rank.failed for rank in self._ranks) else None

    def _listen(self, timeout_s: float, on_phase: OnPhase) -> None:
        """Take what the ranks have to say, as soon as one says something."""
        waiting = [rank for rank in self._ranks if rank.waiting]
        ready = wait([at for rank in waiting for at in (rank.connection, rank.process.sentinel)], timeout_s)
        seen_at = time.monotonic()
        for rank in waiting:
            if not rank.connection.poll():
                if rank.process.sentinel in ready:
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
    return Rank(spec.rank, process, here)


def _rank_main(spec: RankSpec, connection: Connection) -> None:
    from dcpbench.worker.main import main

    main(spec, connection)
