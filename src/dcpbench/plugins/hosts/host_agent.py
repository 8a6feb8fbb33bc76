"""The agent on a host: owns the ranks there, runs stages on them, and reports the events of each.

Events are the phases that ranks begin and, last, the end of the stage. Ranks are reused from stage to stage.
An agent determines no verdicts: it enforces time limits and requests stack dumps. Each stage has an epoch, a
unique number, so that a late call is not applied to the current stage.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any

import psutil

from dcpbench.code.provenance import installation
from dcpbench.config.schema import Config, TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup, machine
from dcpbench.executors.agent import own_agent
from dcpbench.executors.local import devices_of
from dcpbench.executors.rank_group import Conclusion, RankGroup, RanksOfHost, store_file
from dcpbench.rank.messages import CellSpec, Descriptor, StoreAddress, WorldSpec

_CARRIED = ("DCPBENCH_", "TORCH", "PYTORCH_", "PYTHONPATH", "NCCL_", "GLOO_", "CUBLAS_", "AWS_", "CXX")
"""Prefixes of the environment variables that ranks on every host take from the driver."""
_APPEARS_S = 5.0
"""Seconds that a shared file system can take to show what another host has created."""
_LOOK_EVERY_S = 0.1
_ANSWER_S = 1.0
"""Seconds that an agent waits for an event before it answers without one, to show that it is alive."""
CALLS = 64
"""Number of concurrent calls of an agent: the driver waits for events of every running cell."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

GroupKey = tuple[int, WorldSpec]
"""Identifies a group of ranks: the number of its executor, and its kind."""


Event = tuple[int, str, str] | StageEnd
"""A rank, the phase that it begins, and a sentence for the user, or the end of a stage."""


@dataclass(frozen=True)
class HostEnvironment:
    """The part of the driver's environment that ranks have on every host: the current folder, the module
    search path, and variables."""

    folder: str
    path: tuple[str, ...]
    variables: Mapping[str, str]

    @classmethod
    def here(cls) -> "HostEnvironment":
        """Return the environment of this process."""
        carried = {name: setting for name, setting in os.environ.items() if name.startswith(_CARRIED)}
        return cls(str(Path.cwd()), tuple(sys.path), carried)


@dataclass(frozen=True)
class HostState:
    """An agent's clocks (`time.time`, `time.monotonic`), whether all ranks of a group run, and the first
    folder of the driver that does not exist on the host."""

    wall_s: float
    monotonic_s: float
    usable: bool
    unseen: str | None


@dataclass
class _Stage:
    """A stage that runs on this host."""

    conclusion: Conclusion = field(default_factory=Conclusion)
    events: "SimpleQueue[Event | Exception]" = field(default_factory=SimpleQueue)

    def run(self, group: RankGroup, spec: CellSpec, timeouts: TimeoutsConfig) -> None:
        """Run the stage on a group, up to its last event."""
        try:
            self.events.put(group.run(spec, timeouts, self._begin_phase, self.conclusion))
        except Exception as error:  # noqa: BLE001 - the driver reports it
            self.events.put(error)

    def _begin_phase(self, rank: int, phase: str, note: str) -> None:
        self.events.put((rank, phase, note))


