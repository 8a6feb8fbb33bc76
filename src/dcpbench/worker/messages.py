"""What driver and ranks say to each other over their pipes. Plain data; no torch."""

from dataclasses import dataclass

from dcpbench.config.schema import Config

OF_RANK = "DCPBENCH_RANK_PID"
"""The variable in the environment of whatever a rank starts that says whose it is, once the rank is dead."""


@dataclass(frozen=True)
class Seat:
    """Where a rank sits: its number, its device, and the store at which the ranks meet, if they do."""

    rank: int
    world_size: int
    device: str
    process_group: bool
    store_port: int
    log: str


@dataclass(frozen=True)
class CellSpec:
    """A cell to run. `folder` holds logs, `checkpoints` is where its checkpoints go."""

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
class Failed:
    """This rank raised. `at` is `time.monotonic`, one clock for all processes of a host.

    `secondary` says that the error is the echo of what happened to a peer: a closed connection, or a
    failure that DCP tells every rank of.
    """

    at: float
    phase: str
    error: str
    secondary: bool
