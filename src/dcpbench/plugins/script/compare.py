"""Compare a resumed run with the run that wrote its checkpoint, step by step."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import chain, pairwise, zip_longest
from pathlib import PurePath
from typing import Any

import yaml

from dcpbench.plugins.script.checkpoints import Event, Family, Member, Named, Save, folded, is_in
from dcpbench.plugins.script.copies import Copy
from dcpbench.plugins.script.record import RecordedRun, number

KINDS: dict[str, dict[str, Any]] = yaml.safe_load(
    files("dcpbench.plugins.script").joinpath("kinds.yaml").read_text(encoding="utf-8")
)
"""The compared kinds, in causal order, with their texts."""
ORDER = {kind: place for place, kind in enumerate(KINDS)}
LOADED = ("weights", "frozen", "buffers", "moments", "hyper")
"""Kinds that the first resumed step gets from the checkpoint alone."""
HINT = "generators"
"""A kind that good scripts can differ in: it explains, and shows what two runs draw differently."""
COMPUTED = ("weights", "buffers", "moments", "loss", "gradients", "saved")
"""Kinds that follow from an earlier computation."""
_OF_CALLED = ("frozen", "buffers", "modes", "generators")
"""Kinds of models that were called: some are called later than the first step."""
_SCORES = {"weights": 12, "moments": 8, "batch": 5, "hyper": 4}
"""A batch decides between weights at one place, and moments and the batch at another."""
_READ = 6
_UNCOUNTED = re.compile(r"(?i)rng|random|generator\w*(\.\d+)*\.?$|\./")
"""In a file's name and a saved value's: states of generators, but not the weights of a GAN's, and paths."""
_COUNT = re.compile(r"=(\d+|True|False)", re.ASCII)
_NUMBER = re.compile(r"=(-?[\d.]+(e[+-]?\d+)?|True|False|inf)")


@dataclass(frozen=True)
class Difference:
    """A difference of a resumed run: at a `step` of the uninterrupted run, from 1; names of a kind of
    `KINDS`, with the values of two steps; or a text, of what is saved or of the number of steps."""

    step: int
    rank: int
    kind: str
    names: Sequence[str] = ()
    expected: Named = field(default_factory=dict)
    actual: Named = field(default_factory=dict)
    text: str = ""
    optimizer: float = math.inf
    """Which optimizer makes the step, by the order in which they do; infinite for what follows the step."""

    @property
    def place(self) -> tuple[int, float, int]:
        """Where it is in causal order."""
        return self.step, self.optimizer, ORDER[self.kind]


@dataclass(frozen=True)
class Stopped:
    """A run at a stop: its events until then, its files, and the steps that are expected of its resume.

    Args:
        run: the run until the stop.
        copy: its folder.
        frozen: the run that was frozen at stops, and continued.
        repeats: whether the run is the frozen one, or equal to it until the stop.
    """

    run: RecordedRun
    copy: Copy
    frozen: RecordedRun
    repeats: bool = True

    @property
    def whole(self) -> RecordedRun | None:
        """The run that continues after the stop, whose later steps are expected; None if there is none."""
        return self.frozen if self.repeats else None

    @property
    def expected(self) -> RecordedRun:
        """The run whose steps are expected."""
        return self.whole or self.run


