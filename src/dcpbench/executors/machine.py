"""This machine, and what its ranks import."""

import pkgutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dcpbench
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.core.plugins import plugins
from dcpbench.executors import agent as agents
from dcpbench.executors.agent import Agent
from dcpbench.torch_private import DYNAMO, INDUCTOR_CONFIG

_PRELOADED = (
    DYNAMO.path,
    INDUCTOR_CONFIG.path,
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_PRELOADED_PACKAGES = (
    *("cell", "checkpointers", "compare", "formats", "runs", "scenarios", "state", "twin", "workloads"),
)
"""Modules, and packages of dcpbench, that an agent imports once for all ranks, which then detect whether a
cell has changed them. None of them may start CUDA."""
_DETAILS_LIMIT_S = 10.0


@dataclass(frozen=True)
class Machine:
    """Hardware and software that cells can use. The description goes into `environment.json`. With
    `has_interpreters` ranks can run under a second interpreter."""

    gpus: int
    description: dict[str, Any]
    has_interpreters: bool = False

    @property
    def nccl(self) -> str | None:
        """Version of NCCL that ranks use, such as `2.30.7`."""
        return self.description.get("nccl")

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Memory of the smallest GPU; None if unknown, as before `Engine.details`."""
        return min(self.description.get("gpu_memory_bytes", ()), default=None)


def rank_imports(compiles: bool) -> list[str]:
    """Return the modules that an agent imports for ranks, with the compiler if cells compile."""
    package = Path(dcpbench.__path__[0])
    of_dcpbench = [
        module.name
        for name in _PRELOADED_PACKAGES
        for module in pkgutil.walk_packages([str(package / name)], f"dcpbench.{name}.")
    ]
    of_plugins = [name for plugin in plugins() for name in plugin.preload]
    compiler = ["dcpbench.rank.preload_compile"] if compiles else []
    return [*_PRELOADED, *of_dcpbench, *of_plugins, *compiler, "dcpbench.rank.main"]


def probe(agent: Agent, also: Callable[[], dict[str, Any]] = dict) -> tuple[dict[str, Any], Connection]:
    """Describe this machine from a process that an agent forks, which has then imported its modules.
    `details` receives the rest from the connection.

    Args:
        also: returns further entries of the description; called in that process.

    Raises:
        ConfigError: the process exited or did not answer, or `nccl` cannot be loaded.
    """
    began, late = time.monotonic(), f"torch was not imported within {agents.ANSWER_LIMIT_S:.0f} s"
    try:
        here, _ = agent.fork(agents.PROBE, also)
        if not here.poll(agents.ANSWER_LIMIT_S):
            raise ConfigError(late)
        description = here.recv()
    except (EOFError, ConnectionError):
        is_late = time.monotonic() - began > agents.ANSWER_LIMIT_S  # then the agent was killed
        raise ConfigError(late if is_late else "torch cannot be imported here; see the error above") from None
    if error := description.pop("nccl_error"):
        raise ConfigError(error)
    return description, here


def details(connection: Connection) -> dict[str, Any]:
    """Wait for the slower part of the description of this machine. It is received once."""
    with suppress(EOFError):
        if connection.poll(_DETAILS_LIMIT_S):
            return dict(connection.recv())
    return {}


def target_error(agent: Agent, configs: Sequence[Config]) -> str | None:
    """Import the `workload.target` that these configurations have in a process like a rank's. Return why no
    cell can use it, or None. Nothing of it is called. An import that takes too long is left to ranks.
    """
    here, process = agent.fork("dcpbench.rank.workload_check", configs)
    try:
        return here.recv() if here.poll(agents.ANSWER_LIMIT_S) else None
    except EOFError:
        return "cannot be imported: the process that imports it ends"
    finally:
        process.kill()
