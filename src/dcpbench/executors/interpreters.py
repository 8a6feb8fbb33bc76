"""Ranks under another Python than the driver's, which has another torch: a process of that interpreter has an
executor of its own (`dcpbench.executors.interpreter_agent`), and runs what the driver's passes on to it.

That environment needs no dcpbench: it is given this one, and nothing else that the driver's environment has.
"""

import inspect
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from packaging.version import Version

from dcpbench import SAFE_PATH
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup
from dcpbench.executors.base import Executor, OnPhase
from dcpbench.rank import nccl
from dcpbench.rank.messages import CellSpec, WorldKind

_LEAST_PYTHON, _LEAST_TORCH = "3.11", "2.11"
_ASK = f"""
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
"""Prints the version of an interpreter and, after it has imported what ranks need, those of its torch and
NCCL. Before Python 3.11 the current folder is first on its path."""
_NEEDS = f"needs Python >= {_LEAST_PYTHON} with torch >= {_LEAST_TORCH}, hydra-core, packaging and psutil"
_ANSWER_LIMIT_S = 120.0
_END_S = 30.0
"""How long a process may take to end its ranks."""
_LAUNCHER = "hydra_plugins.dcpbench_launcher"
_AGENT = "import sys; from dcpbench.executors.interpreter_agent import main; main(int(sys.argv[1]))"


@dataclass(frozen=True)
class Versions:
    """What an interpreter has."""

    python: str
    torch: str
    nccl: str | None = None


@cache
def versions_of(python: str, key: str = "load_python") -> Versions:
    """The versions of an interpreter, which `key` names, and of its torch; that is imported to know that it
    can be.

    Raises:
        ConfigError: it cannot be run, or ranks cannot run under it.
    """
    where = f"{key}={python}"
    try:
        told = subprocess.run(
            [python, "-c", _ASK],
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
        its_python, *its_libraries = map(json.loads, told.stdout.splitlines())
    except ValueError:
        raise ConfigError(f"{where}: is no Python interpreter") from None
    if Version(its_python) < Version(_LEAST_PYTHON):
        raise ConfigError(f"{where}: is Python {its_python}; {_NEEDS}")
    if not its_libraries:
        *_, why = told.stderr.strip().splitlines() or ["it ended without a word"]
        raise ConfigError(f"{where}: {why}; {_NEEDS}")
    versions = Versions(its_python, *its_libraries)
    if Version(versions.torch) < Version(_LEAST_TORCH):
        raise ConfigError(f"{where}: has torch {versions.torch}; {_NEEDS}")
    return versions


class OtherInterpreter(Executor):
    """The ranks of an executor that run under another interpreter; its process is started with the first."""

    def __init__(self, python: str, modules: Sequence[str], gpus: tuple[int, ...]) -> None:
        self._begin = python, modules, gpus
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self.interrupted = False

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage there; a process that has ended is an error, and the next stage has another one."""
        try:
            if self._process is None:
                self._start()
            if self.interrupted:  # while it was started
                return StageEnd(not_run="interrupted")
            self._tell("run", kind, spec, timeouts)
            while not isinstance(told := self._connection.recv(), StageEnd):
                on_phase(*told)
            return told
        except (OSError, EOFError) as error:
            self._kill()
            why = str(error) or "it ended"
            return StageEnd(not_run=f"the ranks under {self._python} could not be run: {why}")

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """Have the ranks of other kinds leave."""
        with suppress(OSError):
            self._tell("keep_only", kinds)

    def interrupt(self) -> None:
        """End what runs in another thread."""
        self.interrupted = True
        with suppress(OSError):
            self._tell("interrupt")

    def end(self) -> None:
        """End its ranks, and wait until they and the process are gone."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._tell("end")
            if self._process:
                self._process.wait(_END_S)
        self._kill()

    def _tell(self, what: str, *arguments: Any) -> None:
        if self._process:
            self._connection.send((what, arguments))

    def _start(self) -> None:
        self._connection, there = Pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="dcpbench-")
        with there:
            self._process = subprocess.Popen(
                [self._python, "-c", _AGENT, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment_of(Path(self._folder.name)),
                start_new_session=True,  # Ctrl-C is the driver's to pass on
            )
        self._connection.send(self._begin)

    def _kill(self) -> None:
        if self._process:
            cleanup.end_families({self._process.pid})
            self._process.wait()
            self._connection.close()
            self._folder.cleanup()
            self._process = None


def environment_of(folder: Path) -> dict[str, str]:
    """The environment in which another interpreter finds this dcpbench, in an empty folder that is made its
    own: beside what it is installed with there may be a torch of another Python."""
    for package in ("dcpbench", _LAUNCHER):
        found = find_spec(package)
        assert found is not None
        assert found.submodule_search_locations
        link = folder.joinpath(*package.split("."))
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path(found.submodule_search_locations[0]).resolve())
    return _environment(str(folder))


def _environment(*first: str) -> dict[str, str]:
    """The environment of another interpreter, which finds its modules in these folders first."""
    path = [*first, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(path)}
    passed = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    return dict([SAFE_PATH]) | passed | own
