"""The executor of several hosts: places ranks on them, reuses the ranks from stage to stage, and merges the
ends of a stage on all hosts."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import HostUsed, RankEnd, StageEnd
from dcpbench.executors.base import Executor, HostsLostError, OnPhase
from dcpbench.plugins.hosts.host_agent import GroupKey, HostState
from dcpbench.plugins.hosts.hosts import (
    ANSWER_S,
    HOSTS_S,
    START_S,
    AgentError,
    HostProxy,
    HostsEngine,
    Placed,
)
from dcpbench.plugins.hosts.stage_on_hosts import Answer, StageOnHosts
from dcpbench.rank.messages import CellSpec, StoreAddress, WorldSpec

_LOOK_EVERY_S = 0.25
_STARTS = 3
_END_S = 30.0
"""Seconds that ranks can take to exit or to be killed."""


@dataclass(frozen=True)
class _Clock:
    """Seconds by which the clocks of a host are ahead of the driver's, and its error."""

    wall_s: float
    monotonic_s: float
    error_s: float


class _StateRequest:
    """A request to an agent for the state of its ranks of a kind, and the time of the answer."""

    def __init__(self, agent: HostProxy, key: GroupKey, spec: CellSpec) -> None:
        """Send the request, unless the agent is lost."""
        self.agent = agent
        self._wall_s, self._at = time.time(), time.monotonic()
        self._answered_at: float | None = None
        self._call = None if agent.lost else agent.call("state", key, (spec.folder, spec.checkpoints))
        if self._call:
            self._call.add_done_callback(self._note)

    def answer(self) -> HostState | None:
        """Wait for the answer, and return it; None if there is none."""
        return self.agent.answer(self._call) if self._call and not self.agent.lost else None

    def clock(self, state: HostState) -> _Clock:
        """Return the agent's clock. It was read in the middle of the call, with an error of half its
        duration."""
        half_s = ((self._answered_at or time.monotonic()) - self._at) / 2
        ahead = state.wall_s - self._wall_s - half_s, state.monotonic_s - self._at - half_s
        return _Clock(*ahead, half_s)

    def _note(self, _: Future[Any]) -> None:
        self._answered_at = time.monotonic()


