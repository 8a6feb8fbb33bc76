"""Messages between driver and ranks. Plain data; no torch."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from dcpbench.config.schema import Config
from dcpbench.core.rank_report import Imports, RankReport
from dcpbench.core.stage_end import Failed

OF_RANK = "DCPBENCH_RANK_PID"
"""Environment variable with the id of a rank's process, which identifies its descendants after its death."""


@dataclass(frozen=True)
class RunId:
    """One stage of one run of a cell of a sweep; `cell` is the name of the run."""

    sweep: str
    cell: str
    stage: int


Backend = StrEnum("Backend", "nccl gloo")
"""The backend of torch.distributed that carries collectives."""


@dataclass(frozen=True)
class WorldSpec:
    """Properties of ranks. Ranks of the same kind can be reused for the next stage.

    Args:
        process_group: the ranks form a process group.
        environment: variables that are set in their processes before any others.
        python: the interpreter that runs them; None is the driver's.
        backend: carries collectives of tensors on GPUs.
        imports: installed packages that have been imported before they are forked.
    """

    world_size: int
    device: str
    process_group: bool
    environment: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    backend: Backend = Backend.nccl
    imports: Imports = field(default_factory=Imports)


@dataclass(frozen=True)
class Descriptor:
    """An open file or socket that is passed to a process when it is forked."""

    number: int


@dataclass(frozen=True)
class StoreAddress:
    """An address through which the ranks of a group on several hosts rendezvous, and the number of this host
    among them. Only rank 0 gets the socket that listens there."""

    host: str
    port: int
    listener: Descriptor | None = None
    host_number: int = 0

    @classmethod
    def unused(cls) -> Self:
        """Return an address of this host at which nothing listens."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return cls(*listener.getsockname())


@dataclass(frozen=True)
class RankSpec:
    """Parameters of a new rank. `rank` is its number in the world, `local_rank` on its host; `token` is
    unique, and part of the names of the shared memory of its group. The ranks rendezvous through `store`: on
    one host a file in memory, which has no name and no port, so that no other user can access it.
    `environment` is set for a user's code."""

    kind: WorldSpec
    rank: int
    device: str
    store: Descriptor | StoreAddress
    host: str
    local_rank: int
    token: str
    environment: Mapping[str, str]


def torchrun_variables(
    rank: int, world_size: int, local_rank: int, local_world_size: int, master: StoreAddress
) -> dict[str, str]:
    """Return the environment variables of a rank that torchrun sets, and that a user's code can read."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": master.host_number,
        "MASTER_PORT": master.port,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    texts = {"MASTER_ADDR": master.host, "TORCHELASTIC_RUN_ID": "none"}
    return {name: str(value) for name, value in numbers.items()} | texts


def segments_of(token: str) -> str:
    """Return the prefix of names of segments that Python makes in ranks; nine characters are allowed."""
    return f"d{token}_"


def semaphores_of(token: str) -> str:
    """Return the prefix of names of semaphores that Python makes in ranks and their child processes."""
    return f"mp-dcpbench-{token}"


@dataclass(frozen=True)
class CellSpec:
    """A stage of a cell to run. `folder` is for logs, `checkpoints` for its checkpoints."""

    run: RunId
    config: Config
    folder: str
    checkpoints: str


@dataclass(frozen=True)
class PhaseBegun:
    """The name of the phase that begins on this rank, and a sentence for the user, if there is one."""

    phase: str
    note: str = ""


@dataclass(frozen=True)
class UploadsInFlight:
    """Start times (`time.monotonic`) of the uploads that are in flight on this rank."""

    since: tuple[float, ...]


@dataclass(frozen=True)
class Message:
    """A message of a rank about a run; None before its first stage."""

    run: RunId | None
    rank: int
    content: PhaseBegun | UploadsInFlight | Failed | RankReport
