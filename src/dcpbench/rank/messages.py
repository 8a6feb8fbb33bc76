"""What driver and ranks say to each other over their pipes. Plain data; no torch."""

from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.reduction import DupFd
from typing import Any

from dcpbench.config.schema import Config
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import Failed

OF_RANK = "DCPBENCH_RANK_PID"
"""The variable in the environment of whatever a rank starts that says whose it is, once the rank is dead."""


@dataclass(frozen=True)
class RunId:
    """One stage of one try of one cell of one sweep."""

    sweep: str
    cell: str
    attempt: int
    stage: int


Backend = StrEnum("Backend", "nccl gloo")
"""The backend of torch.distributed that carries collectives."""


@dataclass(frozen=True)
class WorldKind:
    """What ranks must have in common to run one stage after another. `process_group` says whether they meet;
    `environment` is set in their processes before anything else, which another interpreter than the driver's
    runs where `python` names one. `backend` carries collectives of tensors on GPUs."""

    world_size: int
    device: str
    process_group: bool
    environment: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    backend: Backend = Backend.nccl


@dataclass(frozen=True)
class Descriptor:
    """An open file or socket that is handed to a rank when it is started."""

    number: int

    def __reduce__(self) -> Any:
        return _received, (DupFd(self.number),)


def _received(descriptor: Any) -> Descriptor:
    return Descriptor(descriptor.detach())


@dataclass(frozen=True)
class StoreFile:
    """The file in memory at which the ranks of a group on one host meet. It has no name and no port: nobody
    has it but the driver and those that it is handed to, so that no other user can read or write there."""

    file: Descriptor


@dataclass(frozen=True)
class StoreAddress:
    """Where the ranks of a group on several hosts meet. Rank 0 is handed the socket that listens there, and
    there alone; the others have only the address."""

    host: str
    port: int
    listener: Descriptor | None = None


@dataclass(frozen=True)
class RankSpec:
    """What a rank is born with: its number, in the world and on its host, its device, where the ranks meet,
    and a token that no other program has, by which they name shared memory."""

    kind: WorldKind
    rank: int
    device: str
    store: StoreFile | StoreAddress
    host: str
    local_rank: int
    token: str


def segments_of(token: str) -> str:
    """How Python's names of segments begin in the ranks of a token: it lets that have nine letters."""
    return f"d{token}_"


def semaphores_of(token: str) -> str:
    """How Python's names of semaphores begin in the ranks of a token, and in what they start."""
    return f"mp-dcpbench-{token}"


@dataclass(frozen=True)
class CellSpec:
    """A stage of a cell to run. `folder` holds logs, `checkpoints` is where its checkpoints go."""

    run: RunId
    config: Config
    folder: str
    checkpoints: str


@dataclass(frozen=True)
class PhaseBegun:
    """A phase of the running cell begins on this rank."""

    phase: str


@dataclass(frozen=True)
class UploadsUnderWay:
    """The saves that go on in the background on this rank: when each began (`time.monotonic`)."""

    since: tuple[float, ...]


@dataclass(frozen=True)
class Message:
    """Something that a rank has to say, and of which run; a rank that has no stage yet is in none."""

    run: RunId | None
    rank: int
    content: PhaseBegun | UploadsUnderWay | Failed | RankReport
