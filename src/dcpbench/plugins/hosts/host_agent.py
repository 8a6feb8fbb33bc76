"""The agent on a host: owns the ranks there, runs stages on them, and reports the events of each.

Events are the phases that ranks begin and, last, how the stage ended there. Ranks stay up from stage to
stage. An agent judges nothing: it watches limits of time and has stacks dumped. Each stage has an epoch, a
unique number, so that a call that comes late is not taken for one about the stage that runs now.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any

import psutil

from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup, fork_server
from dcpbench.executors.local import devices_of
from dcpbench.executors.rank_group import Conclusion, Part, RankGroup, store_file
from dcpbench.rank.messages import CellSpec, Descriptor, StoreAddress, WorldKind
from dcpbench.records.installation import installation

_CARRIED = ("DCPBENCH_", "TORCH", "PYTORCH_", "PYTHONPATH", "NCCL_", "GLOO_", "CUBLAS_", "AWS_", "CXX")
"""How the names of variables begin that ranks have from the driver's environment on every host."""
_SHOWS_S = 5.0
"""How long a shared file system may take to show what another host has made where nobody here has looked
before."""
_LOOK_EVERY_S = 0.1
_SAYS_S = 1.0
"""How long an agent waits for an event before it answers without one, so that the driver hears of it."""
CALLS = 64
"""How many calls an agent takes at once: the driver waits for events of each cell that runs then."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Key = tuple[int, WorldKind]
"""Of a group: the number of the executor that it is of, and its kind."""


Event = tuple[int, str] | StageEnd
"""A rank and the phase that it begins; or how a stage ended."""


@dataclass(frozen=True)
class HostEnvironment:
    """The part of the driver's environment that ranks have on every host: the current folder, the path that
    modules are found by, and variables."""

    folder: str
    path: tuple[str, ...]
    variables: Mapping[str, str]

    @classmethod
    def here(cls) -> "HostEnvironment":
        """Those of this process."""
        carried = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
        return cls(str(Path.cwd()), tuple(sys.path), carried)


@dataclass(frozen=True)
class State:
    """An agent's clocks (`time.time`, `time.monotonic`), whether the ranks of a group all run, and which of
    the folders that the driver has made is not there."""

    wall_s: float
    monotonic_s: float
    usable: bool
    unseen: str | None


@dataclass
class _Stage:
    """A stage that runs here."""

    conclusion: Conclusion = field(default_factory=Conclusion)
    events: "SimpleQueue[Event | Exception]" = field(default_factory=SimpleQueue)

    def run(self, group: RankGroup, spec: CellSpec, timeouts: TimeoutsConfig) -> None:
        """Run it on a group, up to its last event."""
        try:
            self.events.put(group.run(spec, timeouts, self._begin_phase, self.conclusion))
        except Exception as error:  # noqa: BLE001 - the driver reports it
            self.events.put(error)

    def _begin_phase(self, rank: int, phase: str) -> None:
        self.events.put((rank, phase))


class HostAgent:
    """The ranks of one host."""

    def __init__(self, name: str, address: str, around: HostEnvironment, modules: Sequence[str]) -> None:
        """Make this process one that ranks can be started from, with these modules; they are bound to
        `address`.

        Raises:
            OSError: the driver's folder is not there.
        """
        self._name, self._address = name, address
        os.chdir(around.folder)
        sys.path[:] = around.path
        os.environ.update(around.variables)
        use_interface_of(address)
        # Else whatever is started from here imports the engine's own script.
        sys.modules["__main__"] = ModuleType("__main__")
        cleanup.adopt_orphans()
        self._groups: dict[Key, RankGroup] = {}
        self._listeners: dict[int, socket.socket] = {}
        self._stages: dict[int, _Stage] = {}
        self._concluded: set[int] = set()
        self._context = fork_server.fork_server(modules)

    def describe(self) -> dict[str, Any]:
        """This host, and the code that its ranks would run, as it goes into `environment.json`."""
        machine = fork_server.probe(self._context, installation)
        machine.complete()
        # The ranks of a host where Ray runs in another environment may import another copy than this agent.
        copies = " and ".join(sorted({machine.description["dcpbench"], installation()["dcpbench"]}))
        return {"host": self._name, "address": self._address, **machine.description, "dcpbench": copies}

    def state(self, key: Key, folders: Sequence[str]) -> State:
        """Its clocks, and what it says of a group and of folders, which a file system may show late."""
        group = self._groups.get(key)
        usable = group is not None and group.usable()
        unseen = next((folder for folder in folders if not shows(Path(folder))), None)
        return State(time.time(), time.monotonic(), usable, unseen)

    def listen(self, owner: int) -> int:
        """A port of this host's address at which rank 0 of the next group of an executor will be met."""
        self._listeners[owner] = socket.create_server((self._address, 0), backlog=1024)
        return int(self._listeners[owner].getsockname()[1])

    def start(self, key: Key, ranks: Sequence[int], gpus: Sequence[int], at: StoreAddress | None) -> None:
        """Start these ranks of a group; they rendezvous at an address, or are all here.

        Raises:
            OSError, EOFError: they could not be started.
        """
        owner, kind = key
        part = Part(self._name, devices_of(kind, ranks, gpus))
        if at is None:
            with store_file() as store:
                self._groups[key] = RankGroup(self._context, kind, part, store)
            return
        listener = self._listeners.pop(owner, None)
        try:
            mine = Descriptor(listener.fileno()) if listener else None
            self._groups[key] = RankGroup(self._context, kind, part, StoreAddress(at.host, at.port, mine))
        finally:
            if listener:
                listener.close()

    def run(self, epoch: int, key: Key, spec: CellSpec, timeouts: TimeoutsConfig) -> list[Event]:
        """Begin a stage on the ranks of a group here, and return its first events."""
        stage, group = _Stage(), self._groups[key]
        self._stages[epoch] = stage
        if epoch in self._concluded:
            stage.events.put(StageEnd())
        else:
            threading.Thread(target=stage.run, args=(group, spec, timeouts)).start()
        return self.events(epoch)

    def events(self, epoch: int) -> list[Event]:
        """Wait shortly, and return the events of a stage since the last call; the last one is its end."""
        stage, events = self._stages[epoch], list[Event]()
        with suppress(Empty):
            event = stage.events.get(timeout=_SAYS_S)
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
        """End a stage because of an event elsewhere; one that has yet to begin does not begin."""
        self._concluded.add(epoch)
        if stage := self._stages.get(epoch):
            stage.conclusion.reach(dumps)

    def leave(self, key: Key) -> None:
        """Have the ranks of a group end by themselves, if there is one."""
        if key in self._groups:
            self._groups[key].leave()
            self.kill(key)

    def kill(self, key: Key) -> None:
        """End the ranks of a group, if there is one, and wait until they are gone."""
        if group := self._groups.pop(key, None):
            group.kill()

    def interrupt(self, owner: int) -> None:
        """End the ranks of an executor, whatever they are at."""
        for key in [key for key in self._groups if key[0] == owner]:
            with suppress(KeyError):
                self._groups[key].end()

    def end(self) -> None:
        """End all ranks and what they have left behind."""
        for key in list(self._groups):
            self.kill(key)
        cleanup.end_orphans()


def shows(path: Path) -> bool:
    """Whether a file or a folder is there, or soon is."""
    deadline = time.monotonic() + _SHOWS_S
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208 - has a network file system look again
        time.sleep(_LOOK_EVERY_S)
    return True


def use_interface_of(address: str) -> None:
    """Have ranks talk over the network interface that has an address, if no other is named."""
    for variable in _INTERFACES:
        os.environ.setdefault(variable, _interface(address))


def _interface(address: str) -> str:
    """The network interface that has an address; that of loopback addresses has them all."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return "lo" if address.startswith("127.") else ""
