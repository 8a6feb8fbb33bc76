"""Which sweeps of a folder stay whole, and which are old enough to be thinned: decided from their rows.

The policy is restic's `forget`, which many know: everything of the last days, then the newest of each week
that has any, for so many weeks. The newest sweep always stays: tomorrow's is compared with it.
"""

import datetime
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dcpbench.records.store import RESULTS_JSONL, SWEEP_JSON, stored_rows


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


def stored_sweeps(folder: Path) -> Iterator[StoredSweep | str]:
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