class ResumeComparison:
    """The comparison of a resumed run, which made at least one step."""

    def __init__(self, stopped: Stopped, resumed: RecordedRun) -> None:
        self.stopped, self.resumed = stopped, resumed
        ranks = stopped.expected.ranks
        self.steps = {rank: ranks[rank] for rank in sorted(ranks.keys() & resumed.ranks.keys())}
        """The expected steps by rank."""
        self.actual = {rank: resumed.ranks[rank] for rank in self.steps}
        versions = (version for version in stopped.run.disk.versions if version.date)
        written = {place.path for version in versions for place in version.places}
        folders = {str(folder) for path in written for folder in PurePath(path).parents}
        self.paths_read = [path for path in resumed.paths_read() if path in written | folders]
        """The files written after the first step that the resume read: no data, no sources."""
        self._place = self._begin()
        of_first = next(iter(self.steps.values()))
        last = number(of_first[-1]) if of_first else 0
        self.loaded = of_first[self._place]["k"] if self._place < len(of_first) else last
        """After how many steps the loaded state was saved; 0: the start."""
        self.family = family(stopped, self.paths_read, self.loaded)
        self.newest = self.family.newest
        self.loaded_paths = self.family.of(self.loaded).opened
        compared = max(0, min(len(of_first) - self._place, *map(len, self.actual.values())))
        self.last = number(of_first[self._place + compared - 1]) if compared else self.loaded
        """The last step that was compared."""
        firsts = [
            different(steps[self._place], self.actual[rank][0])
            for rank, steps in self.steps.items()
            if self._place < len(steps)
        ]
        used = {name for steps in stopped.frozen.ranks.values() for name in used_generators(steps)}
        self.generators = sorted(used & {name for kinds in firsts for name in kinds.get(HINT, [])})
        """Generators that differ at the first resumed step, and are drawn from."""
        self.loaded_saves = [save for save in stopped.run.disk.saves if save.date == self.loaded]
        self.saved = {value: name for save in self.loaded_saves for name, value in save.content.items()}
        """The values in the checkpoint that was loaded, with their names."""
        kept, given = _generators(stopped.run, keeps=True), _generators(resumed, keeps=False)
        self.restored_generators = {name for _, name, _ in kept & given}
        self.restored: set[str] = set()
        """Kinds of state that are in the checkpoint, where no step after it is known."""

    def _begin(self) -> int:
        """Return where in the uninterrupted run the resumed one begins: the step that has most in common with
        its first one. What was read decides between steps that have the same in common."""
        disk, time = self.stopped.run.disk, self.stopped.copy.time
        read = {
            version.date
            for version in disk.versions
            for path in version.paths_at(time)
            if version.content and any(is_in(path, name) for name in self.resumed.paths_read())
        }

        def fits(place: int) -> bool:
            pairs = [(steps[place : place + 1], self.actual[rank][0]) for rank, steps in self.steps.items()]
            return all(step and _are_of_one_optimizer(step[0], resumed) for step, resumed in pairs)

        def score(place: int) -> int:
            points = 0
            for rank, steps in self.steps.items():
                if place >= len(steps):
                    return -1
                resumed = self.actual[rank][0]
                points += _READ * (steps[place]["k"] in read)
                for kind, value in _SCORES.items():
                    points += value * (steps[place]["parts"].get(kind) == resumed["parts"].get(kind))
            return points

        length = max(map(len, self.steps.values()))
        # Where the resumed optimizer has other parameters, none fits.
        places = [*filter(fits, range(length))] or [*range(length)]
        best = max(places, key=lambda place: (score(place), place))
        if self.stopped.whole or score(best) >= _SCORES["weights"]:
            return best
        return length  # the run ended with a save, and nothing is known of the step after it

    def differences(self) -> Iterator[Difference]:
        """Yield all differences, in no order."""
        for rank in self.steps:
            yield from self._in_steps(rank)
            yield from self._in_saves(rank)

    def _in_steps(self, rank: int) -> Iterator[Difference]:
        expected, actual = self.steps[rank][self._place :], self.actual[rank]
        left_out = {HINT}
        if rank and "DistributedDataParallel" in self.resumed.about["classes"]:
            left_out.add("buffers")  # which it gets from rank 0 in the forward pass
        for step, other in zip(actual[:1], expected[:1], strict=False):
            calls, of_other = ([*of["parts"]["batch"].values()] for of in (step, other))
            losses, other_losses = (len(of["parts"].get("loss", ())) for of in (step, other))
            fewer = len(calls) < len(of_other)
            if fewer and "gradients" not in different(other, step):
                # Those of the other batches were saved, or there are none.
                left_out |= {"buffers", "batch", "loss", "modes"}
            elif fewer and calls == of_other[-len(calls) :] and losses == other_losses:
                # The others have no backward pass, as of a validation.
                left_out |= {"buffers", "batch", "modes"}
        first = in_steps(expected[:1], actual[:1], rank)
        yield from (difference for difference in first if difference.kind not in left_out)
        later = in_steps(expected[1:], actual[1:], rank)
        yield from (difference for difference in later if difference.kind != HINT)
        whole = self.stopped.whole
        if whole and len(actual) != len(expected) and not (whole.ends or self.resumed.ends):
            end, last = number(expected[-1]) + len(actual) - len(expected), number(expected[-1])
            text = f"ends after step {end}, the reference after step {last}"
            yield Difference(min(end, last) + 1, rank, "steps", text=text)

    def _in_saves(self, rank: int) -> Iterator[Difference]:
        """Yield the saves of a rank that have something else in them. A save that is not made is empty if
        the run failed: a process group can abort when all is done, and files can have other names."""
        saves = {(self._date(rank, save), save.path): save.content for save in self.resumed.saves(rank)}
        reference = self.stopped.expected.contents(rank)
        same = {(done, folded(path)): content for (done, path), content in saves.items()}
        start, restart = _constants(reference), _constants(saves)
        for (done, path), expected in reference.items():
            actual = saves.get(
                (done, path), same.get((done, folded(path)), {} if self.resumed.status else expected)
            )
            name = self.family.kept_as(path, done).rpartition("/")[2]
            names = [
                key
                for key in _unequal_names(expected, actual)
                if _decides(name, key, expected.get(key, actual.get(key)))
                and not start.get((folded(path), key), math.inf) < restart.get((folded(path), key), -math.inf)
            ]
            if names and done > self.loaded:
                holds = "holds another" if actual else "is missing, with"
                yield Difference(done, rank, "saved", names, expected, actual, f"{name} {holds}")

    def _date(self, rank: int, save: Save) -> int:
        """Return after how many steps of the uninterrupted run a resumed one saved. Where optimizers take
        turns, and the resume begins with another one, the runs count differently."""
        before = [step for step in self.resumed.ranks[rank] if step["t"] < save.began]
        same = self.steps[rank][self._place : self._place + len(before)]
        if not before or len(same) < len(before):
            return self.loaded + save.date
        return number(same[-1]) - number(before[-1]) + save.date

    def rank_with(self, rank: int, kind: str, names: Collection[str]) -> str:
        """Return another rank, as `rank 1`, whose expected values of these names a rank has in its first
        resumed step, in place of its own; empty if none has them."""
        mine = self.actual[rank][0]["parts"].get(kind, {})
        expected = {
            other: steps[self._place]["parts"].get(kind, {})
            for other, steps in self.steps.items()
            if self._place < len(steps)
        }
        own = expected.pop(rank, {})
        for other, theirs in expected.items():
            if names and all(own.get(name) != mine.get(name) == theirs.get(name) for name in names):
                return f"rank {other}"
        return ""

    def drawn_in(self, step: int) -> list[str]:
        """Return the generators that differ and change in a step, so that its loss can depend on them."""
        pairs = [of for steps in self.steps.values() for of in _changes(steps) if number(of[0]) == step]
        drawn = {name for pair in pairs for name in used_generators(pair)}
        return [name for name in self.generators if name in drawn or not pairs]

    def lost_samples(self) -> str:
        """Return how many samples of the epoch are seen twice after the resume, and how many never; empty if
        samples are not known, as where they are augmented, or are drawn without epochs."""
        expected, actual = _samples(self.steps.values()), _samples(self.actual.values())
        begins = _epochs(expected)
        if not _are_epochs(expected, begins):
            return ""
        first = max(begin for begin in begins if begin <= self._place)
        last = min((begin for begin in begins if begin > self._place), default=len(expected))
        seen, left = {*chain(*expected[first : self._place])}, {*chain(*expected[self._place : last])}
        rows = [*chain(*actual[: [*_epochs(actual)[1:], len(actual)][0]])]
        resumed = {*rows}
        twice, never = len(resumed & seen), len(left - resumed)
        if not resumed or 2 * len(resumed & (seen | left)) < len(resumed):  # random pieces, or augmented
            return ""
        if not twice and not never and len(rows) > len(resumed):  # the epochs are other ones
            return ""
        of_epoch = " of this epoch" * (len(begins) > 1)  # with one, draws that never repeat look the same
        if not twice and not never:
            whole, more = self.stopped.whole, len(actual) - len(expected) + self._place
            is_longer = more > 0 and whole and not (whole.ends or self.resumed.ends)
            what = f", but {more} steps more are made" if is_longer else ": only their order differs"
            return f"; each sample{of_epoch} is seen once{what}"
        return f"; {twice} of {len(seen | left)} samples{of_epoch} are seen twice, {never} never"

    def kinds(self) -> dict[str, int]:
        """Return how many values of each kind were compared at the first step that has any, of all of its
        optimizers."""
        counts: dict[str, int] = defaultdict(int)
        first: dict[str, tuple[int, int]] = {}
        for rank, steps in self.steps.items():
            for expected, actual in zip(steps[self._place :], self.actual[rank], strict=False):
                for kind in expected["parts"].keys() & actual["parts"].keys():
                    both = expected["parts"][kind].keys() & actual["parts"][kind].keys()
                    place = rank, number(expected)
                    if not counts[kind]:
                        first[kind] = place
                    if first[kind] == place:
                        counts[kind] += len(both)
        return counts

    def changes(self, kind: str) -> int:
        """Return how many different values of a kind the resumed run has."""
        return max(
            len({repr(step["parts"][kind]) for step in steps if kind in step["parts"]})
            for steps in self.actual.values()
        )


