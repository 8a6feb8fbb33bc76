"""The git checkout that contains a source file: its commit, and whether it was changed.

The checkout can be anybody's, so git runs none of the programs that its configuration names: monitors of the
file system, hooks, filters of file contents, and transports that fetch missing objects.
"""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

DIRTY = "-dirty"
"""The end of the commit of a checkout that was changed."""

_LIMIT_S = 10.0
_OF_CHECKOUT = ("local", "worktree")
_KEPT = ("GIT_CONFIG_", "GIT_CEILING_", "GIT_DISCOVERY_")
_NO_PROGRAMS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_EMPTY = "DCPBENCH_EMPTY"
_ENVIRONMENT = {_EMPTY: "", "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}


def checkout_of(file: Path, sources: Iterable[Path]) -> tuple[str | None, bool]:
    """Return the commit of the checkout that contains a file, and whether that tracks one of its `sources`.

    The commit is `-dirty` if a tracked file was changed, or one of the sources that are in the checkout is
    not tracked; None if there is no checkout, or git refuses it because another user owns it.

    Args:
        file, sources: paths without links to folders.
    """
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty", "--no-renames")
    try:
        found = _git(file.parent, "rev-parse", "--show-toplevel", "HEAD")
        first, commit = found.rstrip("\n").rsplit("\n", 1)
        top = Path(first)
        names = {*_git(top, "ls-files", "-z").split("\0")}
        changed = _git(top, *_without_filters(top), *status)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, False
    tracked = [str(one.relative_to(top)) in names for one in sources if one.is_relative_to(top)]
    return commit + (DIRTY if changed or not all(tracked) else ""), any(tracked)


def _without_filters(top: Path) -> list[str]:
    """Return options of git that turn off the filters which the checkout's configuration defines; those of
    the user's configuration stay."""
    words = _git(top, "config", "--list", "-z", "--show-scope", "--name-only").split("\0")
    own = {name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in _OF_CHECKOUT}
    return [f"--config-env={name}={_EMPTY}" for name in sorted(own) if name.startswith("filter.")]


def _git(folder: Path, *words: str) -> str:
    """Return the output of a git command that reads the checkout in a folder.

    Variables such as GIT_DIR, which git sets for its hooks, are left out: they name another checkout.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: it fails.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT)
    }
    command = ["git", "-C", str(folder), "--no-optional-locks", "--literal-pathspecs", *_NO_PROGRAMS, *words]
    ended = subprocess.run(
        command,
        env={**environment, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_LIMIT_S,
    )
    return os.fsdecode(ended.stdout)
