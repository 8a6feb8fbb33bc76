"""Runs stages on ranks of several hosts, and puts together what the agents there have seen."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import HostUsed, RankEnd, StageEnd
from dcpbench.executors.base import Executor, HostsLostError, OnPhase
from dcpbench.executors.host_agent import Key, State
from dcpbench.executors.hosts import ANSWER_S, HOSTS_S, START_S, Agent, AgentError, HostsEngine, Placed
from dcpbench.worker.messages import CellSpec, StoreAddress, WorldKind

_LOOK_EVERY_S = 0.25
_LOSS_IS_SEEN_S = 3.0
"""How much later than its ranks, which end with it, an agent may be seen to have died."""
_STARTS = 3
_SILENT_S = 5.0
"""How long an agent may be silent while it has a stage: with the start of another one, that is below 15 s."""
_HELD_UP_S = 1.0
"""No more than this of the time between two looks counts as an agent's silence: a driver that was itself held
up has not listened."""
_END_S = 30.0
"""How long ranks may take to leave or to be ended."""


@dataclass(frozen=True)
class _Clock:
    """How far the clocks of a host are ahead of the driver's, in seconds, and how much that may be off."""

    wall_s: float
    monotonic_s: float
    error_s: float


class _Asked:
    """The question to an agent what state its ranks of a kind are in, and when it was answered."""

    def __init__(self, agent: Agent, key: Key, spec: CellSpec) -> None:
        """Ask it, unless it is lost."""
        self.agent = agent
        self._wall_s, self._at = time.time(), time.monotonic()
        self._answered_at: float | None = None
        self._call = None if agent.lost else agent.call("state", key, (spec.folder, spec.checkpoints))
        if self._call:
            self._call.add_done_callback(self._note)

    def answer(self) -> State | None:
        """Waits for it; None where there is none."""
        return self.agent.answer(self._call) if self._call and not self.agent.lost else None

    def clock(self, state: State) -> _Clock:
        """The agent's clock, which was read in the middle, give or take half of the time that it took."""
        half_s = ((self._answered_at or time.monotonic()) - self._at) / 2
        ahead = state.wall_s - self._wall_s - half_s, state.monotonic_s - self._at - half_s
        return _Clock(*ahead, half_s)

    def _note(self, _: Future[Any]) -> None:
        self._answered_at = time.monotonic()