def family(stopped: Stopped, opened: Sequence[str], taken: int | None = None) -> Family:
    """Return the checkpoints from which a resume chose."""
    run, copy = stopped.run, stopped.copy
    state = run.state | stopped.frozen.state
    writing = {path for path, pids in copy.writing.items() if run.disk.writes(path, copy.time, pids)}
    return Family(run.disk, stopped.frozen.disk, copy.time, opened, copy.cut | writing, state, taken)


def likely_checkpoints(run: RecordedRun) -> Sequence[Member]:
    """Return the checkpoints of a run without a resume: the files that have most of the state."""
    return Family(run.disk, run.disk, math.inf, (), (), run.state, None).members


def first_noise(some: RecordedRun, others: RecordedRun, base: int = 0) -> Difference | None:
    """Return the first difference between two runs of the same, which begin after `base` steps.

    Generators that no step of the runs draws from are left out.
    """
    found = []
    for rank in some.ranks.keys() & others.ranks.keys():
        used = used_generators(some.ranks[rank])
        for difference in in_steps(some.ranks[rank], others.ranks[rank], rank, base):
            names = [name for name in difference.names if difference.kind != HINT or name in used]
            found += [replace(difference, names=names)] * bool(names)
    return min(found, key=lambda difference: difference.place, default=None)


