"""Run a command in this process, or a program in another, to its end."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from dcpbench.cli import commands, keys_help

ROOT = Path(__file__).parents[2]
Ended = subprocess.CompletedProcess[str]


def main(words: Sequence[str]) -> int:
    """Return the exit status of a command; words without a command are those of `report`."""
    is_command = {*words[:1]} & {*keys_help.commands()}
    return commands.main([*words] if is_command else ["report", *words])


def program(*words: str | Path, check: bool = False, **how: Any) -> Ended:
    """Run a program with these words, as a shell does."""
    return subprocess.run(words, capture_output=True, text=True, check=check, **how)


def python(*words: str | Path, **how: Any) -> Ended:
    """Run this Python."""
    return program(sys.executable, *words, **how)


def git(folder: Path, *words: str) -> str:
    """Run git in a folder, as a user who may commit."""
    own = ("-c", "user.name=a user", "-c", "user.email=user@localhost")
    return program("git", "-C", folder, *own, *words, check=True).stdout.strip()


def script(name: str) -> ModuleType:
    """Import a file of the checkout that is in no package, such as `scripts/words`."""
    spec = importlib.util.spec_from_file_location(Path(name).name, ROOT / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(Path(spec.origin or "").parent), *sys.path]):  # as Python does
        spec.loader.exec_module(module)
    return module
