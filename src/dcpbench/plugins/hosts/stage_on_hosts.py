"""Run one stage on ranks of several hosts: receive events of their agents until it has ended on each."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from dcpbench.core.stage_end import RankEnd, StageEnd
from dcpbench.executors.base import OnPhase
from dcpbench.plugins.hosts.hosts import ANSWER_S, HostProxy, Placed
from dcpbench.rank.messages import RunId

_LOOK_EVERY_S = 0.25
_DETECTION_S = 3.0
"""Seconds by which the death of an agent can be detected later than that of its ranks, which die with it."""
_SILENT_S = 5.0
"""Seconds that an agent can be silent. Including the start of a new agent, a failure costs less than 15 s."""
_LONGEST_GAP_S = 1.0
"""Maximum of the time between two checks that counts as silence, because a driver that was itself delayed has
not received answers."""


@dataclass(frozen=True)
class Answer:
    """An agent's answer to a call about a stage: its events since the last one."""

    stage: "StageOnHosts"
    agent: HostProxy
    call: Future[Any]


@dataclass
class Watch:
    """The state of a stage on one host: the time of the agent's last answer, the phase of each rank, and the
    end of the stage there."""

    placed: Placed
    last_heard: float
    phases: dict[int, str] = field(default_factory=dict)
    end: StageEnd | None = None

    def lose(self, exited_at: float) -> None:
        """End the stage on a host whose agent is lost; its ranks had exited by then."""
        agent, ends = self.placed.agent, list[RankEnd]()
        for local_rank, rank in enumerate(self.placed.ranks):
            at = (rank, local_rank, agent.name, self.phases.get(rank, "start"))
            ends.append(RankEnd(*at, exited_at=exited_at, lost=agent.lost))
        self.end = StageEnd(tuple(ends))


class StageOnHosts:
    """A stage that runs on several agents. A failure on one host concludes it on the others. An agent that is
    silent, or does not conclude in time, is declared lost."""

    def __init__(
        self, epoch: int, about: RunId, placed: Sequence[Placed], answers: "SimpleQueue[Answer]"
    ) -> None:
        """Prepare the stage, without starting it. `answers` can still receive answers about earlier
        stages."""
        self._epoch, self._answers = epoch, answers
        self._name = f"{about.cell}, epoch {epoch}"
        self._watches = {host.agent: Watch(host, math.inf) for host in placed}
        self.dropped: list[str] = []
        """Late answers of agents that were declared lost, as sentences."""

    def run(
        self, arguments: Sequence[Any], limit_s: float, on_phase: OnPhase, interrupted: Callable[[], bool]
    ) -> list[StageEnd]:
        """Start the stage by `HostProxy.run` with these arguments, and return its end on each host. After it
        is `interrupted`, some ends can be missing.

        Raises:
            AgentError: an agent raised.
        """
        now, end_by = time.monotonic(), math.inf
        conclude_at = now + limit_s
        for agent, watch in self._watches.items():
            watch.last_heard = now
            self._ask(agent, "run", *arguments)
        while (waiting := self._waiting()) and not interrupted():
            before = now
            self._listen(on_phase)
            now = time.monotonic()
            for watch in waiting:
                watch.last_heard += max(0.0, now - before - _LONGEST_GAP_S)
            for watch in self._waiting():
                if now >= watch.last_heard + _SILENT_S:
                    _give_up(watch, _SILENT_S)
                elif now >= end_by:
                    _give_up(watch, ANSWER_S)
            ended = [watch.end for watch in self._watches.values() if watch.end]
            if end_by == math.inf and (now >= conclude_at or not all(end.is_complete for end in ended)):
                end_by = now + ANSWER_S
                for watch in self._waiting():
                    watch.placed.agent.call("conclude", self._epoch, any(end.limit for end in ended))
        return [watch.end for watch in self._watches.values() if watch.end]

    def _waiting(self) -> list[Watch]:
        return [watch for watch in self._watches.values() if watch.end is None]

    def _ask(self, agent: HostProxy, method: str, *arguments: Any) -> None:
        """Call a method of an agent that returns events; `_hear` receives them."""
        call = agent.call(method, self._epoch, *arguments)
        call.add_done_callback(lambda done: self._answers.put(Answer(self, agent, done)))

    def _listen(self, on_phase: OnPhase) -> None:
        """Wait for an answer, and process all that have arrived."""
        with suppress(Empty):
            answer = self._answers.get(timeout=_LOOK_EVERY_S)
            while True:
                self._hear(answer, on_phase)
                answer = self._answers.get_nowait()

    def _hear(self, answer: Answer, on_phase: OnPhase) -> None:
        agent, watch = answer.agent, self._watches.get(answer.agent)
        if watch is None or watch.end or answer.stage is not self:
            if not answer.call.exception() and answer.call.result():
                self.dropped.append(f"host {agent.name}: a late answer was dropped: {answer.stage._name}")
            return
        events = agent.answer(answer.call)
        watch.last_heard = time.monotonic()
        if events is None:
            watch.lose(watch.last_heard - _DETECTION_S)
            return
        for event in events:
            if isinstance(event, StageEnd):
                watch.end = event
            else:
                watch.phases[event[0]] = event[1]
                on_phase(*event)
        if watch.end is None:
            self._ask(agent, "events")


def _give_up(watch: Watch, within_s: float) -> None:
    agent = watch.placed.agent
    agent.lost = f"was abandoned with its host, which did not answer within {within_s:g} s, last heard of"
    agent.give_up()
    watch.lose(watch.last_heard)
