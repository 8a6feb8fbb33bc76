"""`python -m dcpbench.report thin <folder>`: what old sweeps hold beside their rows goes, when asked to.

Rows, the environment and the pages stay, so that a thinned sweep can be compared with, plotted and
resumed as before: what goes are the folders of its cells, with logs and checkpoints. With `--remove` an
old sweep goes altogether. Checkpoints below a `storage.root` lie outside and are only named.

Which sweeps are old is decided from their rows, by the policy of restic's `forget`: everything of the last
days stays, then the newest of each week that has any, for so many weeks. The newest sweep always stays:
tomorrow's is compared with it.
"""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from dcpbench.records import lock
from dcpbench.records.store import RESULTS_JSONL, SWEEP_JSON, ResultsError, stored_rows
from dcpbench.report.styles import BAD, console_for
from dcpbench.sweep.folder.discard import RUBBISH, DiskSpace, alone_in, discard

_RUNNING = "running now"


@dataclass(frozen=True)
class Policy:
    """Days of which every sweep stays, then weeks of which one does, and whether one stays anyway that has a
    cell that did not come out as it should."""

    days: int = 30
    weeks: int = 0
    failed: bool = False


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


def kept(sweeps: Iterable[StoredSweep], policy: Policy, now: datetime.datetime) -> dict[Path, str]:
    """The folders of the sweeps that stay whole, each with the reason."""
    newest_first = sorted(sweeps, key=lambda sweep: sweep.at, reverse=True)
    stay: dict[Path, str] = {}
    weeks: set[tuple[int, int]] = set()
    for number, sweep in enumerate(newest_first):
        week = sweep.at.isocalendar()[:2]
        if number == 0:
            stay[sweep.folder] = "the newest"
        elif now - sweep.at <= datetime.timedelta(days=policy.days):
            stay[sweep.folder] = f"of the last {policy.days} days"
        elif week not in weeks and len(weeks) < policy.weeks:
            weeks.add(week)
            stay[sweep.folder] = f"the newest of week {week[0]}-W{week[1]:02}"
        elif policy.failed and not sweep.ok:
            stay[sweep.folder] = "has cells that did not come out as they should"
    return stay


def _parser() -> argparse.ArgumentParser:
    thin = argparse.ArgumentParser(
        prog="python -m dcpbench.report thin",
        description="Remove the cells' folders (logs, checkpoints) of old sweeps; rows and pages stay.",
        epilog="The newest sweep, and one that is running, always stay whole. Prints only, without --yes.",
    )
    option = thin.add_argument
    option("folder", type=Path, help="the folder that holds the sweeps, as outputs/nightly")
    days, weeks = "every sweep of D days", "before that the newest of each of N weeks that have any"
    for name, default, metavar, text in (
        ("--keep-days", Policy.days, "D", days),
        ("--keep-weekly", Policy.weeks, "N", weeks),
    ):
        option(name, type=_count, default=default, metavar=metavar, help=f"{text} (%(default)s)")
    option("--keep-failed", action="store_true", help="also those with a cell that did not come out")
    option("--remove", action="store_true", help="remove the sweeps altogether, rows included")
    option("--yes", action="store_true", help="do it")
    return thin


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number, 0 or more")
    return int(text)


def _thin(folder: Path, policy: Policy, given: argparse.Namespace) -> int:
    found = list(_stored_sweeps(folder))
    sweeps = sorted((one for one in found if isinstance(one, StoredSweep)), key=lambda sweep: sweep.at)
    space = DiskSpace()
    left_over = space.freed_by([folder / RUBBISH] if (folder / RUBBISH).is_dir() else [])
    stay = kept(sweeps, policy, datetime.datetime.now(datetime.UTC))
    fates = [_fate(sweep, stay.get(sweep.folder), given.remove, space) for sweep in sweeps]
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
        record = json.loads((folder / SWEEP_JSON).read_text(encoding="utf-8"))
        cells, roots = record["cells"], record["storage"]
        if not all(isinstance(item, str) for item in (*cells, *roots)):
            raise ValueError("names that are no text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder}: {SWEEP_JSON} is not what a sweep writes ({error!r}); left alone"
    latest, ok = None, True
    for row in stored_rows(folder):
        if at := _moment(row.started_at):
            latest = max(at, latest or at)
        ok = ok and row.is_ok
    if latest is None:
        return f"{folder}: no row of this version says when it ran; left alone"
    return StoredSweep(folder, latest, tuple(cells), tuple(Path(root) / folder.name for root in roots), ok)


def _moment(text: str | None) -> datetime.datetime | None:
    try:
        at = datetime.datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=datetime.UTC)


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


def _print_fates(fates: Sequence[Fate], sentences: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("sweep", "last cell began", "what goes", "frees", "stays because"):
        table.add_column(column, justify="right" if column == "frees" else "left")
    for fate in fates:
        goes = "all of it" if fate.sweep.folder in fate.goes else f"{len(fate.goes)} cells' folders"
        began = f"{fate.sweep.at:%Y-%m-%d %H:%M}"
        frees = (goes, decimal(fate.freed_bytes)) if fate.goes else ("", "")
        table.add_row(Text(fate.sweep.folder.name), began, *frees, Text(fate.because))
    console = console_for(table)
    console.print(table)
    for sentence in sentences:
        console.print(Text(sentence, style=BAD), soft_wrap=True)
    outside = [(fate.sweep.folder.name, place) for fate in fates if fate.goes for place in fate.sweep.outside]
    for name, place in outside:
        if place.exists():
            sentence = f"{name}: its checkpoints in {place} lie outside; remove them by hand"
            console.print(sentence, soft_wrap=True)