@dataclass
class HostsExecutor(Executor):
    """Runs stages on ranks of several hosts; `gpus` are numbered across all hosts."""

    engine: HostsEngine
    owner: int
    gpus: tuple[int, ...]
    interrupted: bool = False
    _groups: dict[WorldSpec, list[Placed]] = field(default_factory=dict)
    _answers: "SimpleQueue[Answer]" = field(default_factory=SimpleQueue)

    def run(self, kind: WorldSpec, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage on every host that has ranks of this kind, and merge its ends there."""
        try:
            clocks = self._ready(kind, spec)
            if isinstance(clocks, StageEnd):
                return clocks
            placed = self._groups[kind]
            stage = StageOnHosts(self.engine.next_number(), spec.run, placed, self._answers)
            arguments = ((self.owner, kind), spec, timeouts)
            ends = stage.run(arguments, timeouts.cell_s + ANSWER_S, on_phase, lambda: self.interrupted)
        except AgentError as error:
            self._kill(kind)
            return StageEnd(not_run=f"the ranks could not be run: {error}")
        if self.interrupted:
            return StageEnd(not_run="interrupted")
        end = _merged(placed, clocks, ends)
        if not end.is_clean:
            self._kill(kind)
        return replace(end, dropped=(*end.dropped, *stage.dropped))

    def keep_only(self, kinds: set[WorldSpec]) -> None:
        """Let the ranks of other kinds exit, to free their slots or to start new ones."""
        for kind in self._groups.keys() - kinds:
            self._all("leave", kind)
            del self._groups[kind]

    def interrupt(self) -> None:
        """End the stage that runs in another thread at once, and prevent others from starting."""
        self.interrupted = True
        for agent in self.engine.agents:
            agent.call("interrupt", self.owner)

    def end(self) -> None:
        """End all ranks, and wait until they and the processes that they started have exited."""
        for kind in list(self._groups):
            self._kill(kind)

    def _ready(self, kind: WorldSpec, spec: CellSpec) -> list[_Clock] | StageEnd:
        """Start ranks of this kind unless they run. Return the clock of each host, or why the stage cannot
        run.

        Raises:
            HostsLostError: the remaining hosts have no room for the ranks, or differ from the driver.
        """
        for _ in range(_STARTS):  # a host can die in between
            placed = self._groups.get(kind) or self._started(kind)
            requests = [_StateRequest(host.agent, (self.owner, kind), spec) for host in placed]
            clocks: list[_Clock] = []
            for request in requests:
                state = request.answer()
                if state and state.unseen:
                    return _not_shared(request.agent.name, state.unseen, spec)
                if state and state.usable:
                    clocks.append(request.clock(state))
            if len(clocks) == len(placed):
                return clocks
            self._kill(kind)
        lost = [f"host {host.agent.name}: {host.agent.lost}" for host in placed if host.agent.lost]
        why = "; ".join(lost) or "they died at once"
        return StageEnd(not_run=f"the ranks could not be started: {why}")

    def _started(self, kind: WorldSpec) -> list[Placed]:
        placed = self._groups[kind] = self._placed(kind)
        key, first, at = (self.owner, kind), placed[0].agent, None
        if len(placed) > 1:
            port = first.ask("listen", self.owner, wait_s=START_S)
            at = StoreAddress(first.address, port) if port else None
        if first.lost:
            return placed
        calls = []
        for number, host in enumerate(placed):
            address = at and replace(at, host_number=number)
            calls.append(host.agent.call("start", key, host.ranks, self._local_gpus(host.agent), address))
        for host, call in zip(placed, calls, strict=True):
            host.agent.answer(call, wait_s=START_S)
        return placed

    def _placed(self, kind: WorldSpec) -> list[Placed]:
        """Wait for the requested number of hosts, and place the ranks on hosts."""
        self.engine.refresh()
        wanted, deadline = self.engine.requested_hosts(kind.world_size), time.monotonic() + HOSTS_S
        while 0 < len(self.engine.agents) < wanted and time.monotonic() < deadline and not self.interrupted:
            time.sleep(_LOOK_EVERY_S)
            self.engine.refresh()
        placed = self.engine.placed(kind.world_size, kind.device, self.gpus)
        if placed is None:
            hosts = [agent.name for agent in self.engine.agents]
            left = f"{', '.join(hosts)} are" if len(hosts) > 1 else f"{next(iter(hosts), 'none')} is"
            limit = f" (executor.hosts={self.engine.config.hosts})" if wanted > 1 else ""
            no_room = f"{kind.world_size} ranks have no room on the hosts that are left{limit}"
            raise HostsLostError(f"{no_room}: {left}")
        for host in placed:
            if differs := self.engine.difference(host.agent):
                raise HostsLostError(differs)
        return placed

    def _local_gpus(self, agent: HostProxy) -> list[int]:
        return [number for number, gpu in enumerate(agent.gpus) if gpu in self.gpus]

    def _kill(self, kind: WorldSpec) -> None:
        self._all("kill", kind)
        self._groups.pop(kind, None)

    def _all(self, method: str, kind: WorldSpec) -> None:
        """Call a method for a group on all of its hosts that are not lost, and wait until all have
        returned."""
        there = [host.agent for host in self._groups.get(kind, ()) if not host.agent.lost]
        calls = [(agent, agent.call(method, (self.owner, kind))) for agent in there]
        for agent, call in calls:
            agent.answer(call, wait_s=_END_S)


def _not_shared(host: str, unseen: str, spec: CellSpec) -> StageEnd:
    """Return the end of a stage whose files are not visible on a host."""
    text = f"host {host} does not see {unseen}"
    if unseen == spec.folder:
        return StageEnd(not_run=f"{text}: hosts have to share the folder of the sweep")
    needs = "every rank reads .metadata and data files that other ranks have written"
    return StageEnd(skip=f"storage.root: {text}, which contains checkpoints; {needs}")


def _merged(placed: Sequence[Placed], clocks: Sequence[_Clock], ends: Sequence[StageEnd]) -> StageEnd:
    """Merge the ends of a stage on all hosts, using the driver's clock."""
    ranks: list[RankEnd] = []
    hosts: list[HostUsed] = []
    for host, clock, end in zip(placed, clocks, ends, strict=True):
        ahead_s = 0.0 if host.agent.lost else clock.monotonic_s
        for rank in end.ranks:
            failed = rank.failed and replace(rank.failed, at=rank.failed.at - ahead_s)
            exited_at = None if rank.exited_at is None else rank.exited_at - ahead_s
            ranks.append(replace(rank, failed=failed, exited_at=exited_at))
        hosts.append(HostUsed(host.agent.name, tuple(host.ranks), clock.wall_s, clock.error_s))
    limit = next((end.limit for end in ends if end.limit), None)
    dropped = tuple(text for end in ends for text in end.dropped)
    return StageEnd(tuple(ranks), limit, dropped=dropped, hosts=tuple(hosts))
