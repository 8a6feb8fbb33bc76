"""Compare a stopped and resumed run with the uninterrupted one, and find the first difference.

A step of the resumed run is compared with the same step of the run that was stopped, which made the
checkpoint, as far as that came; later steps with the reference run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpbench.plugins.script.record import Recording, Step, newest_complete

KINDS = {
    "checkpoint": "the checkpoint taken",
    "weights": "weights",
    "frozen": "frozen weights",
    "buffers": "buffers",
    "moments": "optimizer state",
    "hyper": "hyperparameters",
    "modes": "train or eval mode",
    "batch": "the batch",
    "loss": "the loss",
    "gradients": "gradients",
    "saved": "what is saved",
    "steps": "the number of steps",
}
"""The compared kinds, in causal order: in one step, an earlier kind can be the cause of a later one."""
ORDER = {kind: place for place, kind in enumerate(KINDS)}
_RESTORED = ("weights", "frozen", "buffers", "moments")
"""Kinds that the first resumed step gets from the checkpoint alone."""
_EACH_STEP = tuple(kind for kind in KINDS if kind not in ("checkpoint", "saved", "steps"))
_OF_CALLED = ("frozen", "buffers", "modes")
"""Kinds of models that were called: some are called later than the first step."""
_SCORES = {"weights": 3, "moments": 2, "batch": 1, "hyper": 1}
_LOADED_SCORE = 3
_RANDOM = re.compile("rng|random|generator", re.IGNORECASE)
_NUMBER = re.compile(r"=(-?[\d.]+(e[+-]?\d+)?|True|False|inf)")


@dataclass(frozen=True)
class Unequal:
    """What differs between uninterrupted runs, and is not blamed on the resume.

    Args:
        kinds: kinds of state, and the first step where they differ.
        saved: names of values that were saved.
    """

    kinds: Mapping[str, int]
    saved: frozenset[str]

    @classmethod
    def of(cls, reference: Recording, *others: Recording) -> "Unequal":
        """Compare runs of the same command, as far as each came."""
        kinds: dict[str, int] = {}
        saved: set[str] = set()
        for other in others:
            for rank in reference.ranks.keys() & other.ranks.keys():
                for pair in zip(reference.ranks[rank].steps, other.ranks[rank].steps, strict=False):
                    for kind in different(*pair):
                        kinds[kind] = min(kinds.get(kind, pair[0].at), pair[0].at)
                contents = reference.saves(rank)
                for key, content in other.saves(rank).items():
                    saved |= {*_unequal_names(content, contents.get(key, content))}
        return cls(kinds, frozenset(saved))


@dataclass(frozen=True)
class Difference:
    """The first difference of a resumed run.

    Args:
        step: of the uninterrupted run, from 1.
        names: what differs, of a `kind` of `KINDS`.
        expected, actual: the steps that differ; None of `saved` and `steps`.
        is_first: it is the first step after the resume.
        text: the path of what is saved; what is wrong with the number of steps.
    """

    step: int
    rank: int
    kind: str
    names: Sequence[str] = ()
    expected: Step | None = None
    actual: Step | None = None
    is_first: bool = False
    text: str = ""

    @property
    def order(self) -> tuple[float, int]:
        """Where it is in time, then among causes."""
        return (self.step + 0.5 if self.kind == "saved" else self.step, ORDER[self.kind])

    @property
    def is_restored(self) -> bool:
        """Whether it is state that the checkpoint has, right after the load."""
        return self.is_first and self.kind in _RESTORED


class Compared:
    """The comparison of a resumed run, which made at least one step.

    Args:
        cut: the file that was not complete when the run was stopped.
        ended_well: the resumed run ended with exit status 0.
    """

    def __init__(
        self, reference: Recording, stopped: Recording, resumed: Recording, cut: str, ended_well: bool
    ) -> None:
        self._reference, self._stopped, self._resumed = reference, stopped, resumed
        self._ended_well = ended_well
        self.newest = newest_complete(reference.disk, stopped, cut)
        ranks = sorted(reference.ranks.keys() & resumed.ranks.keys())
        self.sequences = {rank: _uninterrupted(reference, stopped, rank) for rank in ranks}
        """The steps of the uninterrupted run, by rank."""
        self._actual = {rank: resumed.ranks[rank].steps for rank in ranks}
        paths, read = resumed.paths_read()
        steps = {path: stopped.disk.step_of(path) for path in paths or read}
        self._place = self._begin({step for step in steps.values() if step is not None})
        of_first = self.sequences[ranks[0]]
        self.loaded = of_first[self._place].done
        """After how many steps the loaded state was saved; 0: the start."""
        self.loaded_paths = [path for path, step in steps.items() if step == self.loaded]
        self.last = self.loaded + min(len(of_first) - self._place, *map(len, self._actual.values()))
        """The last step that was compared."""

    @property
    def generators(self) -> list[str]:
        """Generators that differed at the first resumed step; not those that nothing seeds."""
        names = {
            name
            for rank, steps in self.sequences.items()
            for name, state in steps[self._place].generators.items()
            if self._actual[rank][0].generators.get(name, state) != state
            and steps[0].generators.get(name) == self._reference.ranks[rank].steps[0].generators.get(name)
        }
        return sorted(names)

    @property
    def is_scratch(self) -> bool:
        """Whether the resumed run begins as the uninterrupted one did."""
        starts = [(steps[0], self._actual[rank][0]) for rank, steps in self.sequences.items()]
        return self.loaded == 0 and not any(different(*pair) for pair in starts)

    def first(self, unequal: Unequal) -> list[Difference]:
        """Return the first difference, of each rank that has it."""
        differences = [
            difference
            for rank in self.sequences
            for difference in (*self._in_steps(rank, unequal), *self._in_saves(rank, unequal))
        ]
        first = min((difference.order for difference in differences), default=None)
        return [difference for difference in differences if difference.order == first]

    def _begin(self, loaded: set[int]) -> int:
        """Return the place in the uninterrupted run at which the resumed one begins, by what its first step
        has in common with each step. `loaded` are the saves that it read, by their steps."""

        def score(place: int) -> int:
            points = 0
            for rank, steps in self.sequences.items():
                resumed = self._actual[rank][0]
                if place >= len(steps) or steps[place].optimizer != resumed.optimizer:
                    return -1
                points += _LOADED_SCORE * (steps[place].done in loaded)
                for kind, value in _SCORES.items():
                    expected = steps[place].parts.get(kind)
                    points += value * (expected is not None and expected == resumed.parts.get(kind))
            return points

        return max(range(max(map(len, self.sequences.values()))), key=lambda place: (score(place), place))

    def _in_steps(self, rank: int, unequal: Unequal) -> Iterator[Difference]:
        """Yield the first difference of a rank in its steps, if there is one."""
        expected, actual = self.sequences[rank][self._place :], self._actual[rank]
        is_ddp = "DistributedDataParallel" in self._resumed.about["classes"]
        for number, (step, other) in enumerate(zip(actual, expected, strict=False)):
            kinds = different(other, step)
            # DDP gives all ranks the buffers of rank 0 before each forward pass.
            if number == 0 and rank and is_ddp:
                kinds.pop("buffers", None)
            for kind in sorted(kinds, key=ORDER.__getitem__):
                difference = Difference(other.at, rank, kind, kinds[kind], other, step, number == 0)
                if difference.is_restored or other.at < unequal.kinds.get(kind, other.at + 1):
                    yield difference
                    return
        last = expected[min(len(expected), len(actual)) - 1].at
        if len(actual) > len(expected):
            text = f"{len(actual) - len(expected)} more than the reference"
            yield Difference(last + 1, rank, "steps", text=text)
        elif len(actual) < len(expected):
            text = f"ends after step {last}, the reference after step {expected[-1].at}"
            yield Difference(last + 1, rank, "steps", text=text)
        elif not self._ended_well and self._last_saves(rank, expected[-1].done):
            yield Difference(last, rank, "steps", text="fails after the last step, before the last save")

    def _last_saves(self, rank: int, done: int) -> set[str]:
        """Return the files that the reference saves after its last step, and the resumed run does not. A
        process group can abort when a whole script ends, so an exit status alone is no difference."""
        saves = self._reference.saves(rank), self._resumed.saves(rank, self.loaded)
        expected, actual = ({name for after, name in each if after >= done} for each in saves)
        return expected - actual

    def _in_saves(self, rank: int, unequal: Unequal) -> Iterator[Difference]:
        """Yield the first save of a rank that holds something else. States of generators can differ without
        an effect, and texts that the script saves, such as times."""
        contents = self._reference.saves(rank) | self._stopped.saves(rank)
        for (done, name), content in self._resumed.saves(rank, self.loaded).items():
            if done == self.loaded or (done, name) not in contents:
                continue
            expected = contents[done, name]
            names = [
                key
                for key in _unequal_names(expected, content)
                if key not in unequal.saved and _decides(key, expected.get(key, content.get(key)))
            ]
            if names:
                yield Difference(done, rank, "saved", names, text=name)
                return


def different(expected: Step, actual: Step) -> dict[str, list[str]]:
    """Return the kinds of state in which two steps differ, each with the names."""
    names = {
        kind: _unequal_names(expected.parts[kind], actual.parts[kind], common=kind in _OF_CALLED)
        for kind in _EACH_STEP
        if kind in expected.parts and kind in actual.parts
    }
    return {kind: of for kind, of in names.items() if of}


def _unequal_names(expected: Mapping[str, Any], actual: Mapping[str, Any], common: bool = False) -> list[str]:
    """Return the names whose values differ; with `common` of those that both have."""
    names = [name for name in {**expected, **actual} if not common or (name in expected and name in actual)]
    return [name for name in names if expected.get(name) != actual.get(name)]


def _uninterrupted(reference: Recording, stopped: Recording, rank: int) -> list[Step]:
    """Return the steps of the run that was stopped, then those of the reference."""
    steps = stopped.ranks[rank].steps if rank in stopped.ranks else []
    return [*steps, *reference.ranks[rank].steps[len(steps) :]]


def _decides(name: str, value: object) -> bool:
    """Tell whether a saved value counts: a tensor, or a number of the script's own."""
    if _RANDOM.search(name):
        return False
    is_nested = len(re.findall(r"[.\[]", name)) > 1
    return not isinstance(value, str) or (not is_nested and bool(_NUMBER.fullmatch(value)))
