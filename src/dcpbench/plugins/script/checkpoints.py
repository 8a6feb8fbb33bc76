"""Checkpoints of a run: the contents that its files had, and which of them a resume chooses from.

A checkpoint is not known by its format: it is what the run wrote after its first step and the resumed run
opens before its own.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, pairwise
from typing import Any

from dcpbench.config.text import listed

Event = dict[str, Any]
"""An event of a process: the kind `e` of event, how many steps it had made (`k`), the time `t`, and more. A
step has `parts`: for each kind of state its values by name; a kind that was not recorded is missing."""
Named = Mapping[str, Any]
ELSEWHERE = "the saved state"
"""The path of a save into memory or another folder, as the recorder writes it."""
_WORDS = re.compile(r"[A-Za-z0-9]+")


@dataclass(eq=False)
class Save:
    """A call that saves: its process and path, after how many steps, the values, when it began and ended, and
    whether another thread than that of the steps made, or ended, it."""

    process: str
    path: str
    date: int
    content: Named
    began: float
    ended: float = math.inf
    by_thread: bool = False
    is_upload: bool = False

    def is_in_flight(self, time: float) -> bool:
        """Tell whether it has begun and not ended; never, if the process was killed in it."""
        return self.began <= time and (time < self.ended or self.ended == math.inf)


@dataclass(eq=False)
class PathPeriod:
    """A path of a version of a file, from and until when it had it, and whether it was renamed then."""

    path: str
    version: "Version"
    begins: float
    ends: float = math.inf
    is_renamed: bool = False


@dataclass(eq=False)
class Version:
    """A content of a file: after how many steps and by which process it was written, the call that saved it,
    and the file's places."""

    date: int
    process: str
    save: Save | None = None
    places: list[PathPeriod] = field(default_factory=list)

    @property
    def content(self) -> Named:
        """The values that it contains; empty if they were not recorded."""
        return self.save.content if self.save else {}

    def paths_at(self, time: float) -> list[str]:
        """Return the paths at which the file has this content at a time."""
        return [
            of.path for of in self.places if of.begins <= time and (time < of.ends or of.ends == math.inf)
        ]


