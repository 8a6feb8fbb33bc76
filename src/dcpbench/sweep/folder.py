"""A sweep's folder: claimed before anything starts, never shared with another sweep."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from dcpbench.config import ConfigError
from dcpbench.results import ENVIRONMENT_JSON, RESULTS_JSONL


def claim(folder: Path, key: str = "hydra.sweep.dir") -> None:
    """Make sure that a sweep may be written to `folder`, which `key` of the configuration asks for.

    Raises:
        ConfigError: it cannot be written to, or it holds something already.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = next(folder.iterdir(), None)
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be used: {error.strerror}") from None
    if held is not None:
        what = "holds another sweep" if (folder / RESULTS_JSONL).exists() else "is not empty"
        raise ConfigError(f"{key}={folder}: {what}; choose a folder that is new or empty")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder}: cannot be written to")


def git_commit() -> str | None:
    """The commit of the dcpbench checkout, `-dirty` if it was changed; None in an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        # An environment may lie inside a repository of somebody else's: its commit is not ours.
        return None
    try:
        described = subprocess.run(
            [
                "git",
                "-C",
                str(root),
                "describe",
                "--always",
                "--dirty",
                "--abbrev=40",
                "--exclude=*",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def abandon(folder: Path) -> None:
    """Take back a folder in which no sweep has started."""
    if (folder / RESULTS_JSONL).exists() or (folder / ENVIRONMENT_JSON).exists():
        return
    (folder / "multirun.yaml").unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
