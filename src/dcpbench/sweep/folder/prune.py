"""`python -m dcpbench.report thin <folder>`: what old sweeps hold beside their rows goes, when asked to.

Rows, the environment and the pages stay, so that a thinned sweep can be compared with, plotted and
resumed as before: what goes are the folders of its cells, with logs and checkpoints. With `--remove` an
old sweep goes altogether. Checkpoints below a `storage.root` lie outside and are only named.
"""

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from dcpbench.records import lock
from dcpbench.records.store import RESULTS_JSONL, ResultsError
from dcpbench.report.styles import BAD, console_for
from dcpbench.sweep.folder.discard import RUBBISH, DiskSpace, alone_in, discard
from dcpbench.sweep.folder.retention import Policy, StoredSweep, kept, stored_sweeps

_RUNNING = "running now"


@dataclass(frozen=True)
class Fate:
    """What becomes of a sweep: the folders that go, right in `within`, and how many bytes that frees.
    Nothing goes of one that stays; `because` says why it does."""

    sweep: StoredSweep
    goes: tuple[Path, ...]
    within: Path
    freed_bytes: int
    because: str


def main(arguments: list[str]) -> int:
    """Thin the old sweeps of a folder, or say what would be; 1 if some could not be.

    Raises:
        dcpbench.records.store.ResultsError: the folder cannot be looked into, or is a sweep itself.
    """
    given = _parser().parse_args(arguments)
    folder: Path = given.folder.resolve()
    if (folder / RESULTS_JSONL).exists():
        raise ResultsError(f"{folder}: is a sweep itself; name the folder that holds the sweeps")
    with alone_in(folder):
        return _thin(folder, Policy(given.keep_days, given.keep_weekly, given.keep_failed), given)


def _parser() -> argparse.ArgumentParser:
    thin = argparse.ArgumentParser(
        prog="python -m dcpbench.report thin",
        description="Remove the cells' folders (logs, checkpoints) of old sweeps; rows and pages stay.",
        epilog="The newest sweep, and one that is running, always stay whole. Prints only, without --yes.",
    )
    thin.add_argument("folder", type=Path, help="the folder that holds the sweeps, as outputs/nightly")
    thin.add_argument(
        "--keep-days",
        type=_count,
        default=Policy.days,
        metavar="D",
        help="every sweep of D days (%(default)s)",
    )
    thin.add_argument(
        "--keep-weekly",
        type=_count,
        default=Policy.weeks,
        metavar="N",
        help="before that the newest of each of N weeks that have any (%(default)s)",
    )
    thin.add_argument(
        "--keep-failed", action="store_true", help="also those with a cell that did not come out"
    )
    thin.add_argument("--remove", action="store_true", help="remove the sweeps altogether, rows included")
    thin.add_argument("--yes", action="store_true", help="do it")
    return thin


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number, 0 or more")
    return int(text)


def _thin(folder: Path, policy: Policy, given: argparse.Namespace) -> int:
    found = list(stored_sweeps(folder))
    sweeps = [item for item in found if isinstance(item, StoredSweep)]
    space = DiskSpace()
    left_over = space.freed_by([folder / RUBBISH] if (folder / RUBBISH).is_dir() else [])
    stay = kept(sweeps, policy, datetime.datetime.now(datetime.UTC))
    fates = [_fate(sweep, stay.get(sweep.folder), given.remove, space) for sweep in _oldest_first(sweeps)]
    _print_fates(fates, [item for item in found if isinstance(item, str)])
    freed = left_over + sum(fate.freed_bytes for fate in fates)
    if not given.yes:
        print(f"{decimal(freed)} would be free; nothing was changed: add --yes to do it")
        return 0
    failed = [sentence for fate in fates if fate.goes and (sentence := _do(fate))]
    try:
        discard([], folder)
    except OSError as error:
        failed.append(f"{folder / RUBBISH}: not removed: {error}")
    for sentence in failed:
        sys.stderr.write(f"dcpbench.report: {sentence}\n")
    print(f"{decimal(freed)} are free" if not failed else "not all of it could be done")
    return 1 if failed else 0


def _fate(sweep: StoredSweep, stays: str | None, remove: bool, space: DiskSpace) -> Fate:
    within = sweep.folder.parent if remove else sweep.folder
    goes: tuple[Path, ...] = ()
    freed_bytes = 0
    try:
        if stays is None and lock.is_held(sweep.folder):
            stays = _RUNNING
        if stays is None:
            goes = (sweep.folder,) if remove else tuple(_cell_folders(sweep))
            freed_bytes = space.freed_by(goes)
            stays = "" if goes else "thinned already"
    except OSError as error:
        goes, stays = (), f"cannot be looked into: {error}"
    return Fate(sweep, goes, within, freed_bytes, stays)


def _cell_folders(sweep: StoredSweep) -> list[Path]:
    """The folders right in a sweep's that its cells have made, and what a removal has left; nothing that
    somebody has put beside them."""
    cells = {*sweep.cells, RUBBISH}
    with os.scandir(sweep.folder) as items:
        folders = [Path(item.path) for item in items if item.is_dir(follow_symlinks=False)]
    return sorted(path for path in folders if path.name in cells or (path / ".hydra/overrides.yaml").exists())


def _do(fate: Fate) -> str | None:
    """Remove what goes, unless a driver has come to work there meanwhile; what went wrong, if anything."""
    try:
        held = lock.take(fate.sweep.folder)
    except BlockingIOError:
        return f"{fate.sweep.folder}: {_RUNNING}; left as it is"
    except OSError as error:
        return f"{fate.sweep.folder}: left as it is: {error}"
    try:
        discard([path for path in fate.goes if path.name != RUBBISH], fate.within)
    except OSError as error:
        return f"{fate.sweep.folder}: not all of it was removed: {error}"
    finally:
        os.close(held)
    return None


def _oldest_first(sweeps: Sequence[StoredSweep]) -> list[StoredSweep]:
    return sorted(sweeps, key=lambda sweep: sweep.at)


def _print_fates(fates: Sequence[Fate], sentences: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("sweep", "last cell began", "what goes", "frees", "stays because"):
        table.add_column(column, justify="right" if column == "frees" else "left")
    for fate in fates:
        goes = "all of it" if fate.sweep.folder in fate.goes else f"{len(fate.goes)} cells' folders"
        table.add_row(
            Text(fate.sweep.folder.name),
            f"{fate.sweep.at:%Y-%m-%d %H:%M}",
            goes if fate.goes else "",
            decimal(fate.freed_bytes) if fate.goes else "",
            Text(fate.because),
        )
    console = console_for(table)
    console.print(table)
    for sentence in sentences:
        console.print(Text(sentence, style=BAD), soft_wrap=True)
    for fate in fates:
        for place in fate.sweep.outside if fate.goes else ():
            if place.exists():
                text = (
                    f"{fate.sweep.folder.name}: its checkpoints in {place} lie outside; remove them by hand"
                )
                console.print(text, soft_wrap=True)