class Disk:
    """The contents of the files of a run below the watched folder, by the events of all its processes.

    A thread that makes no steps, and another process, write later than they were asked to: the weights that
    they save show after which step.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.versions: list[Version] = []
        self.saves: list[Save] = []
        self._current: dict[str, PathPeriod] = {}
        steps = [event for event in events if event["e"] == "step"]
        self._trains = {event["process"] for event in steps}
        recorded = [event for event in steps if event["parts"].get("weights") and not event["optimizer"]]
        self._weights = [(event["k"], {*event["parts"]["weights"].values()}) for event in recorded]
        self._now = 0
        self._dates: dict[Any, int] = {}  # of the last save, by process and thread, and by folded path
        active: dict[tuple[str, str], Save] = {}  # by process and path
        elsewhere: dict[str, Save] = {}  # by process: saves into memory or another folder
        copied: dict[str, Version] = {}
        for event in events:
            self._now = max(self._now, event["k"])
            kind, path, time, process = event["e"], event.get("path", ""), event["t"], event["process"]
            if kind == "save" and (process in self._trains or not any(path == of for _, of in active)):
                # and not by the process of an upload, whose rank has recorded it
                date, by_thread = self._date_of_save(event), "thread" in event and process in self._trains
                save = Save(process, path, date, event["content"], time, by_thread=by_thread)
                self.saves.append(save)
                if self._has(path, date) and not (version := self._current[path].version).save:
                    version.save = save  # opened before it is saved
                active[process, path] = save
                if path == ELSEWHERE:
                    elsewhere[process] = save
            elif kind == "saved" and (process, path) in active:
                save = active.pop((process, path))
                save.ended, save.is_upload = time, "thread" in event
            elif kind == "open":
                if not event.get("truncates", True) and self._has(path, self._date(event)):
                    continue  # to sync it, or to write more of it
                around = [save for save in active.values() if is_in(path, save.path)]
                save_of = around[-1] if around else elsewhere.pop(process, None)
                date = self._date(event)
                if not around and save_of and save_of.date != date and "thread" not in event:
                    save_of = None
                version = Version(save_of.date if save_of else date, process, save_of)
                self._put(copied.pop(path, version), path, time)
            elif kind == "copy" and path in self._current:
                copied[event["to"]] = self._current[path].version
            elif kind in ("rename", "remove", "link"):
                for name in [name for name in self._current if is_in(name, path)]:
                    version = self._current[name].version
                    if kind != "link":
                        self._end(name, time, is_renamed=kind == "rename")
                    if kind != "remove":
                        self._put(version, event["to"] + name[len(path) :], time)

    def writes(self, path: str, time: float, pids: Collection[int]) -> bool:
        """Tell whether one of these processes, which have a file open, writes it, as far as is known.
        Processes that are forked in the meantime, such as workers of a loader, have it open too."""
        processes = [version.process for version in self.versions if path in version.paths_at(time)]
        return not processes or any(process.split("-")[0] in map(str, pids) for process in processes)

    def _has(self, path: str, date: int) -> bool:
        """Tell whether a file was written at a date."""
        place = self._current.get(path)
        return place is not None and place.version.date == date

    def _put(self, version: Version, path: str, time: float) -> None:
        self._end(path, time)
        place = self._current[path] = PathPeriod(path, version, time)
        version.places.append(place)
        if len(version.places) == 1:
            self.versions.append(version)

    def _end(self, path: str, time: float, is_renamed: bool = False) -> None:
        if place := self._current.pop(path, None):
            place.ends, place.is_renamed = time, is_renamed

    def _date(self, event: Event) -> int:
        """Return after how many steps something is written."""
        if self._is_exact(event):
            return int(event["k"])
        return self._dates.get((event["process"], event.get("thread", 0)), event["k"] or self._now)

    def _date_of_save(self, event: Event) -> int:
        date, name = event["k"] or self._now, folded(event["path"])
        if not self._is_exact(event):
            content = {*event["content"].values()}
            same = max((done for done, of in self._weights if done <= date and of <= content), default=0)
            # After the last step weights are not known, and an average can have those of an earlier one.
            date = same if same > self._dates.get(name, 0) else date
            self._dates[event["process"], event.get("thread", 0)] = date
        self._dates[name] = date
        return int(date)

    def _is_exact(self, event: Event) -> bool:
        return (event["process"] in self._trains and "thread" not in event) or not self._now


@dataclass(frozen=True)
class Member:
    """A checkpoint of a family: after how many steps it was saved, its versions, what it lacks, and those of
    its paths that the resume opened."""

    date: int
    versions: Sequence[Version] = ()
    missing: str = ""
    opened: Sequence[str] = ()


class Family:
    """The checkpoints that a resume chooses from, as they are when it begins.

    Files are in one class if their names differ in digits, times or hashes, if the script renames, links or
    copies one into the other, or if they take turns. Classes with the same dates are parts of one checkpoint.

    Args:
        disk: what the stopped run wrote.
        known: what a run wrote that was not stopped: it shows which names are temporary.
        time: when the run was stopped.
        opened: the paths that the resume opened before its first step.
        cut: the paths that a process was writing, or that a stop cut.
        state: digests of weights and optimizer states.
        taken: after how many steps the state was saved with which the resume began; None if not known.
    """

    def __init__(
        self,
        disk: Disk,
        known: Disk,
        time: float,
        opened: Collection[str],
        cut: Collection[str],
        state: Collection[Any],
        taken: int | None,
    ) -> None:
        self._time, self._opened, self.cut, self._state = time, opened, cut, state
        self._classes = _classes(disk.versions, known.versions)
        names = {folded(path) for version in disk.versions for path in self._opened_of(version)}
        for of in self._classes:
            of.publish(names, known.versions)
        saves = [save for save in (*known.saves, *disk.saves) if save.is_upload]
        chosen = self._chosen(taken, sorted((save.ended, save.date) for save in saves))
        self.members = self._members(chosen, time)
        """The checkpoints, the newest first."""
        self.newest = _newest(self.members)
        """The date of the newest complete one."""
        ends = {place.ends for of in chosen for version in of.versions_own for place in version.places}
        past = sorted((end for end in ends if end <= time and end < math.inf), reverse=True)
        before = (_newest(self._members(chosen, math.nextafter(end, 0))) for end in past)
        lost = next(filter(None, before), 0)
        self.lost = lost if self.newest is None or lost == self.members[0].date > self.newest else 0
        """The date of one that was complete until a file of it was removed or overwritten: of the newest of
        all, or where none is left."""

    def of(self, date: int) -> Member:
        """Return the checkpoint of a date; an empty one if there is none."""
        return next((member for member in self.members if member.date == date), Member(date))

    def kept_as(self, path: str, date: int) -> str:
        """Return the path that a file which was saved at a date gets, if it was saved as a temporary one."""
        for of in self._classes:
            for version in of.both.get(date, ()):
                paths = [place.path for place in version.places]
                if path in paths:
                    return [*of.published(paths), path][0]
        return path

    def _opened_of(self, *versions: Version) -> list[str]:
        """Return the paths of versions that the resume opened."""
        paths = dict.fromkeys(path for version in versions for path in version.paths_at(self._time))
        return [path for path in paths if any(is_in(path, opened) for opened in self._opened)]

    def _chosen(self, taken: int | None, uploads: Sequence[tuple[float, int]]) -> list["_Class"]:
        """Return the classes of the family."""
        dated = [of for of in self._classes if of.dates[-1]]
        # or looked for in vain
        opened = [of for of in dated if of.published(self._opened) or self._opened_of(*of.versions_own)]
        state = [of for of in self._classes if of.contains(self._state)]
        if found := [of for of in state if of in opened]:
            state = found
        elif opened:  # it failed before it read them, perhaps
            state = [of for of in state if any(_same_dates(of.dates, other.dates) for other in opened)]
        families: dict[tuple[int, ...], list[_Class]] = {}
        others = opened if taken is not None or opened else dated
        for of in state or others:
            key = next((key for key in families if _same_dates(key, of.dates)), tuple(of.dates))
            families.setdefault(key, []).append(of)

        if not families:
            return []
        # Exports and best weights, which have less than others, are not meant to be resumed.
        dates = max(families, key=lambda key: (taken in key, sum(of.size for of in families[key])))
        chosen, all_but_last = families[dates], {*dates[:-1]}
        for of in opened:
            if not of.size and not all_but_last <= {*of.dates}:
                of.follow(uploads)
        # A file without a state, such as a pointer or a scheduler's, is part if it is written each time.
        parts = [of for of in opened if all_but_last <= {*of.dates} and not of.contains(self._state)]
        return chosen + [of for of in parts if of not in chosen]

    def _members(self, classes: Sequence["_Class"], time: float) -> list[Member]:
        """Return the checkpoints at a time, the newest first."""
        members = []
        for date in sorted({date for of in classes for date in of.own}, reverse=True):
            missing: list[str] = []
            for of in classes:
                later = [version for other, own in of.own.items() if other >= date for version in own]
                if not of.size and self._is_whole(of, later, time):
                    continue  # a pointer that is written over is there
                files = of.files(of.own.get(date, ()))
                bad = {path: own for path, own in files.items() if not self._is_whole(of, own, time)}
                if not bad and len(files) < of.least:
                    bad = {"": []}
                absent = [path for path in of.files(of.both.get(date, ())) if path and path not in files]
                for path, own in bad.items():
                    is_cut = any(is_in(path, cut) for cut in self.cut)
                    is_there = path and any(path in version.paths_at(time) for version in own)
                    lack = "is cut" if is_cut else "was being written" if is_there else "is missing"
                    missing.append(f"{path or [*absent, of.name][0]} {lack}")
            versions = [version for of in classes for version in of.own.get(date, ())]
            members.append(Member(date, versions, listed(missing, 2), self._opened_of(*versions)))
        return members

    def _is_whole(self, of: "_Class", versions: Iterable[Version], time: float) -> bool:
        """Tell whether one of these versions has a path that is not temporary, and is not being written."""
        cut = self.cut if time == self._time else ()
        return any(
            not any(is_in(path, place) for place in cut)
            and not (version.save and version.save.is_in_flight(time))
            for version in versions
            for path in of.published(version.paths_at(time))
        )


def _newest(members: Iterable[Member]) -> int | None:
    """Return the date of the first complete checkpoint."""
    return next((member.date for member in members if not member.missing), None)


class _Class:
    """Files that are one another's older or newer versions: of a `known` run, and of the stopped one."""

    def __init__(self, names: Sequence[str], known: Sequence[Version], own: Sequence[Version]) -> None:
        self.name, self._published = names[0], {*names}
        self.versions_own, self._versions = own, [*dict.fromkeys((*known, *own))]
        self.size = max(len(version.content) for version in self._versions)
        """How many values a version contains."""
        self._date(lambda version: version.date)
        self.least = min([len(self.files(self.both[date])) for date in self.dates[:-1]] or [1])
        """How many files each checkpoint has, but perhaps for the last, which can be in flight."""

    def _date(self, date: Callable[[Version], int]) -> None:
        """Set the dates of the versions: of those of the stopped run, and of both runs."""
        own, both = defaultdict[int, list[Version]](list), defaultdict[int, list[Version]](list)
        for version in self.versions_own:
            own[date(version)].append(version)
        for version in self._versions:
            both[date(version)].append(version)
        self.own: Mapping[int, list[Version]] = dict(own)
        self.both: Mapping[int, list[Version]] = dict(both)
        self.dates = sorted(both)

    def follow(self, uploads: Sequence[tuple[float, int]]) -> None:
        """Date the files by the last of these uploads, by their ends and dates, that had ended before: a
        pointer can be written as late as at the next save."""
        self._date(
            lambda version: [
                version.date,
                *(date for end, date in uploads if end <= version.places[0].begins),
            ][-1]
        )

    def files(self, versions: Iterable[Version]) -> dict[str, list[Version]]:
        """Return versions by the first path at which they are not temporary; empty if there is none."""
        files: dict[str, list[Version]] = {}
        for version in versions:
            path = next(iter(self.published(place.path for place in version.places)), "")
            same = (name for name, of in files.items() if _are_doubles([version], of, (path, name)))
            files.setdefault(next(same, path), []).append(version)
        return files

    def contains(self, state: Collection[Any]) -> bool:
        """Tell whether a version contains weights or an optimizer's state."""
        return any(value in state for version in self._versions for value in version.content.values())

    def publish(self, opened: Collection[str], known: Collection[Version]) -> None:
        """Regard only `opened` names as published if each known version gets one in the end: the others are
        stages on the way to it, such as a local file before its upload. A backup's name comes too late."""
        names = self._published & {*opened}
        mine = [{folded(place.path) for place in version.places} for version in known]
        if names and all(names & of for of in mine if self._published & of):
            self._published = names

    def published(self, paths: Iterable[str]) -> list[str]:
        """Return the paths that are not temporary."""
        return [path for path in paths if folded(path) in self._published]


