"""Checkpoints of a run: the contents that its files had, and which of them a resume chooses from.

A checkpoint is not known by its format: it is what the run wrote after its first step and the resumed run
opens before its own.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
class Version:
    """A content of a file: after how many steps and by which process it was written, the call that saved it,
    and the file's paths with the times from and until which they had this content, and whether it was renamed
    then."""

    date: int
    process: str
    save: Save | None = None
    paths: list[tuple[str, float, float, bool]] = field(default_factory=list)

    @property
    def content(self) -> Named:
        """The values that it contains; empty if they were not recorded."""
        return self.save.content if self.save else {}

    def paths_at(self, time: float) -> list[str]:
        """Return the paths at which the file has this content at a time."""
        return [
            path
            for path, begins, ends, _ in self.paths
            if begins <= time and (time < ends or ends == math.inf)
        ]


class Disk:
    """The contents of the files of a run below the watched folder, by the events of all its processes."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.versions: list[Version] = []
        self.saves: list[Save] = []
        self._current: dict[str, Version] = {}
        self._dates = _Dates(events)
        active: dict[tuple[str, str], Save] = {}  # by process and path
        elsewhere: dict[str, Save] = {}  # by process: saves into memory or another folder
        copied: dict[str, Version] = {}
        for event in events:
            self._dates.see(event)
            kind, path, time, process = event["e"], event.get("path", ""), event["t"], event["process"]
            if kind == "save" and (
                process in self._dates.trains or not any(path == place for _, place in active)
            ):  # and not by the process of an upload, whose rank has recorded it
                date, by_thread = self._dates.of_save(event), "thread" in event
                save = Save(process, path, date, event["content"], time, by_thread=by_thread)
                self.saves.append(save)
                version = self._current.get(path)
                if version and version.date == save.date and not version.save:  # opened before it is saved
                    version.save = save
                active[process, path] = save
                if path == ELSEWHERE:
                    elsewhere[process] = save
            elif kind == "saved" and (process, path) in active:
                save = active.pop((process, path))
                save.ended, save.is_upload = time, "thread" in event
            elif kind == "open":
                around = [save for save in active.values() if is_in(path, save.path)]
                save_of = around[-1] if around else elsewhere.pop(process, None)
                date = self._dates.of(event)
                if not around and save_of and save_of.date != date and "thread" not in event:
                    save_of = None
                version = copied.pop(path, None) or Version(
                    save_of.date if save_of else date, process, save_of
                )
                self._put(version, path, time)
            elif kind == "copy":
                if path in self._current:
                    copied[event["to"]] = self._current[path]
            elif kind in ("rename", "remove", "link"):
                for name in [name for name in self._current if is_in(name, path)]:
                    version = self._current[name]
                    if kind != "link":
                        self._end(name, time, is_renamed=kind == "rename")
                    if kind != "remove":
                        self._put(version, event["to"] + name[len(path) :], time)

    def writes(self, path: str, time: float, pids: Collection[int]) -> bool:
        """Tell whether one of these processes, which have a file open, writes it, as far as is known.
        Processes that are forked in the meantime, such as workers of a loader, have it open too."""
        processes = [version.process for version in self.versions if path in version.paths_at(time)]
        return not processes or any(process.split("-")[0] in map(str, pids) for process in processes)

    def _put(self, version: Version, path: str, time: float) -> None:
        self._end(path, time)
        self._current[path] = version
        version.paths.append((path, time, math.inf, False))
        if len(version.paths) == 1:
            self.versions.append(version)

    def _end(self, path: str, time: float, is_renamed: bool = False) -> None:
        if version := self._current.pop(path, None):
            place = next(
                place for place, had in enumerate(version.paths) if had[0] == path and had[2] == math.inf
            )
            version.paths[place] = (*version.paths[place][:2], time, is_renamed)


class _Dates:
    """After how many steps something was written. A thread that makes no steps, and another process, write
    later than they were asked to: the weights that they save tell after which step."""

    def __init__(self, events: Sequence[Event]) -> None:
        steps = [event for event in events if event["e"] == "step"]
        self.trains = {event["process"] for event in steps}
        recorded = [event for event in steps if event["parts"].get("weights") and not event["optimizer"]]
        self._weights = [(event["k"], {*event["parts"]["weights"].values()}) for event in recorded]
        self._now = 0
        self._last: dict[tuple[str, int], int] = {}  # by process and thread
        self._of_path: dict[str, int] = {}

    def see(self, event: Event) -> None:
        """Follow the steps."""
        self._now = max(self._now, event["k"])

    def of(self, event: Event) -> int:
        """Return the date of a write."""
        if self._is_exact(event):
            return int(event["k"])
        return self._last.get((event["process"], event.get("thread", 0)), event["k"] or self._now)

    def of_save(self, event: Event) -> int:
        """Return the date of a call that saves."""
        date, name = event["k"] or self._now, folded(event["path"])
        if not self._is_exact(event):
            content = {*event["content"].values()}
            same = max((done for done, of in self._weights if done <= date and of <= content), default=0)
            # After the last step weights are not known, and an average can have those of an earlier one.
            date = same if same > self._of_path.get(name, 0) else date
            self._last[event["process"], event.get("thread", 0)] = date
        self._of_path[name] = date
        return int(date)

    def _is_exact(self, event: Event) -> bool:
        return (event["process"] in self.trains and "thread" not in event) or not self._now


