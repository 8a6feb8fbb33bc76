"""Agents of other Python interpreters, with a different torch.

Their environment needs no dcpbench: they import this one, but no other package of the driver's environment.
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing.util import get_temp_dir
from pathlib import Path

from packaging.version import Version

from dcpbench import SAFE_PATH
from dcpbench.config.errors import ConfigError
from dcpbench.executors.agent import HASH_SEED, PROBE, Agent, agent_of
from dcpbench.rank import nccl

_LEAST_PYTHON, _LEAST_TORCH = "3.11", "2.11"
_QUERY = f"""
import sys
sys.path[:] = filter(None, sys.path)
import json, platform
print(json.dumps(platform.python_version()), flush=True)
{inspect.getsource(nccl)}
load_nccl()
import torch
import hydra, omegaconf, packaging, psutil
print(json.dumps(str(torch.__version__)))
print(json.dumps(version()))
"""
"""Prints the version of an interpreter, imports the packages that ranks need, and prints the versions of
torch and NCCL. It removes the current folder from the path, which Python before 3.11 puts first."""
_NEEDS = f"needs Python >= {_LEAST_PYTHON} with torch >= {_LEAST_TORCH}, hydra-core, packaging and psutil"
_ANSWER_LIMIT_S = 120.0
_SWEEPER = "hydra_plugins.dcpbench_sweeper"


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


def interpreter(python: str, modules: Sequence[str]) -> Agent:
    """Return the agent of an interpreter, which starts when it is needed. The driver's own finds modules
    where the driver does, also where a notebook has added a folder."""
    same = python == sys.executable

    def environment() -> dict[str, str]:
        places = [] if same else [_links()]
        return _environment(*places) | {HASH_SEED: _other_hash_seed()}

    return agent_of(python, [PROBE, *modules], environment, lambda: sys.path if same else ())


@cache
def _links() -> str:
    """Link this dcpbench into a folder, from which other interpreters import it. Its own folder can also
    contain torch for a different Python."""
    links = tempfile.mkdtemp(dir=get_temp_dir())  # multiprocessing removes that one
    for package in ("dcpbench", _SWEEPER):
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        link = Path(links, *package.split("."))
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(Path(spec.submodule_search_locations[0]).resolve())
    return links


def _environment(*first: str) -> dict[str, str]:
    """Return the environment of another interpreter, which searches these folders for modules first."""
    path = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    return dict([SAFE_PATH]) | kept | {"PYTHONPATH": path}
