"""What an engine of many hosts has on each of them: it owns the ranks there.

One call runs a stage on them and returns how it ended; ranks stay up from call to call. An agent judges
nothing: it watches limits, has stacks dumped, and tells the driver what it has seen. Each run of a stage has
an epoch, a number of its own. What is about one that was given up is refused, so that nothing that comes late
(a call, a conclusion) is taken for something about the stage that runs now.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup, fork_server
from dcpbench.executors.local import devices_of
from dcpbench.executors.rank_group import Conclusion, Part, RankGroup, store_file
from dcpbench.records.installation import installation
from dcpbench.worker.messages import CellSpec, Descriptor, StoreAddress, WorldKind

_CARRIED = ("DCPBENCH_", "TORCH", "PYTORCH_", "PYTHONPATH", "NCCL_", "GLOO_", "CUBLAS_", "AWS_", "CXX")
"""How the names of variables begin that ranks have from the driver's environment on every host."""
_SHOWS_S = 5.0
"""How long a shared file system may take to show what another host has made where nobody here has looked
before."""
_LOOK_EVERY_S = 0.1
CALLS = 64
"""How many calls an agent takes at once: a stage of each cell that runs at the same time is one, and a
question how far it is must not wait for those."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Key = tuple[int, WorldKind]
"""Of a group: the number of the executor that it is of, and its kind."""


@dataclass(frozen=True)
class Surroundings:
    """What ranks have on every host as they would beside the driver: the folder and the path that modules are
    found by, and variables of the environment."""

    folder: str
    path: tuple[str, ...]
    variables: Mapping[str, str]

    @classmethod
    def here(cls) -> "Surroundings":
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


class HostAgent:
    """The ranks of one host."""

    def __init__(self, name: str, address: str, around: Surroundings, modules: Sequence[str]) -> None:
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
        self._given_up: set[int] = set()
        self._running: dict[int, tuple[Conclusion, dict[int, str]]] = {}
        self._lock = threading.Lock()
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

    def start(
        self, key: Key, ranks: Sequence[int], local_rank: int, gpus: Sequence[int], at: StoreAddress | None
    ) -> None:
        """Start these ranks of a group, of which the first has this local rank; they meet at an address, or
        are all here.

        Raises:
            OSError, EOFError: they could not be started.
        """
        owner, kind = key
        part = Part(self._name, devices_of(kind, ranks, gpus), local_rank)
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

    def run(self, epoch: int, key: Key, spec: CellSpec, timeouts: TimeoutsConfig) -> StageEnd | None:
        """Run a stage on the ranks of a group here; None if its epoch was given up."""
        conclusion, phases = Conclusion(), dict[int, str]()
        with self._lock:
            if epoch in self._given_up:
                return None
            self._running[epoch] = conclusion, phases
        try:
            return self._groups[key].run(spec, timeouts, phases.__setitem__, conclusion)
        finally:
            with self._lock:
                del self._running[epoch]
            conclusion.close()

    def phases(self, epoch: int) -> dict[int, str]:
        """The phase of each rank, as far as it has said."""
        with self._lock:
            return dict(self._running[epoch][1]) if epoch in self._running else {}

    def conclude(self, epoch: int, dumps: bool) -> None:
        """A stage is over, because of what happened elsewhere; also if its call has yet to come."""
        with self._lock:
            self._given_up.add(epoch)
            if epoch in self._running:
                self._running[epoch][0].reach(dumps)

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
