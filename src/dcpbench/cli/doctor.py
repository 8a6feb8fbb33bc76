"""`dcpbench doctor`: check whether this machine can run cells, and print how to fix what is missing."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from dcpbench.compose.limits import RANKS_BY_DEFAULT as RANKS
from dcpbench.compose.limits import cpp_compiler
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import StorageConfig
from dcpbench.config.text import size_text
from dcpbench.executors import machine
from dcpbench.executors.agent import own_agent
from dcpbench.executors.shared_gpus import how_to_get, nccl_can_share
from dcpbench.report.styles import style_of

_RANK_BYTES = 2**30
"""A generous estimate of the memory of a rank with torch and no model."""
_LEAST_SHARED_BYTES = 2**28
_STYLES = {"ok": "pass", "warning": "xfail", "bad": "fail"}


@dataclass(frozen=True)
class MachineCheck:
    """A check of the machine: its name, its state (ok, warning, bad), what was found, and how to fix it."""

    what: str
    state: str
    seen: str
    fix: str = ""


def main(format: str | None = None) -> int:
    """Check this machine for a sweep. Return 1 if anything is bad."""
    with Console(stderr=True).status("checking; importing torch takes the longest"):  # on a terminal
        lines = [*machine_checks(Path("outputs"))]
    import pandas as pd

    from dcpbench.report.document import Content, Table, document_text, write_output

    rows = [
        (
            line.what,
            Text(line.state, style_of(_STYLES[line.state])),
            f"{line.seen}{': ' * bool(line.fix)}{line.fix}",
        )
        for line in lines
    ]
    table = pd.DataFrame(rows, columns=["check", "state", "found"])
    write_output(
        document_text([Content([Table("", table, folded=("found",))])], format or "table", sys.stdout), None
    )
    return int(any(line.state == "bad" for line in lines))


def machine_checks(folder: Path) -> Iterator[MachineCheck]:
    """Yield the checks; that of torch is the last, because its import takes the longest."""
    agent = own_agent()
    yield _memory()
    yield _shared_memory()
    yield _disk(folder)
    yield _compiler()
    try:
        description, more = machine.probe(agent)
    except ConfigError as error:
        yield MachineCheck("torch", "bad", str(error), "pip install torch")
        return
    description |= machine.details(more)
    yield _torch(description)
    yield _gpus(description)


def _torch(description: dict[str, Any]) -> MachineCheck:
    version = description["torch"]
    needed = None
    with suppress(PackageNotFoundError):  # dcpbench is not installed
        requirements = map(Requirement, requires("dcpbench") or ())
        needed = next((requirement for requirement in requirements if requirement.name == "torch"), None)
    seen = f"{version} on Python {platform.python_version()}"
    if needed and not needed.specifier.contains(Version(version), prereleases=True):
        return MachineCheck("torch", "bad", f"{seen}; {needed} is needed", f"pip install '{needed}'")
    return MachineCheck("torch", "ok", f"{seen} ({needed.specifier} is supported)" if needed else seen)


def _gpus(description: dict[str, Any]) -> MachineCheck:
    count, known = description["gpu_count"], _gpus_of_the_driver()
    if not count:
        if not known:
            return MachineCheck("gpus", "ok", "none: cells run on the CPU")
        seen = f"the driver knows {len(known)}, torch {description['torch']} none"
        fix = "install a CUDA build of torch" if not description["cuda"] else "check CUDA_VISIBLE_DEVICES"
        return MachineCheck("gpus", "warning", seen, fix)
    names = ", ".join(dict.fromkeys(description.get("gpus", ())))
    versions = f"CUDA {description['cuda']}, NCCL {description.get('nccl')}"
    seen = f"{count} × {names}, {versions}"
    if count < RANKS and not nccl_can_share(description.get("nccl")):
        return MachineCheck(
            "gpus", "warning", seen, f"for all parallelisms, {how_to_get(description['cuda'])}"
        )
    return MachineCheck("gpus", "ok", seen)


def _gpus_of_the_driver() -> list[str]:
    asked = ["nvidia-smi", "-L"]
    try:
        ended = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return ended.stdout.splitlines()


def _memory() -> MachineCheck:
    memory = psutil.virtual_memory()
    seen = f"{size_text(memory.available)} of {size_text(memory.total)} free"
    if memory.available < RANKS * _RANK_BYTES:
        needed = size_text(RANKS * _RANK_BYTES)
        return MachineCheck(
            "memory", "warning", seen, f"{RANKS} ranks need about {needed}; end other programs"
        )
    return MachineCheck("memory", "ok", seen)


def _shared_memory(place: Path = Path("/dev/shm")) -> MachineCheck:  # noqa: S108
    fix = "mount it larger; in a container: docker run --ipc=host or --shm-size=8g"
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return MachineCheck("shared memory", "bad", f"{place}: {error.strerror}", fix)
    if not os.access(place, os.W_OK):
        return MachineCheck("shared memory", "bad", f"{place} cannot be written to", f"chmod 1777 {place}")
    if free < _LEAST_SHARED_BYTES:
        return MachineCheck("shared memory", "warning", f"only {size_text(free)} free in {place}", fix)
    return MachineCheck("shared memory", "ok", f"{size_text(free)} free in {place}")


def _disk(folder: Path) -> MachineCheck:
    """Check the disk of a folder, or of the nearest folder above it that exists."""
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    elsewhere = "use another folder: hydra.sweep.dir= or storage.root="
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return MachineCheck("disk", "bad", f"{place} cannot be written to: {error.strerror}", elsewhere)
    free, least = shutil.disk_usage(place).free, StorageConfig().keep_free_bytes
    seen = f"{size_text(free)} free in {place}"
    if free < least:
        stays = f"{size_text(least)} have to stay free (storage.keep_free_bytes)"
        return MachineCheck("disk", "bad", f"{seen}, and {stays}", elsewhere)
    return MachineCheck("disk", "ok", seen)


def _compiler() -> MachineCheck:
    """Check the compiler that torch.compile needs on a CPU; on GPUs Triton needs a C compiler too."""
    name, packages = cpp_compiler(), "apt-get install g++ python3-dev, or do not use compile=true"
    if not shutil.which(name):
        seen = f"no {name}: cells with compile=true are skipped on the CPU"
        return MachineCheck("compiler", "warning", seen, packages)
    return MachineCheck("compiler", "ok", str(shutil.which(name)))