def _classes(own: Sequence[Version], known: Sequence[Version]) -> list[_Class]:
    """Return the classes of files that are not temporary."""
    places = defaultdict[str, dict[Version, PathPeriod]](dict)  # by name, the last of each version
    for version in (*known, *own):
        for place in version.places:
            places[folded(place.path)][version] = place
    of_known = {*known}
    # From a temporary name each version is moved away; from a backup's, or a slot's, not the last one.
    groups = [
        {name}
        for name, of in sorted(places.items())
        if not all(
            place.is_renamed
            for version, place in of.items()
            if version in of_known or not of_known & of.keys()
        )
    ]
    published = [name for group in groups for name in group]

    def join(names: Collection[str]) -> None:
        touched = [group for group in groups if group & {*names}]
        groups[:] = [group for group in groups if group not in touched] + [set().union(*touched)] * bool(
            touched
        )

    for version in (*known, *own):
        join({name for place in version.places if (name := folded(place.path)) in published})
    for name, other in combinations(published, 2):
        some, others = ([version for version in places[of] if version in of_known] for of in (name, other))
        if _take_turns(some, others) or _are_doubles(some, others, (name, other)):
            join({name, other})

    def versions(names: Iterable[str], of: Collection[Version]) -> list[Version]:
        return [*dict.fromkeys(version for name in names for version in places[name] if version in of)]

    return [
        _Class(names, versions(names, of_known), versions(names, {*own}))
        for names in sorted(map(sorted, groups))
    ]


