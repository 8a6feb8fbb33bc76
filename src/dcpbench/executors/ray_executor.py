"""Runs stages on ranks of several hosts of a Ray cluster, and puts together what each of them has seen."""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from dcpbench.config.schema import TimeoutsConfig
from dcpbench.executors.base import Executor, HostsLostError, HostUsed, OnPhase, Outcome
from dcpbench.executors.host_agent import Key
from dcpbench.executors.outcome import RankEnd, StageEnd, outcome_of
from dcpbench.executors.placement import spread
from dcpbench.executors.ray_hosts import ANSWER_S, START_S, Host, RayHosts
from dcpbench.records.findings import LimitReached
from dcpbench.worker.messages import CellSpec, StoreAddress, WorldKind

_LOOK_EVERY_S = 0.25
_LOSS_IS_SEEN_S = 3.0
"""How much later than the ranks that it takes along an actor may be seen to have died."""
_STARTS = 3
_END_S = 30.0
"""How long ranks may take to leave or to be ended."""


@dataclass(frozen=True)
class _Clock:
    """How far the clocks of a host are ahead of the driver's, in seconds, and how much that may be off."""

    wall_s: float
    monotonic_s: float
    error_s: float


@dataclass(frozen=True)
class _Placed:
    """The ranks of a group that a host has."""

    host: Host
    ranks: range

    def place_of(self, rank: int) -> str:
        """Where a rank is, in words."""
        return f"local rank {rank - self.ranks.start} of host {self.host.name}"


@dataclass
class RayExecutor(Executor):
    """Runs stages on ranks of several hosts; `gpus` counts through those of all."""

    cluster: RayHosts
    owner: int
    gpus: tuple[int, ...]
    interrupted: bool = False
    _groups: dict[WorldKind, list[_Placed]] = field(default_factory=dict)
    _given_up: dict[Any, str] = field(default_factory=dict)
    """The calls of stages that were given up, and what each was about."""

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> Outcome:
        """Run a stage on every host that has ranks of this kind, and put together how it ended there."""
        try:
            clocks = self._ready(kind, spec.folder)
            if isinstance(clocks, str):
                return Outcome([], "error", problem=clocks)
            placed, epoch = self._groups[kind], self.cluster.next_number()
            ends = self._ends(epoch, (self.owner, kind), spec, timeouts, on_phase)
        except RayTaskError as error:
            self._kill(kind)
            return Outcome([], "error", problem=f"the ranks could not be run: {error.cause}")
        if self.interrupted:
            return Outcome([], "error", problem="interrupted")
        outcome = _with_places(outcome_of(_merged(placed, clocks, ends)), placed)
        if outcome.status or any(report.left_behind for report in outcome.reports):
            self._kill(kind)
        hosts = tuple(
            HostUsed(one.host.name, tuple(one.ranks), clock.wall_s, clock.error_s)
            for one, clock in zip(placed, clocks, strict=True)
        )
        return replace(outcome, hosts=hosts, dropped=(*outcome.dropped, *self._late_answers()))

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """Have the ranks of other kinds leave: they would only take up room, or are to be fresh again."""
        for kind in self._groups.keys() - kinds:
            self._all("leave", kind)
            del self._groups[kind]

    def interrupt(self) -> None:
        """End what runs in another thread: its stage ends at once, and no other begins."""
        self.interrupted = True
        for host in list(self.cluster.hosts.values()):
            host.call("interrupt", self.owner)

    def end(self) -> None:
        """End all ranks, and wait until they and whatever they started are gone."""
        for kind in list(self._groups):
            self._kill(kind)

    def _ready(self, kind: WorldKind, folder: str) -> list[_Clock] | str:
        """Have ranks of this kind on their hosts; the clock of each host, or why there are none.

        Raises:
            HostsLostError: there is no longer room for them.
        """
        for _ in range(_STARTS):  # a host may die meanwhile
            placed = self._groups.get(kind) or self._started(kind)
            clocks: list[_Clock] = []
            for one in placed:
                asked_s, asked_at = time.time(), time.monotonic()
                state = self.cluster.ask(one.host, "state", (self.owner, kind), folder)
                half_s = (time.monotonic() - asked_at) / 2
                if state and not state.shared:
                    return f"host {one.host.name} does not see {folder}: hosts have to share it"
                if state and state.usable:
                    ahead = state.wall_s - asked_s - half_s, state.monotonic_s - asked_at - half_s
                    clocks.append(_Clock(*ahead, half_s))
            if len(clocks) == len(placed):
                return clocks
            self._kill(kind)
        lost = [f"host {one.host.name}: {one.host.lost}" for one in placed if one.host.lost]
        return f"the ranks could not be started: {'; '.join(lost) or 'they died at once'}"

    def _started(self, kind: WorldKind) -> list[_Placed]:
        self.cluster.refresh()
        hosts = self.cluster.hosts
        parts = spread(kind.world_size, self.cluster.room(kind.device, self.gpus))
        if parts is None:
            left = f"{', '.join(hosts)} are" if len(hosts) > 1 else f"{next(iter(hosts), 'none')} is"
            raise HostsLostError(f"{kind.world_size} ranks have no room on the hosts that are left: {left}")
        placed = [_Placed(hosts[name], ranks) for name, ranks in parts.items()]
        self._groups[kind] = placed
        key, first, at = (self.owner, kind), placed[0].host, None
        if len(placed) > 1:
            port = self.cluster.ask(first, "listen", self.owner, wait_s=START_S)
            at = StoreAddress(first.address, port) if port else None
        if first.lost:
            return placed
        calls = [one.host.call("start", key, one.ranks, self._local_gpus(one.host), at) for one in placed]
        for one, call in zip(placed, calls, strict=True):
            self.cluster.answer(one.host, call, wait_s=START_S)
        return placed

    def _local_gpus(self, host: Host) -> list[int]:
        return [number for number, gpu in enumerate(host.gpus) if gpu in self.gpus]

    def _ends(
        self, epoch: int, key: Key, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase
    ) -> dict[str, StageEnd]:
        """Run a stage; by host how it ended there. What goes wrong on one concludes it on the others; one
        that does not tell then is given up."""
        placed = {one.host.name: one for one in self._groups[key[1]]}
        calls = {one.host.call("run", epoch, key, spec, timeouts): one for one in placed.values()}
        ends: dict[str, StageEnd] = {}
        phases: dict[int, str] = {}
        looks: dict[Any, _Placed] = {}
        over, deadline = False, time.monotonic() + timeouts.cell_s + ANSWER_S
        while calls and not self.interrupted:
            done, _ = ray.wait(list(calls), timeout=_LOOK_EVERY_S)
            for call in done:
                one = calls.pop(call)
                end = self.cluster.answer(one.host, call)
                ends[one.host.name] = end or _lost(one, phases)
            if not done:
                _look(looks, list(calls.values()), epoch, phases, on_phase)
            late = time.monotonic() >= deadline
            if not over and calls and (late or not all(end.is_whole for end in ends.values())):
                over, deadline = True, time.monotonic() + ANSWER_S
                dumps = any(end.limit for end in ends.values())
                for one in calls.values():
                    one.host.call("conclude", epoch, dumps)
            elif over and late:
                for call, one in calls.items():
                    self._give_up(call, one, epoch, spec)
                    ends[one.host.name] = _lost(one, phases)
                break
        return ends

    def _give_up(self, call: Any, one: _Placed, epoch: int, spec: CellSpec) -> None:
        run = spec.run
        about = f"{run.cell}, try {run.attempt + 1}, epoch {epoch}"
        self._given_up[call] = f"host {one.host.name}: a late answer was dropped: {about}"
        one.host.lost = (
            f"was given up with its host, which did not answer within {ANSWER_S:g} s, last heard of"
        )
        ray.kill(one.host.actor)

    def _late_answers(self) -> list[str]:
        """What has come since of stages that were given up."""
        told = []
        for call in _done(self._given_up):
            about = self._given_up.pop(call)
            with suppress(RayError):  # it will never come
                ray.get(call)
                told.append(about)
        return told

    def _kill(self, kind: WorldKind) -> None:
        self._all("kill", kind)
        self._groups.pop(kind, None)

    def _all(self, method: str, kind: WorldKind) -> None:
        """Call a method about a group on all of its hosts that are there, and wait until it is done."""
        there = [one.host for one in self._groups.get(kind, ()) if not one.host.lost]
        calls = [(host, host.call(method, (self.owner, kind))) for host in there]
        for host, call in calls:
            self.cluster.answer(host, call, wait_s=_END_S)


