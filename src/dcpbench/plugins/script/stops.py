"""Where a run is stopped: as a user types it, or chosen from the reference."""

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import PurePath

from dcpbench.config.errors import ConfigError
from dcpbench.plugins.script.checkpoints import Version, is_in
from dcpbench.plugins.script.compare import likely_checkpoints
from dcpbench.plugins.script.record import Run

GENTLE = ("term", "rank")
"""Kinds of stops to which the command reacts: it has some time to end, as a scheduler allows."""
_STOP = re.compile(r"((kill|term|rank\d{1,6})@|(write|torn)@.+:)[1-9]\d{0,8}", re.ASCII)
_VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d|\d\d[-:_]\d\d[-:_]\d\d|[1-9]\d{7,}|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{6,}"
)
"""Times, long numbers and hashes in a name. Padded steps begin with 0."""


def checked_stop(text: str) -> str:
    """Return a stop as it is typed, or raise a ConfigError."""
    if not _STOP.fullmatch(text):
        raise ConfigError(
            f"--stop {text}: expected kill@STEP, term@STEP, rank1@STEP, write@PART:N, torn@PART:N"
        )
    return text


def chosen(reference: Run) -> list[str]:
    """Return one stop of each kind that applies: in the middle between two saves, and in a save."""
    versions = {of.date: of.versions for of in reversed(likely_checkpoints(reference)) if of.date}
    saves = [0, *versions]
    # After the newest save, names sorted as text show; after an earlier one, what is saved after the resume.
    newest = max((step for step in saves if step < reference.length), default=0)
    earlier = max((step for step in saves if 0 < step < newest), default=newest)
    late, step = _after(reference, saves, newest), _after(reference, saves, earlier)
    stops = [f"kill@{late}", f"term@{step}"] + [f"rank1@{step}"] * (len(reference.ranks) > 1)
    if change := _last_change(reference, versions.get(newest or saves[-1], ())):
        stops.append(f"write@{change}")
    return stops


def _after(reference: Run, saves: Collection[int], save: int) -> int:
    """Return the step in the middle between a save and the next one."""
    after = next((step for step in saves if step > save), reference.length)
    return min(save + (after - save + 1) // 2 + 1, reference.length)


def _last_change(reference: Run, versions: Collection[Version]) -> str:
    """Return the last change that wrote or published these versions, as a stop counts it; empty without."""
    times = {(place.path, place.begins) for version in versions for place in version.places}
    names = {name for path, _ in times for name in PurePath(path).parts}
    last = (0.0, "")
    changes = defaultdict[str, list[str]](list)  # by process
    for event in reference.of_kind("open", "rename", "link", "remove"):
        target = event.get("to") or event["path"]
        changes[event["process"]].append(f"{event['path']} {target}")
        part = _repeated(target)
        is_of_save = any(is_in(path, target) for path, at in times if at == event["t"])
        if is_of_save and event["e"] != "remove" and PurePath(target).name in names:
            count = sum(part in change for change in changes[event["process"]])
            last = max(last, (event["t"], f"{part}:{count}"))
    return last[1]


def _repeated(path: str) -> str:
    """Return the end of a path, or a part of its name, that another run has too: without times and hashes.

    >>> _repeated("runs/2026-11-29/00-10-16_491908/step-8/model.pt")
    'step-8/model.pt'
    >>> _repeated("step-8-1764374400123.pt")
    'step-8-'
    """
    *folders, name = path.split("/")
    if _VOLATILE.search(name):
        return max(_VOLATILE.split(name), key=len)
    first = max((place for place, folder in enumerate(folders, 1) if _VOLATILE.search(folder)), default=0)
    return "/".join([*folders[first:], name])
