"""What to look at and to type when a sweep has ended."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def sentences(folder: Path, before: Path | None, whole: bool) -> Iterator[str]:
    """Where the page is, and the next useful command: to go on where rows are missing, else to compare with
    the sweep `before`."""
    page = folder / "report.html"
    if page.is_file():
        yield f"page: {_shown(page)}"
    if not whole:
        yield f"next: {command('resume', folder)}"
    elif before:
        yield f"next: {command('compare', before, folder)}"


def command(name: str, *folders: Path) -> str:
    """A command of dcpbench as it can be typed here: started in the same way as this process was."""
    started = ["dcpbench"] if Path(sys.argv[0]).name == "dcpbench" else [sys.orig_argv[0], "-m", "dcpbench"]
    return shlex.join([*started, name, *map(_shown, folders)])


def _shown(path: Path) -> str:
    """A path from here, if it is below."""
    with suppress(OSError, ValueError):  # it is not, or the folder that this was started in is gone
        return str(path.relative_to(Path.cwd()))
    return str(path)