def _done(calls: Collection[Any]) -> list[Any]:
    """Those of the calls that have returned, or failed."""
    ready: list[Any] = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else []
    return ready


def _look(
    looks: dict[Any, _Placed], at: list[_Placed], epoch: int, phases: dict[int, str], on_phase: OnPhase
) -> None:
    """Take note of how far ranks are; at most one question a host is under way."""
    for call in _done(looks):
        del looks[call]
        with suppress(RayError):
            for rank, phase in ray.get(call).items():
                if phases.get(rank) != phase:
                    on_phase(rank, phase)
                phases[rank] = phase
    asked = {one.host.name for one in looks.values()}
    looks.update((one.host.call("phases", epoch), one) for one in at if one.host.name not in asked)


def _lost(one: _Placed, phases: dict[int, str]) -> StageEnd:
    """How a stage ended on ranks that were lost with their host."""
    gone_at = time.monotonic() - _LOSS_IS_SEEN_S
    at = {rank: phases.get(rank, "start") for rank in one.ranks}
    return StageEnd(
        tuple(
            RankEnd(rank, phase, phase, alive=False, gone_at=gone_at, ending=one.host.lost or "was lost")
            for rank, phase in at.items()
        )
    )


def _merged(placed: Sequence[_Placed], clocks: Sequence[_Clock], ends: dict[str, StageEnd]) -> StageEnd:
    """How a stage ended on all hosts, by the driver's clock."""
    ranks: list[RankEnd] = []
    for one, clock in zip(placed, clocks, strict=True):
        ahead_s = 0.0 if one.host.lost else clock.monotonic_s
        for rank in ends[one.host.name].ranks:
            failed = rank.failed and replace(rank.failed, at=rank.failed.at - ahead_s)
            gone_at = None if rank.gone_at is None else rank.gone_at - ahead_s
            ranks.append(replace(rank, failed=failed, gone_at=gone_at))
    limits = [end.limit for end in ends.values() if end.limit]
    dropped = tuple(told for end in ends.values() for told in end.dropped)
    return StageEnd(tuple(ranks), limits[0] if limits else None, dropped)


def _with_places(outcome: Outcome, placed: Sequence[_Placed]) -> Outcome:
    """With the host and the local rank of each rank that its cause is about."""
    of_rank = {rank: one for one in placed for rank in one.ranks}
    if outcome.cause is None:
        return outcome
    if isinstance(outcome.cause, LimitReached):
        hosts = {rank: of_rank[rank].host.name for rank in outcome.cause.late}
        return replace(outcome, cause=replace(outcome.cause, hosts=hosts))
    rank = outcome.cause.rank
    one = of_rank[rank]
    details = outcome.details | {"host": one.host.name, "local_rank": rank - one.ranks.start}
    return replace(outcome, cause=replace(outcome.cause, place=one.place_of(rank)), details=details)
