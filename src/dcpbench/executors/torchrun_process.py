"""What each process does that torchrun starts: it owns one rank, started and replaced as the driver says.

The driver is beside all of them, and outlives them: torchrun ends every process of its group when one dies,
and starts them anew, if it may (`--max-restarts`). The one with rank 0 starts the driver, once.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from dcpbench.config.errors import ConfigError
from dcpbench.executors import fork_server
from dcpbench.executors.host_agent import CALLS, HostAgent, Surroundings, shows, use_interface_of
from dcpbench.records.store import SWEEP_JSON
from dcpbench.worker.messages import ElasticRun

_ITSELF = "executor=torchrun"
_OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE")
"""How the names of variables begin that torchrun sets: ranks have none of them, as without it."""
_MEET_S = 120.0
"""How long the driver may take to be there."""
_LOOK_EVERY_S = 0.5
_ENDS_S = 30.0
"""How long the driver may take over its reports once it wants nothing more."""
_CONNECT_S = 5.0
_STORE_S = 10.0
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),  # in ms, where an answer is on its way
)
"""Has a driver whose host cannot be reached be gone after 20 s: torchrun, which would end this
process, may be gone too."""


@dataclass(frozen=True)
class Introduction:
    """Which of torchrun's processes one is."""

    rank: int
    local_rank: int
    node: int
    processes: int
    address: str
    process: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class Leave:
    """What the driver sends a process that torchrun is to start anew: those of its host, by their ids, that
    do not answer, for which torchrun would wait."""

    silent: tuple[int, ...]


