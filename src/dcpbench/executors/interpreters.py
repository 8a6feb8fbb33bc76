"""Run ranks under a different Python interpreter, with a different torch. A process of that interpreter has a
separate executor (`dcpbench.executors.interpreter_agent`), to which the driver's executor passes stages.

Its environment needs no dcpbench: it imports this one, but no other package of the driver's environment.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from packaging.version import Version

from dcpbench import SAFE_PATH
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup
from dcpbench.executors.base import Executor, OnPhase
from dcpbench.executors.fork_server import HASH_SEED
from dcpbench.rank import nccl
from dcpbench.rank.messages import CellSpec, WorldKind

_LEAST_PYTHON, _LEAST_TORCH = "3.11", "2.11"
_QUERY = f"""
import sys
sys.path[:] = filter(None, sys.path)
import json, platform
print(json.dumps(platform.python_version()), flush=True)
{inspect.getsource(nccl)}
load()
import torch
import hydra, omegaconf, packaging, psutil
print(json.dumps(str(torch.__version__)))
print(json.dumps(version()))
"""
"""Prints the version of an interpreter, imports the packages that ranks need, and prints the versions of
torch and NCCL. It removes the current folder from the path, which Python before 3.11 puts first."""
_NEEDS = f"needs Python >= {_LEAST_PYTHON} with torch >= {_LEAST_TORCH}, hydra-core, packaging and psutil"
_ANSWER_LIMIT_S = 120.0
_END_S = 30.0
"""Time limit for a process to end its ranks."""
_SWEEPER = "hydra_plugins.dcpbench_sweeper"
_AGENT = "import sys; from dcpbench.executors.interpreter_agent import main; main(int(sys.argv[1]))"


@dataclass(frozen=True)
class Versions:
    """Versions that an interpreter has."""

    python: str
    torch: str
    nccl: str | None = None


@cache
def versions_of(python: str) -> Versions:
    """Return the versions of the interpreter that `load_python` names, after importing its torch.

    Raises:
        ConfigError: it cannot be run, or cannot run ranks.
    """
    where = f"load_python={python}"
    try:
        answer = subprocess.run(
            [python, "-c", _QUERY],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_ANSWER_LIMIT_S,
            env=_environment(),
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"{where}: cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{where}: did not import torch within {_ANSWER_LIMIT_S:.0f} s") from None
    try:
        python_version, *libraries = map(json.loads, answer.stdout.splitlines())
    except ValueError:
        raise ConfigError(f"{where}: not a Python interpreter") from None
    if Version(python_version) < Version(_LEAST_PYTHON):
        raise ConfigError(f"{where}: is Python {python_version}; {_NEEDS}")
    if not libraries:
        *_, why = answer.stderr.strip().splitlines() or ["it exited without an error message"]
        raise ConfigError(f"{where}: {why}; {_NEEDS}")
    versions = Versions(python_version, *libraries)
    if Version(versions.torch) < Version(_LEAST_TORCH):
        raise ConfigError(f"{where}: has torch {versions.torch}; {_NEEDS}")
    return versions


def _other_hash_seed() -> str:
    """Return a hash seed that the driver's ranks do not have; always the same one, because keys of compiled
    graphs contain hashes."""
    return "2" if os.environ.get(HASH_SEED) == "1" else "1"


class OtherInterpreter(Executor):
    """Runs the ranks of an executor under another interpreter. Its process starts with the first stage."""

    def __init__(self, python: str, modules: Sequence[str], gpus: tuple[int, ...]) -> None:
        self._parameters = python, modules, gpus
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self.interrupted = False

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage there. If the process has exited, return an error; the next stage starts a new one."""
        try:
            self.start()
            if self.interrupted:  # while it was started
                return StageEnd(not_run="interrupted")
            self._send("run", kind, spec, timeouts)
            while not isinstance(message := self._connection.recv(), StageEnd):
                on_phase(*message)
            return message
        except (OSError, EOFError) as error:
            self._kill()
            why = str(error) or "the process exited"
            return StageEnd(not_run=f"the ranks under {self._python} could not be run: {why}")

    def keep_only(self, kinds: set[WorldKind]) -> None:
        with suppress(OSError):
            self._send("keep_only", kinds)

    def interrupt(self) -> None:
        self.interrupted = True
        with suppress(OSError):
            self._send("interrupt")

    def end(self) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):
            self._send("end")
            if self._process:
                self._process.wait(_END_S)
        self._kill()

    def _send(self, method: str, *arguments: Any) -> None:
        if self._process:
            self._connection.send((method, arguments))

    def start(self) -> None:
        """Start its process, which imports in the background, unless it runs.

        Raises:
            OSError: it cannot be started.
        """
        if self._process:
            return
        self._connection, there = Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="dcpbench-")
        with there:
            self._process = _agent(self._python, there, self._environment() | {HASH_SEED: _other_hash_seed()})
        self._connection.send(self._parameters)

    def _environment(self) -> dict[str, str]:
        """The same Python finds modules where the driver does, also where a notebook has added a folder."""
        same = self._python == sys.executable
        return _environment(*filter(None, sys.path)) if same else environment_of(Path(self._folder.name))

    def _kill(self) -> None:
        if self._process:
            cleanup.end_families({self._process.pid})
            self._process.wait()
            self._connection.close()
            self._folder.cleanup()
            self._process = None


def _agent(python: str, connection: Connection, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of an interpreter, with its end of a connection."""
    return subprocess.Popen(
        [python, "-c", _AGENT, str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # the driver passes on Ctrl-C
    )


def environment_of(folder: Path) -> dict[str, str]:
    """Link this dcpbench into an empty folder, and return an environment in which another interpreter imports
    it from there. Its own folder can also contain torch for a different Python."""
    for package in ("dcpbench", _SWEEPER):
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        link = folder.joinpath(*package.split("."))
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path(spec.submodule_search_locations[0]).resolve())
    return _environment(str(folder))


def _environment(*first: str) -> dict[str, str]:
    """Return the environment of another interpreter, which searches these folders for modules first."""
    path = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    return dict([SAFE_PATH]) | kept | {"PYTHONPATH": path}
