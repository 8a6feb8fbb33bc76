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
from dcpbench.records.store import CHECKS, PASSING, Row, as_it_should_be

FIRST_TRY = "first-try"
_FIRST_CAUSE = ("rank", "phase", "upload_under_way", "limit", "doing", "log_tail")


def due(row: Row, config: Config) -> bool:
    """Whether a cell runs once more. A planted fault that was not seen is never tried again: it would
    be until somebody sees it."""
    return config.retry > 0 and row.fault is None and not as_it_should_be(row)


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
    _remove(beside)  # of a sweep that was broken off
    checkpoints.rename(beside)
    checkpoints.mkdir()
    return beside


def settle(first: Row, second: Row) -> None:
    """Write into the row of the second try what the first one came to."""
    second.flaky = first.status != second.status
    second.details["first_try"] = {
        "status": first.status,
        "reason": first.reason,
        "started_at": first.started_at,
        "cell_s": first.cell_s,
        "failed_checks": [check for check in CHECKS if getattr(first, check) is False],
        **{key: first.details[key] for key in _FIRST_CAUSE if key in first.details},
    }
    if second.flaky:
        was = f"the first try ended as {first.status}: {first.reason}"
        second.reason = f"{second.reason}; {was}" if second.reason else f"flaky: {was}"


def clear(keep: KeepCheckpoints, row: Row, checkpoints: Path) -> str | None:
    """Remove the checkpoints of a try that are not to be kept; a sentence if they would not go."""
    well = row.status in PASSING or row.fault_seen
    if keep is KeepCheckpoints.all or (keep is KeepCheckpoints.failed and not well):
        return None
    return _remove(checkpoints)


def clear_first(keep: KeepCheckpoints, second: Row, checkpoints: Path) -> str | None:
    """Remove the first try's, unless all are kept, or those of a cell that came to another end."""
    if keep is KeepCheckpoints.all or (keep is KeepCheckpoints.failed and second.flaky):
        return None
    return _remove(checkpoints)


def _remove(folder: Path) -> str | None:
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
