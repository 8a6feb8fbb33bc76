"""Where a run is stopped: as a user types it, or chosen from the reference."""

import re
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import PurePath

from dcpbench.config.errors import ConfigError
from dcpbench.plugins.script.checkpoints import Event, Version, is_in
from dcpbench.plugins.script.compare import likely_checkpoints
from dcpbench.plugins.script.record import RecordedRun

GENTLE = ("term", "rank")
"""Kinds of stops to which the command reacts: it has some time to end, as a scheduler allows."""
_STOP = re.compile(r"((kill|term|rank\d{1,6})@|(write|torn)@.+:)[1-9]\d{0,8}", re.ASCII)
_VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d|\d\d[-:_]\d\d[-:_]\d\d|[1-9]\d{7,}|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{6,}"
)
"""Times, long numbers and hashes in a name. Padded steps begin with 0."""
_DIGITS = re.compile(r"\d+")
_LEAST_NAME = 4
"""Length of the shortest part of a temporary name that identifies it."""


def checked_stop(text: str) -> str:
    """Return a stop as it is typed, or raise a ConfigError."""
    if not _STOP.fullmatch(text):
        raise ConfigError(
            f"--stop {text}: expected kill@STEP, term@STEP, rank1@STEP, write@PART:N, torn@PART:N"
        )
    return text


def chosen(reference: RecordedRun) -> list[str]:
    """Return stops of each kind that applies: in the middle between two saves, and in a save."""
    versions = {of.date: of.versions for of in reversed(likely_checkpoints(reference)) if of.date}
    saves = [0, *versions]
    # After the newest save, names sorted as text show; after an earlier one, what is saved after the resume.
    newest = max((step for step in saves if step < reference.length), default=0)
    earlier = max((step for step in saves if 0 < step < newest), default=newest)
    late, step = _after(reference, saves, newest), _after(reference, saves, earlier)
    stops = [f"kill@{late}", f"term@{step}"] + [f"rank1@{step}"] * (len(reference.ranks) > 1)
    # Steps of saves that are made by the clock, or by a metric, are other ones in the next run.
    is_regular = len({after - before for before, after in pairwise(saves[1:-1])}) < 2
    save = newest or saves[-1] if is_regular else saves[len(saves) // 2]
    changes = _in_save(reference, versions.get(save, ()), _VOLATILE if is_regular else _DIGITS)
    return stops + [f"write@{change}" for change in changes]


def _after(reference: RecordedRun, saves: Collection[int], save: int) -> int:
    """Return the step in the middle between a save and the next one."""
    after = next((step for step in saves if step > save), reference.length)
    return min(save + (after - save + 1) // 2 + 1, reference.length)


def _in_save(reference: RecordedRun, versions: Collection[Version], volatile: re.Pattern[str]) -> list[str]:
    """Return the last changes that wrote or published these versions, and that copied one, as a stop counts
    them, and before each the opening of a temporary file that it publishes, which is no checkpoint yet."""
    times = {(place.path, place.begins) for version in versions for place in version.places}
    names = {name for path, _ in times for name in PurePath(path).parts}
    changes, copies = reference.of_kind("open", "rename", "link", "remove"), reference.of_kind("copy")
    own = []
    for index, event in enumerate(changes):
        target = event.get("to") or event["path"]
        if event["e"] != "remove" and any(is_in(path, target) for path, at in times if at == event["t"]):
            own.append((index, event["e"], event["path"], target))
    published = [of for of in own if PurePath(of[3]).name in names]
    written = [of for of in published if not any(of[3] == copy["to"] for copy in copies)]
    stops = []
    for last, kind, source, target in dict.fromkeys([*written[-1:], *published[-1:]]):
        opened = [of for of in own if kind == "rename" and of[1] == "open" and is_in(of[2], source)]
        for first, _, path, _ in opened[-1:]:
            match = SequenceMatcher(None, path, target, autojunk=False).find_longest_match()
            is_reused = sum(event["path"] == path for event in changes if event["e"] == "open") > 1
            # A temporary name can be another one in each run, but for the part that it is renamed to.
            part = _repeated(path if is_reused else path[match.a : match.a + match.size], volatile)
            stops += [_counted(changes[: first + 1], part)] if len(part) >= _LEAST_NAME else []
        stops.append(_counted(changes[: last + 1], _repeated(target, volatile)))
    return stops


def _counted(changes: Sequence[Event], part: str) -> str:
    """Return the last of these changes as a stop counts it: by those of its process with a part of a path."""
    mine = [event for event in changes if event["process"] == changes[-1]["process"]]
    return f"{part}:{sum(part in event['path'] or part in event.get('to', '') for event in mine)}"


def _repeated(path: str, volatile: re.Pattern[str] = _VOLATILE) -> str:
    """Return the end of a path, or a part of its name, that another run has too: without what is `volatile`.

    >>> _repeated("runs/2026-11-29/00-10-16_491908/step-8/model.pt")
    'step-8/model.pt'
    >>> _repeated("step-8-1764374400123.pt")
    'step-8-'
    """
    *folders, name = path.split("/")
    if volatile.search(name):
        return max(volatile.split(name), key=len)
    first = max((place for place, folder in enumerate(folders, 1) if volatile.search(folder)), default=0)
    return "/".join([*folders[first:], name])