class HostAgent:
    """The ranks of one host."""

    def __init__(self, name: str, address: str, environment: HostEnvironment, modules: Sequence[str]) -> None:
        """Prepare this process to start ranks, with these modules imported; they are bound to `address`.

        Raises:
            OSError: the driver's folder does not exist here.
        """
        self._name, self._address = name, address
        os.chdir(environment.folder)
        sys.path[:] = environment.path
        os.environ.update(environment.variables)
        use_interface_of(address)
        # Otherwise processes started here import the engine's own script.
        sys.modules["__main__"] = ModuleType("__main__")
        cleanup.adopt_orphans()
        self._groups: dict[GroupKey, RankGroup] = {}
        self._listeners: dict[int, socket.socket] = {}
        self._stages: dict[int, _Stage] = {}
        self._concluded: set[int] = set()
        self._agent = own_agent(modules)

    def describe(self) -> dict[str, Any]:
        """Describe this host, and the code of its ranks, for `environment.json`."""
        description, more = machine.probe(self._agent, installation)
        description |= machine.details(more)
        # If Ray runs in another environment, ranks can import another copy of dcpbench than this agent.
        copies = " and ".join(sorted({description["dcpbench"], installation()["dcpbench"]}))
        return {"host": self._name, "address": self._address, **description, "dcpbench": copies}

    def target_error(self, configs: Sequence[Config]) -> str | None:
        """Return why ranks of this host cannot use a `workload.target`, or None."""
        return machine.target_error(self._agent, configs)

    def state(self, key: GroupKey, folders: Sequence[str]) -> HostState:
        """Return the clocks, and the state of a group and of folders, which a file system can show late."""
        group = self._groups.get(key)
        usable = group is not None and group.usable()
        unseen = next((folder for folder in folders if not shows(Path(folder))), None)
        return HostState(time.time(), time.monotonic(), usable, unseen)

    def listen(self, owner: int) -> int:
        """Return a port of this host at which the next group of an executor can rendezvous with its rank
        0."""
        self._listeners[owner] = socket.create_server((self._address, 0), backlog=1024)
        return int(self._listeners[owner].getsockname()[1])

    def start(
        self, key: GroupKey, ranks: Sequence[int], gpus: Sequence[int], at: StoreAddress | None
    ) -> None:
        """Start these ranks of a group; they rendezvous at an address, or are all on this host.

        Raises:
            OSError, EOFError: they could not be started.
        """
        owner, kind = key
        part = RanksOfHost(self._name, devices_of(kind, ranks, gpus))
        if at is None:
            with store_file() as store:
                self._groups[key] = RankGroup(self._agent, kind, part, store)
            return
        listener = self._listeners.pop(owner, None)
        try:
            port = Descriptor(listener.fileno()) if listener else None
            self._groups[key] = RankGroup(self._agent, kind, part, replace(at, listener=port))
        finally:
            if listener:
                listener.close()

    def run(self, epoch: int, key: GroupKey, spec: CellSpec, timeouts: TimeoutsConfig) -> list[Event]:
        """Begin a stage on the ranks of a group on this host, and return its first events."""
        stage, group = _Stage(), self._groups[key]
        self._stages[epoch] = stage
        if epoch in self._concluded:
            stage.events.put(StageEnd())
        else:
            threading.Thread(target=stage.run, args=(group, spec, timeouts)).start()
        return self.events(epoch)

    def events(self, epoch: int) -> list[Event]:
        """Wait briefly, and return the events of a stage since the last call; the last one is its end."""
        stage, events = self._stages[epoch], list[Event]()
        with suppress(Empty):
            event = stage.events.get(timeout=_ANSWER_S)
            while True:
                if isinstance(event, Exception):
                    raise event
                events.append(event)
                if isinstance(event, StageEnd):
                    del self._stages[epoch]
                    stage.conclusion.close()
                event = stage.events.get_nowait()
        return events

    def conclude(self, epoch: int, dumps: bool) -> None:
        """End a stage because of an event on another host, or prevent it from starting."""
        self._concluded.add(epoch)
        if stage := self._stages.get(epoch):
            stage.conclusion.reach(dumps)

    def leave(self, key: GroupKey) -> None:
        """Let the ranks of a group exit on their own, if it exists."""
        if key in self._groups:
            self._groups[key].leave()
            self.kill(key)

    def kill(self, key: GroupKey) -> None:
        """Kill the ranks of a group, if it exists, and wait until they have exited."""
        if group := self._groups.pop(key, None):
            group.kill()

    def interrupt(self, owner: int) -> None:
        """End the ranks of an executor at once."""
        for key in [key for key in self._groups if key[0] == owner]:
            with suppress(KeyError):
                self._groups[key].end()

    def end(self) -> None:
        """End all ranks and the processes that they leaked."""
        for key in list(self._groups):
            self.kill(key)
        self._agent.end()
        cleanup.end_orphans()


def shows(path: Path) -> bool:
    """Return whether a file or a folder exists, or appears within a few seconds."""
    deadline = time.monotonic() + _APPEARS_S
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208 - makes a network file system refresh its cache
        time.sleep(_LOOK_EVERY_S)
    return True


def use_interface_of(address: str) -> None:
    """Make ranks communicate over the network interface with an address, unless another one is configured."""
    interfaces = psutil.net_if_addrs().items()
    names = [
        name
        for name, addresses in interfaces
        if any(interface_address.address == address for interface_address in addresses)
    ]
    if not names and address.startswith("127."):  # the loopback interface has all of these
        names = ["lo"]
    for variable in _INTERFACES:
        os.environ.setdefault(variable, next(iter(names), ""))