@dataclass(frozen=True)
class Member:
    """A checkpoint of a family: after how many steps it was saved, its versions, and what it lacks."""

    date: int
    versions: Sequence[Version]
    missing: str


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
        self._time, self._opened, self._cut, self._state = time, opened, cut, state
        self._classes = _classes(disk.versions, known.versions)
        self._uploads = sorted(
            (save.ended, save.date) for save in (*known.saves, *disk.saves) if save.is_upload
        )
        for of in self._classes:
            of.publish({folded(path) for version in disk.versions for path in version.paths_at(time)
                        if self._is_opened(path)}, known.versions)  # fmt: skip
        chosen = self._chosen(taken)
        self.members = [*self._members(chosen, time)]
        """The checkpoints, the newest first."""
        self.newest = next((member.date for member in self.members if not member.missing), None)
        """The date of the newest complete one."""
        lost = self._lost(chosen)
        self.lost = lost if self.newest is None or lost == self.members[0].date > self.newest else 0
        """The date of one that was complete and was removed: of the newest of all, or where none is left."""

    def paths(self, date: int) -> list[str]:
        """Return the opened paths of a checkpoint."""
        return [*dict.fromkeys(
            path
            for member in self.members if member.date == date
            for version in member.versions
            for path in version.paths_at(self._time) if self._is_opened(path)
        )]  # fmt: skip

    def missing(self, date: int) -> str:
        """Return what is missing of a checkpoint; empty if it is complete, or there is none."""
        return next((member.missing for member in self.members if member.date == date), "")

    def _is_opened(self, path: str) -> bool:
        return any(is_in(path, opened) for opened in self._opened)

    def _chosen(self, taken: int | None) -> list["_Class"]:
        """Return the classes of the family."""
        opened = [  # or looked for in vain
            of
            for of in self._classes
            if of.dates[-1]
            and (of.published(self._opened) or any(map(self._is_opened, of.paths_at(self._time))))
        ]
        state = [of for of in self._classes if of.contains(self._state)]
        if not opened:  # then those that have most: exports and best weights are not meant to be resumed
            most = max((of.size for of in state), default=0)
            state = [of for of in state if 2 * of.size > most]
        elif found := [of for of in state if of in opened]:
            state = found
        else:  # it failed before it read them, perhaps
            state = [of for of in state if any(_same_dates(of.dates, other.dates) for other in opened)]
        families: dict[tuple[int, ...], list[_Class]] = {}
        others = opened if taken is not None or opened else [of for of in self._classes if of.dates[-1]]
        for of in state or [of for of in others if of.size] or others:
            key = next((key for key in families if _same_dates(key, of.dates)), tuple(of.dates))
            families.setdefault(key, []).append(of)

        def fits(key: tuple[int, ...]) -> tuple[bool, bool, int]:
            members = self._members(families[key], self._time)
            newest = next((member.date for member in members if not member.missing), None)
            return taken in key, taken == newest, sum(of.size for of in families[key])

        if not families:
            return []
        dates = max(families, key=fits)
        for of in opened:
            if not of.size and not {*dates[:-1]} <= {*of.dates}:
                of.follow(self._uploads)
        # A file without a state, such as a pointer or a scheduler's, is part if it is written each time.
        return families[dates] + [
            of
            for of in opened
            if of not in families[dates] and {*dates[:-1]} <= {*of.dates} and not of.contains(self._state)
        ]

    def _members(self, classes: Sequence["_Class"], time: float) -> Iterator[Member]:
        """Yield the checkpoints at a time, the newest first."""
        for date in sorted({date for of in classes for date in of.own}, reverse=True):
            missing = []
            for of in classes:
                later = [version for other, own in of.own.items() if other >= date for version in own]
                if not of.size and self._is_whole(of, later, time):
                    continue  # a pointer that is written over is there
                files = of.files(of.own.get(date, ()))
                bad = [path for path, written in files.items() if not self._is_whole(of, written, time)]
                is_cut = any(is_in(path, cut) for path in bad for cut in self._cut)
                missing += [f"{path or of.name} is {'cut' if is_cut else 'missing'}" for path in bad]
                if not bad and len(files) < of.least:
                    missing.append(f"{of.name} is missing" if not files else f"part of {of.name} is missing")
            versions = [version for of in classes for version in of.own.get(date, ())]
            yield Member(date, versions, listed(missing, 2))

    def _is_whole(self, of: "_Class", versions: Iterable[Version], time: float) -> bool:
        """Tell whether one of these versions has a path that is not temporary, and is not being written."""
        cut = self._cut if time == self._time else ()
        return any(
            not any(is_in(path, place) for place in cut)
            and not (version.save and version.save.is_in_flight(time))
            for version in versions
            for path in of.published(version.paths_at(time))
        )

    def _lost(self, classes: Sequence["_Class"]) -> int:
        """Return the date of a checkpoint that was complete until a file of it was removed or overwritten."""
        versions = [version for of in classes for own in of.own.values() for version in own]
        ends = {end for version in versions for _, _, end, _ in version.paths if end <= self._time} - {
            math.inf
        }
        before = (self._members(classes, math.nextafter(end, 0)) for end in sorted(ends, reverse=True))
        complete = (member.date for members in before for member in members if not member.missing)
        return next(complete, 0)


