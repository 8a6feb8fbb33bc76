"""The second try of a cell that did not come out as it should.

It runs on fresh ranks into a clean checkpoint folder, so the row is the second try's: what an earlier
cell may have done to the ranks of the first cannot make its verdict. That the first came to something
else stands in the row as well (`flaky`), and such a row is not as it should be.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from dcpbench.config.groups import KeepCheckpoints
from dcpbench.config.schema import Config
from dcpbench.sweep.run.row_builder import Try

FIRST_TRY = "first-try"


def is_due(tried: Try, config: Config) -> bool:
    """Whether a cell runs once more. A planted fault that was not seen is never tried again: it would
    be until somebody sees it."""
    return config.retry > 0 and config.fault.target is None and not tried.is_ok


def set_aside(folder: Path, checkpoints: Path) -> Path:
    """Move the logs and the checkpoints of the first try away; where its checkpoints then are.

    Raises:
        OSError: they cannot be moved.
    """
    aside = folder / FIRST_TRY
    aside.mkdir()
    for log in folder.glob("rank*.log"):
        log.rename(aside / log.name)
    beside = aside / checkpoints.name
    if checkpoints.parent != folder:  # storage.root: perhaps another file system
        beside = checkpoints.with_name(f"{checkpoints.name}.{FIRST_TRY}")
    remove(beside)  # of a sweep that was broken off
    checkpoints.rename(beside)
    checkpoints.mkdir()
    return beside


def clear(keep: KeepCheckpoints, tried: Try, checkpoints: Path) -> str | None:
    """Remove the checkpoints of a try that are not to be kept; a sentence if they would not go."""
    if keep is KeepCheckpoints.all or (keep is KeepCheckpoints.failed and not tried.is_ok):
        return None
    return remove(checkpoints)


def clear_first(keep: KeepCheckpoints, flaky: bool, checkpoints: Path) -> str | None:
    """Remove the first try's, unless all are kept, or those of a cell that came to another end."""
    if keep is KeepCheckpoints.all or (keep is KeepCheckpoints.failed and flaky):
        return None
    return remove(checkpoints)


def remove(folder: Path) -> str | None:
    """Remove a folder, also where a cell has made parts of it read-only."""
    with suppress(OSError):
        shutil.rmtree(folder)
        return None
    for inner in (folder, *folder.rglob("*")):
        with suppress(OSError):
            if inner.is_dir() and not inner.is_symlink():
                inner.chmod(0o700)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} could not be removed: {error}"
    return None