def _take_turns(some: Sequence[Version], others: Sequence[Version]) -> bool:
    """Tell whether two names take turns in having the same values, as two slots do."""
    turns = sorted([(version.date, 0) for version in some] + [(version.date, 1) for version in others])
    keys = {frozenset(version.content) for version in (*some, *others)}
    steps = {after[0] - before[0] for before, after in pairwise(turns)}
    alternates = all(before[1] != after[1] for before, after in pairwise(turns))
    return len(turns) > 2 and alternates and len(steps) == 1 and len(keys) == 1 and bool(*keys)


def _are_doubles(some: Sequence[Version], others: Sequence[Version], names: tuple[str, str]) -> bool:
    """Tell whether files of different names have the same values whenever both were saved: either is enough.
    Files of the same name but for digits are those of ranks."""
    first, second = ({version.date: version.save for version in of if version.save} for of in (some, others))
    pairs = [(first[date], second[date]) for date in first.keys() & second.keys()]
    is_named_alike = folded(names[0]) == folded(names[1])
    # Of one call: parts of a folder.
    same = all(one is not other and one.content == other.content for one, other in pairs)
    return not is_named_alike and bool(pairs) and same


def _same_dates(some: Sequence[int], others: Sequence[int]) -> bool:
    """Tell whether two files are saved together; the newest of one can be in flight."""
    last = max([*some, *others], default=0)
    return {*some} - {last} == {*others} - {last}


@cache
def folded(path: str) -> str:
    """Return a path without what differs between saves: digits, times, hashes.

    >>> folded("run-20261128/step-8/model-3fa9c2d1.pt")
    'run-#/step-#/model-#.pt'
    """

    def fold(match: re.Match[str]) -> str:
        word = match[0]
        is_hash = len(word) >= 6 and bool(re.fullmatch(r"[0-9a-fA-F]+", word)) and any(map(str.isdigit, word))
        is_mixed = len(re.findall(r"\d+", word)) > 1
        return "#" if is_hash or is_mixed else re.sub(r"\d+", "#", word)

    return _WORDS.sub(fold, path)


def is_in(path: str, folder: str) -> bool:
    """Tell whether a path is another one, or below it."""
    return path == folder or path.startswith(f"{folder}/")