def in_steps(
    expected: Sequence[Event], actual: Sequence[Event], rank: int, base: int = 0
) -> Iterator[Difference]:
    """Yield what differs in the steps of a rank, which begin after `base` steps. Weights that another
    optimizer changes are not frozen in this one's step."""
    trained = {name for step in expected for name in step["parts"].get("weights", ())}
    for step, other in zip(expected, actual, strict=False):
        elsewhere = trained - step["parts"].get("weights", {}).keys()
        for kind, differing in different(step, other).items():
            names = [name for name in differing if kind != "frozen" or name not in elsewhere]
            if names and kind in ORDER:
                values = step["parts"][kind], other["parts"][kind]
                yield Difference(number(step) + base, rank, kind, names, *values, optimizer=step["optimizer"])


def _samples(ranks: Iterable[Sequence[Event]]) -> list[set[int]]:
    """Return the digests of the samples of each step, of all ranks."""
    steps = zip_longest(*ranks, fillvalue={"parts": {}})
    return [{value for step in of for value in step["parts"].get("rows", {}).values()} for of in steps]


def _epochs(samples: Sequence[set[int]]) -> list[int]:
    """Return where epochs begin: at steps most of whose samples were seen before in the epoch."""
    begins, seen = [0], set[int]()
    for place, of in enumerate(samples):
        if 2 * len(of & seen) > len(of):
            begins.append(place)
            seen = set()
        seen |= of
    return begins


