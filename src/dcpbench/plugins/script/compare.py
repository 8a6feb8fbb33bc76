"""Compare a stopped and resumed run with the uninterrupted one, and find the first difference."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

from dcpbench.plugins.script.record import Event, Named, Run, newest_complete, number

KINDS: dict[str, dict[str, Any]] = yaml.safe_load(
    files("dcpbench.plugins.script").joinpath("kinds.yaml").read_text(encoding="utf-8")
)
"""The compared kinds, in causal order, with their texts."""
ORDER = {kind: place for place, kind in enumerate(KINDS)}
_RESTORED = ("weights", "frozen", "buffers", "moments")
"""Kinds that the first resumed step gets from the checkpoint alone."""
_OF_CALLED = ("frozen", "buffers", "modes", "generators")
"""Kinds of models that were called: some are called later than the first step."""
_SCORES = {"weights": 3, "moments": 2, "batch": 1, "hyper": 1}
_RANDOM = re.compile("rng|random|generator", re.IGNORECASE)
_NUMBER = re.compile(r"=(-?[\d.]+(e[+-]?\d+)?|True|False|inf)")


@dataclass(frozen=True)
class Difference:
    """The first difference of a resumed run: at a `step` of the uninterrupted run, from 1; names of a kind of
    `KINDS`, with the values of two steps; or a text, of what is saved or of the number of steps."""

    step: int
    rank: int
    kind: str
    names: Sequence[str] = ()
    expected: Named = field(default_factory=dict)
    actual: Named = field(default_factory=dict)
    text: str = ""


class Compared:
    """The comparison of a resumed run, which made at least one step."""

    def __init__(self, reference: Run, stopped: Run, resumed: Run) -> None:
        self.stopped, self._reference, self._resumed = stopped, reference, resumed
        self.failed = bool(resumed.status)
        self.newest = newest_complete(reference, stopped)
        self.steps = {}
        """The steps of the uninterrupted run by rank: of the stopped run, which made the checkpoint, then of
        the reference."""
        for rank in sorted(reference.ranks.keys() & resumed.ranks.keys()):
            steps = stopped.ranks.get(rank, [])
            self.steps[rank] = [*steps, *reference.ranks[rank][len(steps) :]]
        self._actual = {rank: resumed.ranks[rank] for rank in self.steps}
        self.paths_read = resumed.paths_read()
        saves = {path: stopped.disk.step_of(path) for path in self.paths_read}
        self._place = self._begin({*saves.values()})
        of_first = next(iter(self.steps.values()))
        self.loaded = of_first[self._place]["k"]
        """After how many steps the loaded state was saved; 0: the start."""
        self.loaded_paths = [path for path, step in saves.items() if step == self.loaded]
        compared = min(len(of_first) - self._place, *map(len, self._actual.values()))
        self.last = number(of_first[self._place + compared - 1])
        """The last step that was compared."""
        firsts = [different(self.steps[rank][self._place], steps[0]) for rank, steps in self._actual.items()]
        self.generators = sorted({name for kinds in firsts for name in kinds.get("generators", [])})
        """Generators of torch that differed at the first resumed step."""

    def first(self, noise: Mapping[str, int]) -> list[Difference]:
        """Return the first difference, of each rank that has it. `noise` is not blamed on the resume."""
        if self.newest is not None and self.loaded < self.newest:
            return [Difference(self.loaded + 1, 0, "checkpoint")]
        differences: dict[tuple[int, int], list[Difference]] = {}
        for rank in self.steps:
            for difference in (*self._in_steps(rank, noise), *self._in_saves(rank, noise)):
                # What is saved after a step comes after the step.
                differences.setdefault((difference.step, ORDER[difference.kind]), []).append(difference)
        return differences[min(differences)] if differences else []

    def _begin(self, loaded: set[int | None]) -> int:
        """Return where in the uninterrupted run the resumed one begins: the step that has most in common with
        its first one. `loaded` are the saves that it read, by their steps."""

        def score(place: int) -> int:
            points = 0
            for rank, steps in self.steps.items():
                resumed = self._actual[rank][0]
                if place >= len(steps) or steps[place]["optimizer"] != resumed["optimizer"]:
                    return -1
                points += _SCORES["weights"] * (steps[place]["k"] in loaded)
                for kind, value in _SCORES.items():
                    points += value * (steps[place]["parts"].get(kind) == resumed["parts"].get(kind))
            return points

        return max(range(max(map(len, self.steps.values()))), key=lambda place: (score(place), place))

    def _in_steps(self, rank: int, noise: Mapping[str, int]) -> Iterator[Difference]:
        """Yield the first difference of a rank in its steps, if there is one."""
        expected, actual = self.steps[rank][self._place :], self._actual[rank]
        is_ddp = "DistributedDataParallel" in self._resumed.about["classes"]
        for place, (step, other) in enumerate(zip(actual, expected, strict=False)):
            kinds = different(other, step)
            if place == 0 and rank and is_ddp:  # which gets them from rank 0 in the forward pass
                kinds.pop("buffers", None)
            fewer = len(step["parts"]["batch"]) < len(other["parts"]["batch"])
            if place == 0 and fewer and "gradients" not in kinds:  # those of the other batches were saved
                kinds = {kind: of for kind, of in kinds.items() if kind not in ("buffers", "batch", "loss")}
            for kind in sorted(kinds.keys() & ORDER, key=ORDER.__getitem__):
                is_restored = place == 0 and kind in _RESTORED
                if is_restored or number(other) < noise.get(kind, number(other) + 1):
                    yield Difference(
                        number(other), rank, kind, kinds[kind], other["parts"][kind], step["parts"][kind]
                    )
                    return
        if len(actual) != len(expected):
            end, last = number(expected[-1]) + len(actual) - len(expected), number(expected[-1])
            text = f"ends after step {end}, the reference after step {last}"
            yield Difference(min(end, last) + 1, rank, "steps", text=text)

    def _in_saves(self, rank: int, noise: Mapping[str, int]) -> Iterator[Difference]:
        """Yield the first save of a rank that has something else in it. A save that is not made is empty if
        the run failed: a process group can abort when all is done, and files can have other names."""
        contents = self._reference.contents(rank) | self.stopped.contents(rank)
        saves = self._resumed.contents(rank, self.loaded)
        for (done, name), expected in sorted(contents.items(), key=lambda item: item[0]):
            actual = saves.get((done, name), {} if self.failed else expected)
            names = [
                key
                for key in _unequal_names(expected, actual)
                if f"saved {key}" not in noise and _decides(name, key, expected.get(key, actual.get(key)))
            ]
            if names and done > self.loaded:
                holds = "holds another" if (done, name) in saves else "is missing, with"
                yield Difference(done, rank, "saved", names, text=f"{name} {holds}")
                return


def noise_of(reference: Run, *others: Run) -> dict[str, int]:
    """Return in which kinds of state and saved values equal runs differ, each with the first step."""
    noise: dict[str, int] = {}
    for other in others:
        for rank in reference.ranks.keys() & other.ranks.keys():
            for expected, actual in zip(reference.ranks[rank], other.ranks[rank], strict=False):
                for kind in different(expected, actual):
                    noise[kind] = min(noise.get(kind, number(expected)), number(expected))
            contents = reference.contents(rank)
            for key, content in other.contents(rank).items():
                for name in _unequal_names(content, contents.get(key, content)):
                    noise.setdefault(f"saved {name}", key[0])
    return noise


def different(expected: Event, actual: Event) -> dict[str, list[str]]:
    """Return the kinds of state in which two steps differ, each with the names."""
    names = {
        kind: _unequal_names(expected["parts"][kind], actual["parts"][kind], common=kind in _OF_CALLED)
        for kind in expected["parts"].keys() & actual["parts"].keys()
    }
    return {kind: of for kind, of in names.items() if of}


def _unequal_names(expected: Mapping[str, Any], actual: Mapping[str, Any], common: bool = False) -> list[str]:
    """Return the names whose values differ; with `common` of those that both have."""
    names = [name for name in {**expected, **actual} if not common or (name in expected and name in actual)]
    return [name for name in names if expected.get(name) != actual.get(name)]


def _decides(file: str, name: str, value: object) -> bool:
    """Tell whether a saved value counts: a tensor or a number of the script's own, no generator's state."""
    is_own = not isinstance(value, str) or (name.count(".") < 2 and bool(_NUMBER.fullmatch(value)))
    return is_own and not _RANDOM.search(file) and not _RANDOM.search(name)
