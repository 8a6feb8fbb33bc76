"""Ranks of the processes that torchrun starts: each owns one (`dcpbench.executors.torchrun_process`).

torchrun tells which processes there are, and starts all anew when one has died. They come to the driver,
which outlives them: a cell in which one died has its row, and the next runs on those that come then.
"""

import itertools
import json
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.executors.base import HostsLostError
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.hosts import START_S, Agent, HostsEngine
from dcpbench.executors.hosts_executor import HostsExecutor
from dcpbench.executors.torchrun_process import Introduction, Leave
from dcpbench.worker.messages import DRIVER_OF_TORCHRUN, ElasticRun

_COME_S = 120.0
"""How long the processes of a group may take to come, also after torchrun has ended one."""


class _GoneError(Exception):
    """A process is gone; the text says how."""


@dataclass(eq=False)
class _Process(Agent):
    """A process of torchrun's, and what it has been asked and has not answered yet."""

    which: Introduction = field(kw_only=True)
    connection: Connection = field(kw_only=True)
    gone: str | None = None
    _calls: dict[int, Future[Any]] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        call: Future[Any] = Future()
        with self._one_at_a_time:
            number = next(self._numbers)
            if self.gone:
                call.set_exception(_GoneError(self.gone))
                return call
            self._calls[number] = call
            with suppress(OSError):  # `listen` sees it too
                self.connection.send((number, method, arguments))
        return call

    def why_lost(self, error: BaseException) -> str | None:
        return str(error) if isinstance(error, _GoneError) else None

    def give_up(self) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def leave(self, silent: Sequence[int]) -> None:
        """Have it end, and those processes of its host: torchrun starts all anew then."""
        with suppress(OSError):
            self.connection.send(Leave(tuple(silent)))
        self.give_up()

    def listen(self) -> None:
        """Take its answers until it is gone."""
        how = "was lost with its process of torchrun, which died, last heard of"
        with suppress(EOFError, OSError):
            while (answer := self.connection.recv()) is not None:
                number, result, error = answer
                call = self._calls.pop(number)
                if error is None:
                    call.set_result(result)
                else:
                    call.set_exception(RuntimeError(error))
            how = "was lost with its process, which torchrun ended, last heard of"
            self.is_withdrawn = True
        with self._one_at_a_time:
            self.gone, self.lost_at = how, time.monotonic()
            self.connection.close()
        for call in self._calls.values():
            call.set_exception(_GoneError(how))


class TorchrunEngine(HostsEngine):
    """The hosts of a run of torchrun, which are named by their addresses."""

    agents: Sequence[_Process]

    def __init__(self, config: ExecutorConfig) -> None:
        super().__init__(config)
        given = os.environ.pop(DRIVER_OF_TORCHRUN, None)
        if given is None:
            raise ConfigError("executor=torchrun: is chosen by itself: torchrun … -m dcpbench …")
        told = json.loads(given)
        self._run, self._key = ElasticRun(**told["run"]), bytes.fromhex(told["key"])
        self._listener = socket.socket(fileno=told["listener"])
        self._processes: dict[int, _Process] = {}
        self._changed = threading.Condition()
        self._is_over = False

    def begin(self, modules: Sequence[str]) -> None:
        for target in (self._accept, self._watch):
            threading.Thread(target=target, daemon=True).start()

    def probe(self) -> Machine:
        try:
            self.refresh()
        except HostsLostError as error:
            raise ConfigError(f"executor=torchrun: {error}") from None
        return replace(super().probe(), ranks=len(self.agents))

    def refresh(self) -> None:
        """Have a process of each rank, as many as torchrun has started, once all of them are there.

        Raises:
            HostsLostError: they do not come, or torchrun has ended.
        """
        if lost := [agent.which for agent in self.agents if agent.lost]:
            for agent in self.agents:
                agent.leave([one.process for one in lost if one.node == agent.which.node])
        with self._changed:
            whole = self._changed.wait_for(lambda: self._is_over or self._whole(), _COME_S)
            if self._is_over or not whole:
                late = f"torchrun has not started all its processes within {_COME_S:g} s"
                raise HostsLostError("torchrun has ended" if self._is_over else late)
            self.agents = [self._processes[rank] for rank in sorted(self._processes)]
            self._introduce([agent for agent in self.agents if not agent.name])

    def _introduce(self, new: Sequence[_Process]) -> None:
        """Tell processes the names of their hosts, and ask for their GPUs: each may use the one of its local
        rank."""
        addresses = {agent.which.node: agent.address for agent in self.agents}
        alike = len(set(addresses.values())) < len(addresses)
        for agent in new:
            agent.name = f"{agent.address}/{agent.which.node}" if alike else agent.address
            with suppress(OSError):
                agent.connection.send(agent.name)
        calls = [agent.call("describe") for agent in new]
        first_gpu = itertools.count()
        for agent, call in zip(new, calls, strict=True):
            described = agent.answer(call, START_S)
            has_one = described is not None and agent.local_rank < described["gpu_count"]
            agent.gpus = (next(first_gpu),) if has_one else ()

    def _whole(self) -> bool:
        """Whether there is a process of each rank, of one group."""
        live = {rank: one for rank, one in self._processes.items() if not (one.gone or one.lost)}
        self._processes = live
        return bool(live) and {one.which.processes for one in live.values()} == {len(live)}

    def executor(self, gpus: tuple[int, ...]) -> HostsExecutor:
        return HostsExecutor(self, self.next_number(), gpus)

    def end(self) -> None:
        for agent in self.agents:
            agent.ask("end")

    def _watch(self) -> None:
        """Wait for the end of torchrun on this host, which ends the sweep."""
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(self._run.torchrun)], [], [])
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            taken, _ = self._listener.accept()
            threading.Thread(target=self._welcome, args=(taken,), daemon=True).start()

    def _welcome(self, taken: socket.socket) -> None:
        """Take a process in that has the key, and its answers."""
        connection = Connection(taken.detach())
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            which: Introduction = connection.recv()
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            return
        process = _Process("", which.address, (), which.local_rank, 1, which=which, connection=connection)
        with self._changed:
            self._processes[which.rank] = process
            self._changed.notify_all()
        process.listen()
        with self._changed:
            self._changed.notify_all()