class _Class:
    """Files that are one another's older or newer versions."""

    def __init__(
        self, name: str, known: Sequence[Version], own: Sequence[Version], published: Collection[str]
    ) -> None:
        self.name, self._published = name, {*published}
        self.own = _by_date(own)
        """The versions of the stopped run, by their dates."""
        both = _by_date(dict.fromkeys((*known, *own)))
        self._versions = [version for of_date in both.values() for version in of_date]
        self.dates = sorted(both)
        self.size = max(len(version.content) for version in self._versions)
        """How many values a version contains."""
        self.least = min([len(self.files(both[date])) for date in self.dates[:-1]] or [1])
        """How many files each checkpoint has, but perhaps for the last, which can be in flight."""

    def follow(self, uploads: Sequence[tuple[float, int]]) -> None:
        """Date the files by the last of these uploads, by their ends and dates, that had ended before: a
        pointer can be written as late as at the next save."""

        def of_upload(dates: Mapping[int, Sequence[Version]]) -> dict[int, list[Version]]:
            found: defaultdict[int, list[Version]] = defaultdict(list)
            for version in (version for versions in dates.values() for version in versions):
                ended = [date for end, date in uploads if end <= version.paths[0][1]]
                found[ended[-1] if ended else version.date].append(version)
            return found

        self.own = of_upload(self.own)
        self.dates = sorted(of_upload(_by_date(self._versions)))

    def paths_at(self, time: float) -> list[str]:
        """Return the paths of the stopped run's versions at a time."""
        return [path for own in self.own.values() for version in own for path in version.paths_at(time)]

    def files(self, versions: Iterable[Version]) -> dict[str, list[Version]]:
        """Return versions by the first path at which they are not temporary; empty if there is none."""
        files: dict[str, list[Version]] = {}
        for version in versions:
            path = next(iter(self.published(path for path, *_ in version.paths)), "")
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
        mine = [{folded(path) for path, *_ in version.paths} for version in known]
        if names and all(names & of for of in mine if self._published & of):
            self._published = names

    def published(self, paths: Iterable[str]) -> list[str]:
        """Return the paths that are not temporary."""
        return [path for path in paths if folded(path) in self._published]


def _classes(own: Sequence[Version], known: Sequence[Version]) -> list[_Class]:
    """Return the classes of files that are not temporary."""
    of_known, of_own = _by_name(known), _by_name(own)
    # From a temporary name each version is moved away; from a backup's, or a slot's, not the last one.
    published = sorted(
        name
        for name in {**of_known, **of_own}
        if not all(is_renamed for _, is_renamed in of_known.get(name) or of_own[name])
    )
    parents = {name: name for name in published}

    def root(name: str) -> str:
        while parents[name] != name:
            name = parents[name]
        return name

    for version in (*known, *own):
        names = [name for path, *_ in version.paths if (name := folded(path)) in parents]
        for name in names[1:]:
            parents[root(name)] = root(names[0])
    for name, other in combinations(published, 2):
        some, others = ([version for version, _ in of_known[of]] for of in (name, other))
        if _take_turns(some, others) or _are_doubles(some, others, (name, other)):
            parents[root(other)] = root(name)
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for name in published:
        classes[root(name)].append(name)

    def versions(of: Mapping[str, list[tuple[Version, bool]]], names: Iterable[str]) -> list[Version]:
        return [version for name in names for version, _ in of.get(name, ())]

    return [
        _Class(names[0], versions(of_known, names), versions(of_own, names), names)
        for names in classes.values()
    ]


def _by_date(versions: Iterable[Version]) -> dict[int, list[Version]]:
    by_date: defaultdict[int, list[Version]] = defaultdict(list)
    for version in dict.fromkeys(versions):
        by_date[version.date].append(version)
    return by_date


def _by_name(versions: Iterable[Version]) -> defaultdict[str, list[tuple[Version, bool]]]:
    """Return the versions that had each folded name, and whether they were renamed to another one."""
    groups: defaultdict[str, list[tuple[Version, bool]]] = defaultdict(list)
    for version in versions:
        for name, is_renamed in {folded(path): renamed for path, _, _, renamed in version.paths}.items():
            groups[name].append((version, is_renamed))
    return groups


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
    both = first.keys() & second.keys()
    is_named_alike = folded(names[0]) == folded(names[1])
    pairs = [(first[date], second[date]) for date in both]  # of one call: parts of a folder
    return (
        not is_named_alike
        and bool(pairs)
        and all(one is not other and one.content == other.content for one, other in pairs)
    )


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