def _are_epochs(samples: Sequence[set[int]], begins: Sequence[int]) -> bool:
    """Tell whether no sample is seen twice in an epoch, but in its last step, which can be filled up."""
    pieces = [samples[begin : end - 1] for begin, end in pairwise([*begins, len(samples)])]
    return all(sum(map(len, piece)) == len({*chain(*piece)}) for piece in pieces)


def _generators(run: RecordedRun, keeps: bool) -> set[tuple[int | None, str, int]]:
    """Return the states of generators that ranks kept after a step, or set before the first: by rank and
    name."""
    ranks = {steps[0]["process"]: rank for rank, steps in run.ranks.items()}
    events = (event for event in run.of_kind("generator") if event["keeps"] is keeps)
    return {(ranks.get(event["process"]), event["name"], event["digest"]) for event in events}


def used_generators(steps: Sequence[Event]) -> set[str]:
    """Return the generators whose state changes from step to step."""
    return {name for before, after in _changes(steps) for name in different(before, after).get(HINT, [])}


def _are_of_one_optimizer(expected: Event, actual: Event) -> bool:
    """Tell whether two steps are of the same optimizer, by names of its weights, or its place in a step."""
    weights = [step["parts"].get("weights", {}).keys() for step in (expected, actual)]
    return bool(weights[0] & weights[1]) if all(weights) else expected["optimizer"] == actual["optimizer"]


def _changes(steps: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield pairs of steps between which generators can change: not each optimizer's step calls a model."""
    return pairwise(step for step in steps if step["parts"].get(HINT))


def different(expected: Event, actual: Event) -> dict[str, list[str]]:
    """Return the kinds of state in which two steps differ, each with the names."""
    names = {
        kind: _unequal_names(expected["parts"][kind], actual["parts"][kind], common=kind in _OF_CALLED)
        for kind in expected["parts"].keys() & actual["parts"].keys()
    }
    if not expected["parts"].get("moments"):  # an inner optimizer has the state: what is loaded is a copy
        names.pop("moments", None)
    return {kind: of for kind, of in names.items() if of}


def _unequal_names(expected: Mapping[str, Any], actual: Mapping[str, Any], common: bool = False) -> list[str]:
    """Return the names whose values differ; with `common` of those that both have."""
    names = [name for name in {**expected, **actual} if not common or (name in expected and name in actual)]
    return [name for name in names if expected.get(name) != actual.get(name)]


def _constants(contents: Mapping[tuple[int, str], Named]) -> dict[tuple[str, str], int]:
    """Return the counts that are the same in all saves of a run, by folded path and name. They say how
    the run began, not how far it is: the epoch that it started with, how often it was started."""
    values = defaultdict[tuple[str, str], set[Any]](set)
    for (_, path), content in contents.items():
        for name, value in content.items():
            values[folded(path), name].add(value)
    single = ((key, str(*of)) for key, of in values.items() if len(of) == 1)
    return {key: int({"=True": "1", "=False": "0"}.get(value, value[1:])) for key, value in single
            if _COUNT.fullmatch(value)}  # fmt: skip


def _decides(file: str, name: str, value: object) -> bool:
    """Tell whether a saved value counts: a tensor or a number of the script's own; no generator's state, and
    nothing that is saved under the path of a file, which has another name if a crash left one."""
    is_own = not isinstance(value, str) or (name.count(".") < 3 and bool(_NUMBER.fullmatch(value)))
    return is_own and not _UNCOUNTED.search(f"{file.partition('.')[0]}.{name}")