def is_one() -> bool:
    """Whether this process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def main(words: Sequence[str]) -> int:
    """Own a rank of the sweep that these words ask for, until it has ended; its exit status.

    Raises:
        ConfigError: the words ask for ranks elsewhere.
    """
    engines = [word for word in words if word.startswith("executor=")]
    if engines not in ([], [_ITSELF]):
        raise ConfigError(f"{engines[0]}: under torchrun ranks are its processes' ({_ITSELF})")
    run, mine = _taken_from_environment()
    context = fork_server.fork_server(fork_server.rank_imports(any("compile" in word for word in words)))
    store = _Store(context, run)
    if mine.rank == 0 and not _is_there(store):
        store.ask([*_to_go_on(words, again=store.ask("ended") is not None), *({_ITSELF} - {*words})])
    connection = _connected(store)
    if isinstance(connection, int):
        return connection
    connection.send(mine)
    _serve(connection, mine)
    return _ended(store)


def _taken_from_environment() -> tuple[ElasticRun, Introduction]:
    """What torchrun has told this process, which nobody else is to be told."""
    told = {name: value for name, value in os.environ.items() if name.startswith(_OF_TORCHRUN)}
    for name in told:
        del os.environ[name]
    if told.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError("torchrun: TORCH_DISABLE_SHARE_RDZV_TCP_STORE must not be set")
    store, port = told["MASTER_ADDR"], int(told["MASTER_PORT"])
    try:
        with socket.create_connection((store, port), _CONNECT_S) as same:
            address = str(same.getsockname()[0])
    except OSError as error:
        named = "--local-addr has each host named by an address that others reach"
        raise ConfigError(
            f"torchrun: no store at MASTER_ADDR={store}, port {port}: {error}; {named}"
        ) from None
    use_interface_of(address)
    run = ElasticRun(told["TORCHELASTIC_RUN_ID"], store, port, address, os.getppid())
    rank, local_rank, node = int(told["RANK"]), int(told["LOCAL_RANK"]), int(told["GROUP_RANK"])
    return run, Introduction(rank, local_rank, node, int(told["WORLD_SIZE"]), address)


class _Store:
    """What `dcpbench.worker.elastic_store` answers."""

    def __init__(self, context: ForkServerContext, run: ElasticRun) -> None:
        self._connection, there = context.Pipe()
        fork_server.start(context.Process(target=_answer, args=(there, run), daemon=True))
        there.close()

    def ask(self, what: str | Sequence[str]) -> Any:
        """What the store has under a name, or None; for words, None once a driver was started with them.

        Raises:
            ConfigError: the store is gone, as with torchrun on the host that has it, or cannot be reached.
        """
        try:
            self._connection.send(what)
            if self._connection.poll(_STORE_S):
                return self._connection.recv()
            gone = f"does not answer within {_STORE_S:g} s"
        except (EOFError, OSError):
            gone = "is gone"
        raise ConfigError(f"torchrun: its store {gone}")


def _answer(connection: Connection, run: ElasticRun) -> None:
    from dcpbench.worker.elastic_store import main

    main(connection, run)


def _to_go_on(words: Sequence[str], again: bool) -> list[str]:
    """The words of a driver; where the one before it was killed, it goes on with the sweep of that."""
    folders = [word.partition("=")[2] for word in words if word.startswith("hydra.sweep.dir=")]
    goes_on = again and folders and shows(Path(folders[-1], SWEEP_JSON))  # it may have run elsewhere
    return [*words, f"resume={folders[-1]}"] if goes_on else [*words]


def _is_there(store: _Store) -> bool:
    """Whether there is a driver, or a sweep that has ended."""
    ended = store.ask("ended")
    return store.ask("driver") is not None and (ended is None or ended >= 0)


def _connected(store: _Store) -> Connection | int:
    """A connection to the driver, or with what status the sweep has ended.

    Raises:
        ConfigError: there was none in time.
    """
    deadline = time.monotonic() + _MEET_S
    while time.monotonic() < deadline:
        if (ended := store.ask("ended")) is not None and ended >= 0:
            return int(ended)
        if driver := store.ask("driver"):
            host, port, key = driver
            with suppress(OSError, EOFError, AuthenticationError):
                there = socket.create_connection((host, port), _CONNECT_S)
                there.settimeout(None)
                for level, option, value in _KEEP_ALIVE:
                    there.setsockopt(level, option, value)
                connection = Connection(there.detach())
                answer_challenge(connection, bytes.fromhex(key))
                deliver_challenge(connection, bytes.fromhex(key))
                return connection
        time.sleep(_LOOK_EVERY_S)
    raise ConfigError(f"torchrun: there was no driver within {_MEET_S:g} s")


def _serve(connection: Connection, mine: Introduction) -> None:
    """Do what the driver asks for, until it is gone."""
    agent: HostAgent | None = None
    one_at_a_time = threading.Lock()

    def do(number: int, method: str, arguments: Sequence[Any]) -> None:
        result, error = None, None
        try:
            result = getattr(agent, method)(*arguments)
        except Exception as raised:  # noqa: BLE001 - it is told
            error = f"{type(raised).__name__}: {raised}"
        with one_at_a_time, suppress(OSError):
            connection.send((number, result, error))

    def leave(*_: Any) -> None:
        """torchrun ends this process, and with it its rank."""
        with suppress(OSError):
            one_at_a_time.acquire(timeout=1.0)
            connection.send(None)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    with ThreadPoolExecutor(CALLS) as threads:
        with suppress(EOFError, OSError):
            agent = HostAgent(connection.recv(), mine.address, Surroundings.here(), ())
            while not isinstance(asked := connection.recv(), Leave):
                threads.submit(do, *asked)
            agent.end()
            for silent in asked.silent:
                with suppress(ProcessLookupError):
                    os.kill(silent, signal.SIGKILL)
            os._exit(1)
        if agent:  # a stage that still runs ends with its ranks
            agent.end()


def _ended(store: _Store) -> int:
    """With what status the driver has ended; 1 if it was killed."""
    deadline = time.monotonic() + _ENDS_S
    while (ended := store.ask("ended")) is None and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return ended if ended is not None and ended >= 0 else 1
