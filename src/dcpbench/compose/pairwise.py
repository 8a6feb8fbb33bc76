"""Choose few jobs in which every two values of a matrix meet: `matrix=pairwise`.

They find what fails because two values meet, without the full product: ten axes of five values are ten
million jobs, and some fifty have every pair. The construction is that of AETG (Cohen, Dalal, Fredman and
Patton, The AETG system: an approach to testing based on combinatorial design, IEEE Transactions on Software
Engineering 23(7), 1997): job after job, each value is the one that makes most new pairs. If that job cannot
run, one that can is changed value by value.
"""

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

from dcpbench.compose import limits
from dcpbench.compose.composer import Composer
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Only
from dcpbench.config.text import listed
from dcpbench.executors.machine import Machine

Combination = tuple[str, ...]
"""A job: one value of each list."""
Pair = tuple[str, str]

_DRAWN = 30
"""Jobs drawn at random for a pair that seems to run in none."""
_BETTER = 4
"""How many values are tried in the place of one."""


class PairCover(NamedTuple):
    """Jobs, the pairs for which none was found that can run, and the values for which none was found: each of
    these has a job, whose row says why it cannot run."""

    rows: list[Combination]
    left_out: list[Pair]
    never: list[str]


class Search:
    """Search for jobs with every two values of different lists that can run together."""

    def __init__(
        self,
        lists: Sequence[Sequence[str]],
        runs: Callable[[Combination], bool],
        excludes: Callable[[str, str], bool],
    ) -> None:
        """Take the values of each axis, all different. The first value of an axis should run with most values
        of the others. `runs` tells whether a job can run, `excludes` whether two values are known not to."""
        self._lists = [tuple(values) for values in lists]
        self._runs = cache(runs)
        self._axis = {word: axis for axis, values in enumerate(self._lists) for word in values}
        pairs = [pair for lists in combinations(self._lists, 2) for pair in product(*lists)]
        self._left_out = [pair for pair in pairs if excludes(*pair)]
        self._excluded = frozenset(self._left_out)
        self._open = dict.fromkeys(pair for pair in pairs if pair not in self._excluded)
        self._rows: list[Combination] = []
        self._random = random.Random(0)

    def found(self) -> PairCover:
        """Return the jobs, the same each time."""
        while self._open:
            pair = next(iter(self._open))
            row = self._greedy(pair)
            if not self._runs(row):
                start = next((job for job in self._with(pair) if self._runs(job)), None)
                if start is None:
                    del self._open[pair]
                    self._left_out.append(pair)
                    continue
                row = self._improved(start, pair)
            self._rows.append(row)
            for pair in combinations(row, 2):
                self._open.pop(pair, None)
        met = {word for row in self._rows for word in row}
        never = [word for values in self._lists for word in values if word not in met]
        rows = [self._filled((word,), lambda values: values[0]) for word in never]
        left_out = [pair for pair in self._left_out if not {*never}.intersection(pair)]
        return PairCover(self._rows + rows, left_out, never)

    def _greedy(self, pair: Pair) -> Combination:
        """Return a job with this pair; each other value makes most open pairs with the values before it."""
        chosen = {self._axis[word]: word for word in pair}
        longest_first = sorted(range(len(self._lists)), key=lambda axis: -len(self._lists[axis]))
        for axis in longest_first:
            if axis not in chosen:
                chosen[axis] = max(self._lists[axis], key=lambda value: self._gain(value, chosen.values()))
        return tuple(chosen[axis] for axis in range(len(self._lists)))

    def _improved(self, row: Combination, pair: Pair) -> Combination:
        """Replace values of a job by those that make more open pairs, while it runs."""
        for axis, values in enumerate(self._lists):
            others = [*row[:axis], *row[axis + 1 :]]
            gains = {value: self._gain(value, others) for value in values}
            better = sorted(
                (better_word for better_word in values if gains[better_word] > gains[row[axis]]),
                key=gains.__getitem__,
            )
            for better_word in better[: -_BETTER - 1 : -1] if row[axis] not in pair else ():
                if self._runs(changed := (*row[:axis], better_word, *row[axis + 1 :])):
                    row = changed
                    break
        return row

    def _gain(self, value: str, others: Collection[str]) -> int:
        """Count the open pairs that a value makes with others; negative if one of them excludes it."""
        made = sum(pair in self._open for pair in self._pairs(value, others))
        return made - len(self._lists) * self._conflicts(value, others)

    def _conflicts(self, value: str, others: Collection[str]) -> int:
        return sum(pair in self._excluded for pair in self._pairs(value, others))

    def _pairs(self, value: str, others: Collection[str]) -> Iterator[Pair]:
        for second in others:
            yield (value, second) if self._axis[value] < self._axis[second] else (second, value)

    def _with(self, pair: Pair) -> Iterator[Combination]:
        """Yield jobs with this pair, the likeliest to run first: with the first values of all other axes,
        then with those of jobs that run and have one of the two, then with any."""
        yield self._filled(pair, lambda values: values[0])
        placed = {self._axis[word]: word for word in pair}
        for row in [row for row in self._rows if pair[0] in row or pair[1] in row]:
            yield tuple(placed.get(axis, word) for axis, word in enumerate(row))
        for _ in range(_DRAWN):
            yield self._filled(pair, self._random.choice)

    def _filled(self, given: Combination, choose: Callable[[Sequence[str]], str]) -> Combination:
        """Complete a job with values that those before them do not exclude, where possible."""
        chosen = {self._axis[word]: word for word in given}
        for axis, values in enumerate(self._lists):
            if axis not in chosen:
                fit = [word for word in values if not self._conflicts(word, chosen.values())]
                chosen[axis] = choose(fit or values)
        return tuple(chosen[axis] for axis in range(len(self._lists)))


def covering(
    composer: Composer,
    machine: Machine,
    hosts_of: Callable[[int, str], int],
    lists: Sequence[Sequence[str]],
) -> PairCover:
    """Return jobs with every two values of these lists that can run together on this machine.

    Raises:
        ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override is
            wrong, whatever the others are.
    """
    common = [values[0] for values in lists if len(values) == 1]
    swept = [word for values in lists if len(values) > 1 for word in values]
    alone = {word: composer.config([*common, word]) for word in swept}
    several_sizes = limits.has_several_sizes(alone.values())

    def runs(overrides: Sequence[str]) -> bool:
        try:
            asked = composer.config(overrides)
            limits.refuse_impossible(asked)
            resolved = limits.resolve(asked, machine, hosts_of)
            return limits.why_skip(asked, resolved, machine, several_sizes, overrides) is None
        except ConfigError:
            return False

    def refuses(value: str, second: str) -> bool:
        """Return whether a value is declared not to run with another one."""
        if value not in alone or second not in alone:
            return False
        axis = _key(second)
        only: dict[str, Only] = getattr(getattr(alone[value], _key(value), None), "only", {})
        return axis in only and alone[second].value_of(axis) not in only[axis].values

    return Search(lists, runs, lambda *pair: refuses(*pair) or refuses(*reversed(pair))).found()


def sentence(lists: Sequence[Sequence[str]], cover: PairCover) -> str:
    """Describe how many of the cells run, and which pairs are left out."""
    text = (
        f"matrix=pairwise: {len(cover.rows)} of {math.prod(map(len, lists))} cells have every pair of values"
    )
    out = [f"{word} with any" for word in cover.never] + [" with ".join(pair) for pair in cover.left_out]
    if not out:
        return text
    return f"{text} that can run; left out: {listed(out)}"


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