@dataclass
class HostsExecutor(Executor):
    """Runs stages on ranks of several hosts; `gpus` counts through those of all."""

    engine: HostsEngine
    owner: int
    gpus: tuple[int, ...]
    interrupted: bool = False
    _groups: dict[WorldKind, list[Placed]] = field(default_factory=dict)
    _given_up: dict[Future[Any], str] = field(default_factory=dict)
    """The calls of stages that were given up, and what each was about."""

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage on every host that has ranks of this kind, and put together how it ended there."""
        try:
            clocks = self._ready(kind, spec)
            if isinstance(clocks, StageEnd):
                return clocks
            placed, epoch = self._groups[kind], self.engine.next_number()
            ends = self._ends(epoch, (self.owner, kind), spec, timeouts, on_phase)
        except AgentError as error:
            self._kill(kind)
            return StageEnd(not_run=f"the ranks could not be run: {error}")
        if self.interrupted:
            return StageEnd(not_run="interrupted")
        end = _merged(placed, clocks, ends)
        if all(one.agent.is_withdrawn for one in placed if one.agent.lost):
            self.engine.refresh()  # where it was ended for good, the cell has no row
        if not end.is_clean:
            self._kill(kind)
        return replace(end, dropped=(*end.dropped, *self._late_answers()))

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """Have the ranks of other kinds leave: they would only take up room, or are to be fresh again."""
        for kind in self._groups.keys() - kinds:
            self._all("leave", kind)
            del self._groups[kind]

    def interrupt(self) -> None:
        """End what runs in another thread: its stage ends at once, and no other begins."""
        self.interrupted = True
        for agent in self.engine.agents:
            agent.call("interrupt", self.owner)

    def end(self) -> None:
        """End all ranks, and wait until they and whatever they started are gone."""
        for kind in list(self._groups):
            self._kill(kind)

    def _ready(self, kind: WorldKind, spec: CellSpec) -> list[_Clock] | StageEnd:
        """Have ranks of this kind on their hosts; the clock of each agent, or what it comes to that there are
        none.

        Raises:
            HostsLostError: they have no room on the hosts that are left, or must not run there.
        """
        for _ in range(_STARTS):  # a host may die meanwhile
            placed = self._groups.get(kind) or self._started(kind)
            asked = [_Asked(one.agent, (self.owner, kind), spec) for one in placed]
            clocks: list[_Clock] = []
            for question in asked:
                state = question.answer()
                if state and state.unseen:
                    return _not_shared(question.agent.name, state.unseen, spec)
                if state and state.usable:
                    clocks.append(question.clock(state))
            if len(clocks) == len(placed):
                return clocks
            self._kill(kind)
        lost = [f"host {one.agent.name}: {one.agent.lost}" for one in placed if one.agent.lost]
        why = "; ".join(lost) or "they died at once"
        return StageEnd(not_run=f"the ranks could not be started: {why}")

    def _started(self, kind: WorldKind) -> list[Placed]:
        self.engine.refresh()
        wanted, deadline = self.engine.hosts_of(kind.world_size), time.monotonic() + HOSTS_S
        while 0 < len(self.engine.names) < wanted and time.monotonic() < deadline and not self.interrupted:
            time.sleep(_LOOK_EVERY_S)
            self.engine.refresh()
        placed = self.engine.placed(kind.world_size, kind.device, self.gpus)
        if placed is None:
            hosts = self.engine.names
            left = f"{', '.join(hosts)} are" if len(hosts) > 1 else f"{next(iter(hosts), 'none')} is"
            asked = f" (executor.hosts={self.engine.config.hosts})" if wanted > 1 else ""
            no_room = f"{kind.world_size} ranks have no room on the hosts that are left{asked}"
            raise HostsLostError(f"{no_room}: {left}")
        for one in placed:
            if differs := self.engine.difference(one.agent):
                raise HostsLostError(differs)
        self._groups[kind] = placed
        key, first, at = (self.owner, kind), placed[0].agent, None
        if len(placed) > 1:
            port = first.ask("listen", self.owner, wait_s=START_S)
            at = StoreAddress(first.address, port) if port else None
        if first.lost:
            return placed
        calls = [
            one.agent.call(
                "start", key, one.ranks, one.local_rank(one.ranks.start), self._local_gpus(one), at
            )
            for one in placed
        ]
        for one, call in zip(placed, calls, strict=True):
            one.agent.answer(call, wait_s=START_S)
        return placed

    def _local_gpus(self, one: Placed) -> list[int]:
        agent = one.agent
        return [number for number, gpu in enumerate(agent.gpus, agent.local_rank) if gpu in self.gpus]

    def _ends(
        self, epoch: int, key: Key, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase
    ) -> dict[Agent, StageEnd]:
        """Run a stage; by agent how it ended there. What goes wrong on one concludes it on the others. One
        that is silent is given up, as one is that does not tell once the stage is over."""
        calls = {one.agent.call("run", epoch, key, spec, timeouts): one for one in self._groups[key[1]]}
        returned: SimpleQueue[Future[Any]] = SimpleQueue()
        for call in calls:
            call.add_done_callback(returned.put)
        ends: dict[Agent, StageEnd] = {}
        phases: dict[int, str] = {}
        looks: dict[Future[Any], Placed] = {}
        silent_s = {one.agent: 0.0 for one in calls.values()}
        over_at: float | None = None
        looked = time.monotonic()
        deadline = looked + timeouts.cell_s + ANSWER_S
        while calls and not self.interrupted:
            for call in _taken(returned, looked + _LOOK_EVERY_S - time.monotonic()):
                if (one := calls.pop(call, None)) is None:  # it was given up
                    continue
                end = one.agent.answer(call)
                seen = one.agent.lost_at or time.monotonic()
                ends[one.agent] = end or _lost(one, phases, seen - _LOSS_IS_SEEN_S)
            if (now := time.monotonic()) >= looked + _LOOK_EVERY_S:
                passed_s, looked = min(now - looked, _HELD_UP_S), now
                silent_s = {agent: silence + passed_s for agent, silence in silent_s.items()}
                _look(looks, list(calls.values()), epoch, phases, silent_s, on_phase)
            for call, one in list(calls.items()):
                is_silent = silent_s[one.agent] >= _SILENT_S
                if is_silent or now >= (over_at or now) + ANSWER_S:
                    del calls[call]
                    self._give_up(call, one.agent, _SILENT_S if is_silent else ANSWER_S, epoch, spec)
                    ends[one.agent] = _lost(one, phases, now - silent_s[one.agent])
            if over_at is None and (now >= deadline or not all(end.is_complete for end in ends.values())):
                over_at, dumps = now, any(end.limit for end in ends.values())
                for one in calls.values():
                    one.agent.call("conclude", epoch, dumps)
        return ends

    def _give_up(self, call: Future[Any], agent: Agent, within_s: float, epoch: int, spec: CellSpec) -> None:
        run = spec.run
        about = f"{run.cell}, try {run.attempt + 1}, epoch {epoch}"
        self._given_up[call] = f"host {agent.name}: a late answer was dropped: {about}"
        agent.lost = f"was given up with its host, which did not answer within {within_s:g} s, last heard of"
        agent.give_up()

    def _late_answers(self) -> list[str]:
        """What has come since of stages that were given up."""
        ended = {call: self._given_up.pop(call) for call in list(self._given_up) if call.done()}
        return [about for call, about in ended.items() if not call.exception()]

    def _kill(self, kind: WorldKind) -> None:
        self._all("kill", kind)
        self._groups.pop(kind, None)

    def _all(self, method: str, kind: WorldKind) -> None:
        """Call a method about a group on all of its hosts that are there, and wait until it is done."""
        there = [one.agent for one in self._groups.get(kind, ()) if not one.agent.lost]
        calls = [(agent, agent.call(method, (self.owner, kind))) for agent in there]
        for agent, call in calls:
            agent.answer(call, wait_s=_END_S)


def _not_shared(host: str, unseen: str, spec: CellSpec) -> StageEnd:
    """How a stage ends whose files a host does not see."""
    text = f"host {host} does not see {unseen}"
    if unseen == spec.folder:
        return StageEnd(not_run=f"{text}: hosts have to share the folder of the sweep")
    needs = "every rank reads .metadata, which one writes, and what others have written"
    return StageEnd(skip=f"storage.root: {text}, where checkpoints go: {needs}")


def _taken(returned: "SimpleQueue[Future[Any]]", limit_s: float) -> list[Future[Any]]:
    """The calls that have returned, once one has; none after that time."""
    taken: list[Future[Any]] = []
    with suppress(Empty):
        taken.append(returned.get(timeout=max(0.0, limit_s)))
        while True:
            taken.append(returned.get_nowait())
    return taken


def _look(
    looks: dict[Future[Any], Placed],
    at: list[Placed],
    epoch: int,
    phases: dict[int, str],
    silent_s: dict[Agent, float],
    on_phase: OnPhase,
) -> None:
    """Take note of how far ranks are, and that agents have said so; at most one question an agent is under
    way."""
    for call in [call for call in looks if call.done() and not call.exception()]:
        silent_s[looks.pop(call).agent] = 0.0
        for rank, phase in call.result().items():
            if phases.get(rank) != phase:
                on_phase(rank, phase)
            phases[rank] = phase
    asked = [one.agent for one in looks.values()]
    looks.update((one.agent.call("phases", epoch), one) for one in at if one.agent not in asked)


def _lost(one: Placed, phases: dict[int, str], gone_at: float) -> StageEnd:
    """How a stage ended on ranks that were lost with their agent, which was gone by then."""
    agent, ends = one.agent, list[RankEnd]()
    for rank in one.ranks:
        at = RankEnd(rank, one.local_rank(rank), agent.name, phases.get(rank, "start"))
        ends.append(replace(at, gone_at=gone_at, lost=agent.lost))
    return StageEnd(tuple(ends))


def _merged(placed: Sequence[Placed], clocks: Sequence[_Clock], ends: dict[Agent, StageEnd]) -> StageEnd:
    """How a stage ended on all hosts, by the driver's clock."""
    ranks: list[RankEnd] = []
    for one, clock in zip(placed, clocks, strict=True):
        ahead_s = 0.0 if one.agent.lost else clock.monotonic_s
        for rank in ends[one.agent].ranks:
            failed = rank.failed and replace(rank.failed, at=rank.failed.at - ahead_s)
            gone_at = None if rank.gone_at is None else rank.gone_at - ahead_s
            ranks.append(replace(rank, failed=failed, gone_at=gone_at))
    limits = [end.limit for end in ends.values() if end.limit]
    dropped = tuple(told for end in ends.values() for told in end.dropped)
    limit = limits[0] if limits else None
    return StageEnd(tuple(ranks), limit, dropped=dropped, hosts=_hosts_used(placed, clocks))


def _hosts_used(placed: Sequence[Placed], clocks: Sequence[_Clock]) -> tuple[HostUsed, ...]:
    """The hosts of a group, each once, with the clock of its first agent."""
    used: dict[str, HostUsed] = {}
    for one, clock in zip(placed, clocks, strict=True):
        name = one.agent.name
        first = used.setdefault(name, HostUsed(name, (), clock.wall_s, clock.error_s))
        used[name] = replace(first, ranks=(*first.ranks, *one.ranks))
    return tuple(used.values())
