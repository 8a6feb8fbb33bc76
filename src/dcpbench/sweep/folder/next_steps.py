"""What to look at and to type when a sweep has ended."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dcpbench.config.errors import ConfigError
from dcpbench.records.store import RESULTS_JSONL
from dcpbench.sweep.folder import manifest

_MOST_READ = 20
"""So many of the sweeps in one folder, the newest, are looked into."""


def sentences(folder: Path, cells: Sequence[str], whole: bool) -> Iterator[str]:
    """Where the page is, and the next useful command: to go on where rows are missing, else to compare with
    the sweep before."""
    page = folder / "report.html"
    if page.is_file():
        yield f"page: {_shown(page)}"
    if not whole:
        yield f"next: {command('resume', folder)}"
    elif before := sweep_before(folder, cells):
        yield f"next: {command('compare', before, folder)}"


def sweep_before(folder: Path, cells: Sequence[str]) -> Path | None:
    """The newest other sweep in the folder that this one is in that has cells of these names."""
    found = []
    for path in folder.parent.glob(f"*/{RESULTS_JSONL}"):
        with suppress(OSError):  # whatever lies there may go at any time
            found.append((path.lstat().st_mtime, path.parent))
    for _, place in sorted(found, reverse=True)[:_MOST_READ]:
        with suppress(ConfigError):
            if place != folder and {*cells}.intersection(manifest.read(place).cells):
                return place
    return None


def command(name: str, *folders: Path) -> str:
    """A command of dcpbench as it can be typed here: started in the same way as this process was."""
    started = ["dcpbench"] if Path(sys.argv[0]).name == "dcpbench" else [sys.orig_argv[0], "-m", "dcpbench"]
    return shlex.join([*started, name, *map(_shown, folders)])


def _shown(path: Path) -> str:
    """A path from here, if it is below."""
    with suppress(OSError, ValueError):  # it is not, or the folder that this was started in is gone
        return str(path.relative_to(Path.cwd()))
    return str(path)
