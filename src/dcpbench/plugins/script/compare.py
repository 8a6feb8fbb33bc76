"""Compare a stopped and resumed run with the uninterrupted one, and find the first difference.

A step of the resumed run is compared with the same step of the run that was stopped, which made the
checkpoint, as far as that came; later steps with the reference run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcpbench.plugins.script.record import Recording, Save, Step, newest_complete

KINDS = {
    "checkpoint": "the checkpoint taken",
    "weights": "weights",
    "frozen": "frozen weights",
    "start_buffers": "buffers",
    "moments": "optimizer state",
    "hyper": "hyperparameters",
    "modes": "train or eval mode",
    "batch": "the batch",
    "loss": "the loss",
    "gradients": "gradients",
    "buffers": "buffers after the forward pass",
    "saved": "what is saved",
    "steps": "the number of steps",
}
"""What is compared, in causal order: in one step, what comes first can be the cause of what comes later."""
_ORDER = {kind: place for place, kind in enumerate(KINDS)}
_RESTORED = ("weights", "frozen", "start_buffers", "moments")
"""What the first resumed step got from the checkpoint: no computation of this run is in it."""
_EACH_STEP = tuple(kind for kind in KINDS if kind not in ("checkpoint", "start_buffers", "saved", "steps"))
_OF_CALLED = ("frozen", "buffers", "modes")
_SCORES = {"weights": 3, "moments": 2, "batch": 1, "hyper": 1}
_LOADED_SCORE = 3
_RANDOM = re.compile("rng|random|generator", re.IGNORECASE)

Unequal = Mapping[str, int]
"""Kinds that differ between two uninterrupted runs, and the first step where they do."""


@dataclass(frozen=True)
class Difference:
    """The first difference of a resumed run.

    Args:
        step: of the uninterrupted run, from 1.
        names: what differs, of a `kind` of `KINDS`.
        expected, actual: the steps that differ; None of `saved` and `steps`.
        is_first: it is the first step after the resume.
    """

    step: int
    rank: int
    kind: str
    names: Sequence[str]
    expected: Step | None = None
    actual: Step | None = None
    is_first: bool = False
    place: int = 0
    text: str = ""

    @property
    def order(self) -> tuple[float, int, int]:
        """Where it is in time, then among causes."""
        return (self.step + 0.5 if self.kind == "saved" else self.step, _ORDER[self.kind], self.rank)


@dataclass(frozen=True)
class Compared:
    """The comparison of a resumed run.

    Args:
        loaded: after how many steps the loaded state was saved; 0: the start.
        newest: the newest complete checkpoint when it was stopped.
        compared_steps: how many resumed steps were compared.
        loaded_paths: files that it loaded from.
        generators: generators that differed at the first resumed step.
        sequences: the steps of the uninterrupted run, by rank.
        ranks: those that have the first difference.
    """

    loaded: int
    newest: int | None
    difference: Difference | None
    compared_steps: int
    loaded_paths: Sequence[str] = ()
    generators: Sequence[str] = ()
    is_scratch: bool = False
    sequences: Mapping[int, Sequence[Step]] = field(default_factory=dict)
    ranks: Sequence[int] = ()


def different(expected: Step, actual: Step) -> dict[str, list[str]]:
    """Return the kinds of state in which two steps differ, each with the names."""
    found: dict[str, list[str]] = {}
    for kind in _EACH_STEP:
        one, other = expected.parts.get(kind), actual.parts.get(kind)
        if one is not None and other is not None and one != other:
            # A model can be called later than the first step, so that its state is not known there.
            common = kind in _OF_CALLED
            names = [name for name in {**one, **other} if not common or (name in one and name in other)]
            found[kind] = [name for name in names if one.get(name) != other.get(name)]
    return {kind: names for kind, names in found.items() if names}


def unequal(reference: Recording, other: Recording) -> tuple[Unequal, set[str]]:
    """Return in which kinds two runs of the same command differ, and from which step on; and the names of
    saved values that differ."""
    first: dict[str, int] = {}
    values: set[str] = set()
    for rank in reference.ranks.keys() & other.ranks.keys():
        for one, two in zip(reference.ranks[rank].steps, other.ranks[rank].steps, strict=False):
            for kind in different(one, two):
                first[kind] = min(first.get(kind, one.at), one.at)
        saves = _by_step(reference.saves(rank))
        for save in other.saves(rank):
            content = saves[_key(save)].content if _key(save) in saves else {}
            values |= {name for name, value in save.content.items() if content.get(name, value) != value}
    return first, values


def resumed_from(
    expected: Sequence[Sequence[Step]], actual: Sequence[Sequence[Step]], loaded: set[int]
) -> int:
    """Return the place in the uninterrupted run at which the resumed one begins, by what its first step has
    in common with each step. `loaded` are the saves that it read, by their steps.

    Args:
        expected, actual: the steps of each rank.
    """

    def score(place: int) -> int:
        points = 0
        for steps, resumed in zip(expected, actual, strict=True):
            if place >= len(steps) or steps[place].optimizer != resumed[0].optimizer:
                return -1
            for kind, value in _SCORES.items():
                one, other = steps[place].parts.get(kind), resumed[0].parts.get(kind)
                points += value if one is not None and one == other else 0
        return points + _LOADED_SCORE * len(actual) * (steps[place].done in loaded)

    return max(range(max(map(len, expected), default=0)), key=lambda place: (score(place), place), default=0)


def compare(
    reference: Recording, stopped: Recording, resumed: Recording, cut: str, ended_well: bool,
    others: Unequal, unequal_values: set[str],
) -> Compared:  # fmt: skip
    """Compare a resumed run, which made at least one step.

    Args:
        cut: the file that was not complete when the run was stopped.
        ended_well: the resumed run ended with exit status 0.
        others: what differs between uninterrupted runs, and is not blamed on the resume.
        unequal_values: the same for names of saved values.
    """
    newest = newest_complete(reference.disk, stopped, cut)
    ranks = sorted(reference.ranks.keys() & resumed.ranks.keys())
    sequences = {rank: _uninterrupted(reference, stopped, rank) for rank in ranks}
    actual = {rank: resumed.ranks[rank].steps for rank in ranks}
    paths, read = resumed.paths_read()
    of_paths = {path: step for path in paths or read if (step := stopped.disk.step_of(path)) is not None}
    place = resumed_from(
        [sequences[rank] for rank in ranks], [actual[rank] for rank in ranks], {*of_paths.values()}
    )
    first = sequences[ranks[0]][place]
    base = first.done
    found: list[Difference] = []
    for rank in ranks:
        runs = sequences[rank], actual[rank], place, (reference, resumed)
        found += _first_in_steps(rank, *runs, ended_well, others)
    for rank in ranks:
        found += _first_in_saves(rank, reference, stopped, resumed, base, unequal_values)
    starts = [(sequences[rank][0], actual[rank][0]) for rank in ranks]
    generators = {
        name
        for rank in ranks
        for name, state in sequences[rank][place].generators.items()
        if actual[rank][0].generators.get(name, state) != state
        # One that nothing seeds differs in every process.
        and sequences[rank][0].generators.get(name) == reference.ranks[rank].steps[0].generators.get(name)
    }
    first_of_all = min(found, key=lambda one: one.order, default=None)
    return Compared(
        loaded=base,
        newest=newest,
        difference=first_of_all,
        compared_steps=min(min(len(actual[rank]) for rank in ranks), len(sequences[ranks[0]]) - place),
        loaded_paths=[path for path, step in of_paths.items() if step == base] or [*of_paths],
        generators=sorted(generators),
        is_scratch=base == 0 and not any(different(*pair) for pair in starts),
        sequences=sequences,
        ranks=[one.rank for one in found if first_of_all and one.order[:2] == first_of_all.order[:2]],
    )


def without(difference: Difference, others: Unequal) -> bool:
    """Tell whether two uninterrupted runs differ in the same way, so that the resume is not to blame."""
    if difference.is_first and difference.kind in _RESTORED:
        return False
    return difference.step >= others.get(difference.kind, difference.step + 1)


def _uninterrupted(reference: Recording, stopped: Recording, rank: int) -> list[Step]:
    """Return the steps of the run that was stopped, then those of the reference."""
    steps = stopped.ranks[rank].steps if rank in stopped.ranks else []
    return [*steps, *reference.ranks[rank].steps[len(steps) :]]


def _first_in_steps(
    rank: int,
    expected: Sequence[Step],
    actual: Sequence[Step],
    place: int,
    runs: tuple[Recording, Recording],
    ended_well: bool,
    others: Unequal,
) -> Iterator[Difference]:  # fmt: skip
    """Yield the first difference of a rank in its steps, if there is one. `runs` are the reference and the
    resumed one."""
    reference, resumed = runs
    wrappers = resumed.about.get("wrappers", ())
    for number, step in enumerate(actual):
        if place + number >= len(expected):
            more = len(actual) - number
            last = expected[-1].at + 1
            yield Difference(last, rank, "steps", [], text=f"{more} more than the reference")
            return
        other = expected[place + number]
        kinds = different(other, step)
        # DDP gives all ranks the buffers of rank 0 before each forward pass.
        if number == 0 and (rank == 0 or "DistributedDataParallel" not in wrappers):
            kinds.pop("buffers", None)
            kinds |= _start_buffers(expected, place, step)
        for kind in sorted(kinds, key=_ORDER.__getitem__):
            difference = Difference(
                other.at, rank, kind, kinds[kind], other, step, number == 0, place + number
            )
            if not without(difference, others):
                yield difference
                return
    left = len(expected) - place - len(actual)
    if left > 0:
        last = expected[place + len(actual) - 1].at
        text = f"ends after step {last}, the reference after step {expected[-1].at}"
        yield Difference(last + 1, rank, "steps", [], text=text)
    elif not ended_well and _saved_after(reference, rank, expected[-1]) - _saved_after(resumed, rank, step):
        text = "fails after the last step, before the last save"
        yield Difference(expected[-1].at, rank, "steps", [], text=text)


def _saved_after(run: Recording, rank: int, last: Step) -> set[str]:
    return {_key(save)[1] for save in run.saves(rank) if save.done > last.done}


def _start_buffers(expected: Sequence[Step], place: int, step: Step) -> dict[str, list[str]]:
    before = (
        expected[0].parts.get("start_buffers") if place == 0 else expected[place - 1].parts.get("buffers")
    )
    now = step.parts.get("start_buffers")
    if before is None or now is None or before == now:
        return {}
    names = [name for name in now if before.get(name, now[name]) != now[name]]
    return {"start_buffers": names} if names else {}


def _first_in_saves(
    rank: int,
    reference: Recording,
    stopped: Recording,
    resumed: Recording,
    base: int,
    unequal_values: set[str],
) -> Iterator[Difference]:
    """Yield the first save of a rank that holds something else. States of generators can differ without an
    effect, and texts that the script saves, such as times."""
    saves = _by_step([*reference.saves(rank), *(stopped.saves(rank) if rank in stopped.ranks else [])])
    for save in resumed.saves(rank):
        moved = replace(save, done=save.done + base)
        if save.done == 0 or _key(moved) not in saves:
            continue
        expected = saves[_key(moved)].content
        names = [
            name
            for name in {**expected, **save.content}
            if expected.get(name) != save.content.get(name)
            and name not in unequal_values
            and _decides(name, expected.get(name, save.content.get(name)))
        ]
        if names:
            yield Difference(moved.done, rank, "saved", names, text=save.path)
            return


def _decides(name: str, value: object) -> bool:
    if _RANDOM.search(name):
        return False
    if isinstance(value, str):  # a plain value: only a number of the script's own
        return len(re.findall(r"[.\[]", name)) < 2 and bool(
            re.fullmatch(r"=(-?[\d.]+(e[+-]?\d+)?|True|False|inf)", value)
        )
    return True


def _key(save: Save) -> tuple[int, str]:
    return save.done, save.path.rpartition("/")[2]


def _by_step(saves: Sequence[Save]) -> dict[tuple[int, str], Save]:
    return {_key(save): save for save in saves}
