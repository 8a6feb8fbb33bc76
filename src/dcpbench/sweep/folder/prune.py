"""`dcpbench thin <folder>`: what old sweeps hold beside their rows goes, when asked to.

Rows, the environment and the pages stay, so that a thinned sweep can be compared with, plotted and
resumed as before: what goes are the folders of its cells, with logs and checkpoints. With `--remove` an
old sweep goes altogether. Checkpoints below a `storage.root` lie outside and are only named.

Which sweeps are old is decided from their rows, by the policy of restic's `forget`: everything of the last
days stays, then the newest of each week that has any, for so many weeks. The newest sweep always stays:
tomorrow's is compared with it.

A crash leaves no folder half there: what goes is first renamed, whole, into a folder for rubbish beside it,
and emptied from there. What a crash leaves in that folder goes with the next removal.
"""

import datetime
import fcntl
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dcpbench.config.errors import ConfigError
from dcpbench.records import lock
from dcpbench.records.store import RESULTS_JSONL, SWEEP_JSON, ResultsError, stored_rows
from dcpbench.report.styles import BAD, complain, print_table, text_of
from dcpbench.sweep.folder import manifest, parts

RUBBISH = ".thinned"
_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own is: see stat(2)."""
_RUNNING = "running now"


@dataclass(frozen=True)
class StoredSweep:
    """A sweep's folder, when its last cell started, the cells that were asked for, the folders outside in
    which it has checkpoints (`storage.root`), and whether every row is as it should be."""

    folder: Path
    at: datetime.datetime
    cells: tuple[str, ...]
    outside: tuple[Path, ...]
    ok: bool


@dataclass(frozen=True)
class Fate:
    """What becomes of a sweep: the folders that go, and how many bytes that frees.
    Nothing goes of one that stays; `because` says why it does."""

    sweep: StoredSweep
    because: str
    goes: tuple[Path, ...] = ()
    freed_bytes: int = 0


@dataclass(frozen=True)
class Policy:
    """What stays: see `kept`; whether what goes is a whole sweep (`remove`), and whether it is to be done."""

    keep_days: int = 30
    keep_weekly: int = 0
    keep_failed: bool = False
    remove: bool = False
    yes: bool = False


def main(folder: Path, **policy: Any) -> int:
    """Thin the old sweeps of a folder by a `Policy`, or say what would be; 1 if some could not be.

    Raises:
        ResultsError: the folder cannot be looked into, or is a sweep itself.
    """
    folder = folder.resolve()
    if (folder / RESULTS_JSONL).exists():
        raise ResultsError(f"{folder}: is a sweep itself; name the folder that holds the sweeps")
    with _alone_in(folder):
        return _thin(folder, Policy(**policy))


def kept(
    sweeps: Iterable[StoredSweep], now: datetime.datetime, days: int, weeks: int = 0, failed: bool = False
) -> dict[Path, str]:
    """The folders of the sweeps that stay whole, each with the reason.

    Args:
        days: of which every sweep stays.
        weeks: before those, of which the newest sweep does.
        failed: whether one stays anyway that has a cell that did not come out as it should.
    """
    newest_first = sorted(sweeps, key=lambda sweep: sweep.at, reverse=True)
    stay: dict[Path, str] = {}
    seen: set[tuple[int, int]] = set()
    for number, sweep in enumerate(newest_first):
        week = sweep.at.isocalendar()[:2]
        if number == 0:
            stay[sweep.folder] = "the newest"
        elif now - sweep.at <= datetime.timedelta(days=days):
            stay[sweep.folder] = f"of the last {days} days"
        elif week not in seen and len(seen) < weeks:
            seen.add(week)
            stay[sweep.folder] = f"the newest of week {week[0]}-W{week[1]:02}"
        elif failed and not sweep.ok:
            stay[sweep.folder] = "has cells that did not come out as they should"
    return stay


def freed_by(folders: Iterable[Path], names_seen: Counter[tuple[int, int]]) -> int:
    """Bytes that are free once these folders are gone, and those of earlier calls with the same
    `names_seen`; links are not followed.

    Counts as `du` does: blocks that are really taken up, holes are none. A file with several names is
    counted with the last of them, since its space is not free before that.

    Raises:
        OSError: one of them cannot be looked into.
    """
    freed_bytes = 0
    for item in (item for folder in folders for item in _everything_in(folder)):
        name = (item.st_dev, item.st_ino)
        names_seen[name] += 1
        # A folder's other names are its own `.` and its children's `..`, which go with it.
        if stat.S_ISDIR(item.st_mode) or names_seen[name] == item.st_nlink:
            freed_bytes += item.st_blocks * _BLOCK_BYTES
    return freed_bytes


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Be the only process that thins a folder; leaves nothing there."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be looked into: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ResultsError(f"{folder}: is being thinned by another process") from None
    finally:
        os.close(descriptor)


def _thin(folder: Path, policy: Policy) -> int:
    found = list(_stored_sweeps(folder))
    sweeps = sorted((one for one in found if isinstance(one, StoredSweep)), key=lambda sweep: sweep.at)
    names_seen: Counter[tuple[int, int]] = Counter()
    freed = freed_by(folder.glob(RUBBISH), names_seen)
    now = datetime.datetime.now(datetime.UTC)
    stay = kept(sweeps, now, policy.keep_days, policy.keep_weekly, policy.keep_failed)
    fates = [_fate(sweep, stay.get(sweep.folder), policy.remove, names_seen) for sweep in sweeps]
    _print_fates(fates, [item for item in found if isinstance(item, str)])
    freed += sum(fate.freed_bytes for fate in fates)
    if not policy.yes:
        print(f"{decimal(freed)} would be free; nothing was changed: add --yes to do it")
        return 0
    failed = [sentence for fate in fates if fate.goes and (sentence := _do(fate))]
    try:
        _discard([], folder)
    except OSError as error:
        failed.append(f"{folder / RUBBISH}: not removed: {error}")
    for sentence in failed:
        complain(sentence)
    print(f"{decimal(freed)} are free" if not failed else "not all of it could be done")
    return 1 if failed else 0


def _stored_sweeps(folder: Path) -> Iterator[StoredSweep | str]:
    """The sweeps that lie right in a folder, by name; for what only looks like one a sentence that says why
    it is none. Links are not followed."""
    for place in sorted(folder.iterdir()):
        files = [place / name for name in (SWEEP_JSON, RESULTS_JSONL)]
        if not all(path.is_file() for path in files):
            continue
        if any(path.is_symlink() for path in (place, *files)):
            yield f"{place}: is or holds a link where a sweep has its own files; left alone"
        else:
            yield _stored_sweep(place)


def _stored_sweep(folder: Path) -> StoredSweep | str:
    try:
        record = manifest.read(folder, key="")
    except ConfigError as error:
        return f"{error}; left alone"
    try:
        rows = list(stored_rows(folder))
    except ResultsError as error:
        return f"{error}; left alone"
    try:  # all of one format, in UTC
        latest = datetime.datetime.fromisoformat(max(row.started_at for row in rows if row.started_at))
    except ValueError:
        return f"{folder}: no row of this version says when it ran; left alone"
    outside = tuple(Path(root) / folder.name for root in record.storage)
    ok = all(row.is_ok for row in rows)
    return StoredSweep(folder, latest.astimezone(datetime.UTC), tuple(record.cells), outside, ok)


def _fate(sweep: StoredSweep, stays: str | None, remove: bool, names_seen: Counter[tuple[int, int]]) -> Fate:
    if stays is not None:
        return Fate(sweep, stays)
    try:
        if any(map(lock.is_held, (sweep.folder, *parts.folders(sweep.folder)))):
            return Fate(sweep, _RUNNING)
        goes = (sweep.folder,) if remove else tuple(_cell_folders(sweep))
        return Fate(sweep, "" if goes else "thinned already", goes, freed_by(goes, names_seen))
    except OSError as error:
        return Fate(sweep, f"cannot be looked into: {error}")


def _cell_folders(sweep: StoredSweep) -> list[Path]:
    """The folders right in a sweep's, or in its parts', that its cells have made, and what a removal has
    left; nothing that somebody has put beside them."""
    cells = {*sweep.cells, RUBBISH}
    inside = (path for place in (sweep.folder, *parts.folders(sweep.folder)) for path in place.iterdir())
    folders = (path for path in inside if path.is_dir() and not path.is_symlink())
    return sorted(path for path in folders if path.name in cells or (path / ".hydra/overrides.yaml").exists())


def _everything_in(path: Path) -> Iterator[os.stat_result]:
    yield path.lstat()
    if path.is_dir() and not path.is_symlink():
        for item in path.iterdir():
            yield from _everything_in(item)


def _do(fate: Fate) -> str | None:
    """Remove what goes, unless a driver has come to work there meanwhile; what went wrong, if anything."""
    try:
        held = lock.take(fate.sweep.folder)
    except BlockingIOError:
        return f"{fate.sweep.folder}: {_RUNNING}; left as it is"
    except OSError as error:
        return f"{fate.sweep.folder}: left as it is: {error}"
    try:
        for within in dict.fromkeys(path.parent for path in fate.goes):
            _discard([path for path in fate.goes if path.parent == within and path.name != RUBBISH], within)
    except OSError as error:
        return f"{fate.sweep.folder}: not all of it was removed: {error}"
    finally:
        os.close(held)
    return None


def _discard(folders: Iterable[Path], within: Path) -> None:
    """Remove folders that lie right in `within`, and what an earlier removal there left."""
    rubbish = within / RUBBISH
    with suppress(FileNotFoundError):
        shutil.rmtree(rubbish)  # a link is refused, not followed
    rubbish.mkdir()
    for folder in folders:
        folder.rename(rubbish / folder.name)
    shutil.rmtree(rubbish)


def _print_fates(fates: Sequence[Fate], sentences: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("sweep", "last cell began", "what goes", "frees", "stays because"):
        table.add_column(column, justify="right" if column == "frees" else "left")
    for fate in fates:
        goes = "all of it" if fate.sweep.folder in fate.goes else f"{len(fate.goes)} cells' folders"
        began = f"{fate.sweep.at:%Y-%m-%d %H:%M}"
        frees = (goes, decimal(fate.freed_bytes)) if fate.goes else ("", "")
        table.add_row(text_of(fate.sweep.folder.name), began, *frees, text_of(fate.because))
    print_table(table)
    console = Console()
    for sentence in sentences:
        console.print(text_of(sentence, BAD), soft_wrap=True)
    for fate in fates:
        for place in filter(Path.exists, fate.sweep.outside if fate.goes else ()):
            sentence = f"its checkpoints in {place} lie outside; remove them by hand"
            console.print(text_of(f"{fate.sweep.folder.name}: {sentence}"), soft_wrap=True)
