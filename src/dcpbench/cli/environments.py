"""Environments with a torch each, made where there is none, and kept from one bisection to the next."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

from dcpbench.cli.doctor import requirements

_ASK_LIMIT_S = 60.0
_READY = "ready"
"""The file in an environment that says that it is whole."""


class CannotInstallError(Exception):
    """An environment could not be made: the last line of what was printed."""


def releases(tell: Callable[[str], None]) -> list[Version]:
    """The released versions of torch, as pip knows them; none, and told, where it does not answer."""
    try:
        listed = _said([sys.executable, "-m", "pip", "index", "versions", "torch"], _ASK_LIMIT_S)
    except CannotInstallError as error:
        tell(f"pip did not say which releases of torch there are ({error}): only those of --python are tried")
        return []
    found = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    return [Version(name) for name in found[1].split(", ")] if found else []


def installed(version: Version) -> str:
    """The interpreter of an environment with this torch and what dcpbench needs: by uv if it is there, else
    by venv and pip, which obey their own variables and files.

    Raises:
        CannotInstallError: it could not be made.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcpbench"
    folder = root / f"torch-{version}-python-{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if (folder / _READY).exists():
        return str(python)
    needed = {one.name: str(one) for one in requirements() if one.marker is None}
    packages = [*(needed | {"torch": f"torch=={version}"}).values(), "safetensors"]
    shutil.rmtree(folder, ignore_errors=True)
    if uv := shutil.which("uv"):
        _said([uv, "venv", "--python", sys.executable, str(folder)])
        _said([uv, "pip", "install", "--python", str(python), *packages])
    else:
        _said([sys.executable, "-m", "venv", str(folder)])
        _said([str(python), "-m", "pip", "install", *packages])
    (folder / _READY).touch()
    return str(python)


def _said(words: list[str], limit_s: float | None = None) -> str:
    """What a command prints."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstallError(str(error)) from None
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        raise CannotInstallError((errors or lines or [f"it ended with {ended.returncode}"])[-1])
    return ended.stdout
