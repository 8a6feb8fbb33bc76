"""Describe a difference in words, and name its likely cause: a table of signatures."""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcpbench.config.text import listed
from dcpbench.plugins.script.compare import KINDS, Compared, Difference
from dcpbench.plugins.script.record import Recording, Step

_NAMED = 3
_AVERAGES = ("ema", "average", "avg_model", "swa", "shadow", "teacher")
"""Parts of the names that averages of weights have."""


@dataclass(frozen=True)
class Facts:
    """What is known about a difference.

    Args:
        same_as: the steps of the uninterrupted run that have the resumed values, the nearest first.
        missing: names that the resumed run does not have at all.
        total: how many names of the kind there are.
        held_as: names under which the checkpoint has the resumed values.
    """

    compared: Compared
    difference: Difference
    same_as: Sequence[int]
    missing: Sequence[str]
    total: int
    held_as: Sequence[str]

    @property
    def is_start(self) -> bool:
        """Whether the resumed values are those of a run that has just begun."""
        return 1 in self.same_as

    @property
    def draws(self) -> bool:
        """Whether a generator that torch draws from differed at the first resumed step."""
        return any(name in ("torch", "CUDA") for name in self.compared.generators)

    def value(self, of: Step | None, name: str) -> Any:
        """Return a value of the step that differs."""
        return of.parts.get(self.difference.kind, {}).get(name) if of else None

    @property
    def ratio(self) -> float:
        """The resumed loss divided by the reference's; NaN if there is none."""
        name = next(iter(self.difference.names), "")
        values = [self.value(of, name) for of in (self.difference.expected, self.difference.actual)]
        if self.difference.kind != "loss" or not all(isinstance(one, int) for one in values):
            return math.nan
        expected, actual = map(_float, values)
        return actual / expected if expected else math.nan


Condition = Callable[[Facts], bool]


def _all_missing(facts: Facts) -> bool:
    return bool(facts.missing) and len(facts.missing) == facts.total


def _lr_only(facts: Facts) -> bool:
    return all(name.split(" ")[-1] in ("lr", "initial_lr") for name in facts.difference.names)


def _near(facts: Facts) -> bool:
    return any(abs(step - facts.difference.step) == 1 for step in facts.same_as)


def _power_of_two(facts: Facts) -> bool:
    ratio = abs(facts.ratio)
    return math.isfinite(ratio) and ratio > 0 and ratio != 1 and math.frexp(ratio)[0] == 0.5


def _fewer_calls(facts: Facts) -> bool:
    expected, actual = (
        {name.partition("[")[0] for name in of.parts.get("batch", {})} if of else set[str]()
        for of in (facts.difference.expected, facts.difference.actual)
    )
    return len(actual) < len(expected)


def _is_new(facts: Facts) -> bool:
    """Tell whether several entries of each parameter are equal: zeros, as in a new optimizer."""
    entries: dict[str, list[Any]] = {}
    for name in facts.difference.names:
        parameter, _, entry = name.rpartition(".")
        if entry != "step":
            entries.setdefault(parameter, []).append(facts.value(facts.difference.actual, name))
    return bool(entries) and all(len(of) > 1 == len({*of}) for of in entries.values())


def _on_some_ranks(facts: Facts) -> bool:
    some = len(facts.compared.ranks) < len(facts.compared.sequences)
    return some and (facts.is_start or _all_missing(facts))


def _sorted_as_text(facts: Facts) -> bool:
    newest, loaded = str(facts.compared.newest), str(facts.compared.loaded)
    return facts.difference.kind == "checkpoint" and loaded > newest and len(loaded) < len(newest)


def _is_average(facts: Facts) -> bool:
    return any(part in name.lower() for name in facts.difference.names for part in _AVERAGES)


_SIGNATURES: tuple[tuple[str, Condition, str], ...] = (
    (
        "checkpoint",
        _sorted_as_text,
        "checkpoints are sorted as text, where 8 comes after 12: compare their numbers",
    ),
    (
        "checkpoint",
        lambda facts: True,
        "the newest complete checkpoint is not found: its name or pointer is written late, or the choice has "
        "another rule",
    ),
    (
        "weights",
        lambda facts: bool(facts.held_as),
        "they are what the checkpoint holds as {held}: the wrong entry is loaded",
    ),
    ("weights", _on_some_ranks, "nothing is loaded on rank {ranks}: every rank has to load"),
    ("moments", _on_some_ranks, "nothing is loaded on rank {ranks}: every rank has to load"),
    (
        "weights",
        lambda facts: facts.is_start and len(facts.difference.names) == facts.total,
        "they are the weights of the start: nothing is loaded into the model",
    ),
    (
        "weights",
        lambda facts: facts.is_start,
        "they are those of the start: these keys are not saved, or are skipped in the load (strict=False)",
    ),
    (
        "weights",
        lambda facts: bool(facts.same_as),
        "they are the weights of step {same}: another checkpoint's",
    ),
    (
        "weights",
        lambda facts: facts.difference.is_first,
        "they are of no step: changed after the load, rounded by another dtype, or initialized again",
    ),
    (
        "frozen",
        lambda facts: facts.is_start,
        "frozen weights are not in the checkpoint, or their keys are skipped",
    ),
    ("frozen", lambda facts: True, "frozen weights are initialized again, and no checkpoint restores them"),
    (
        "start_buffers",
        lambda facts: True,
        "buffers are not restored: not in the state dict (persistent=False), or their keys are skipped",
    ),
    ("moments", _all_missing, "the optimizer's state is not restored: it is not saved, or not loaded"),
    ("moments", _is_new, "it is that of a new optimizer: it is not saved, or not loaded"),
    ("moments", lambda facts: bool(facts.missing), "part of the optimizer's state is not restored"),
    ("moments", lambda facts: bool(facts.same_as), "it is that of step {same}: another checkpoint's"),
    (
        "moments",
        lambda facts: all(name.endswith(".step") for name in facts.difference.names),
        "the optimizer's count of steps is not restored",
    ),
    (
        "moments",
        lambda facts: True,
        "the optimizer's state is assigned to other parameters, or changed after the load",
    ),
    (
        "hyper",
        lambda facts: _lr_only(facts) and not facts.difference.is_first,
        "the schedule is not restored: the scheduler's state is not saved, or not loaded",
    ),
    (
        "hyper",
        lambda facts: _lr_only(facts) and facts.is_start and facts.difference.step > 2,
        "the schedule starts over: the scheduler's state is not saved, or not loaded",
    ),
    (
        "hyper",
        lambda facts: _lr_only(facts) and _near(facts),
        "the schedule is off by one step after the load",
    ),
    (
        "hyper",
        lambda facts: _lr_only(facts) and bool(facts.same_as),
        "the schedule continues from step {same}: its position is not that of the checkpoint",
    ),
    (
        "hyper",
        lambda facts: True,
        "the script sets hyperparameters after the load, or a scheduler is created after it",
    ),
    (
        "modes",
        lambda facts: True,
        "the model is not set to the mode that it had: call train() after the load",
    ),
    (
        "batch",
        lambda facts: _fewer_calls(facts) and facts.difference.is_first,
        "the save was in the middle of an accumulation, whose gradients are lost",
    ),
    ("batch", lambda facts: facts.is_start, "the sampler's position is not restored: the data starts over"),
    (
        "batch",
        lambda facts: bool(facts.same_as) and min(facts.same_as) < facts.difference.step,
        "the position in the data is not restored: batches are seen again",
    ),
    ("batch", lambda facts: bool(facts.same_as), "the position in the data is too far: batches are skipped"),
    (
        "batch",
        lambda facts: bool(facts.compared.generators),
        "the order or augmentation of the data is drawn from a generator that is not restored ({generators})",
    ),
    (
        "batch",
        lambda facts: True,
        "the order of the data is not restored: a seed or epoch of the sampler (set_epoch)",
    ),
    ("loss", _power_of_two, "the scale of a GradScaler is not restored: the loss is {ratio} times as large"),
    (
        "loss",
        lambda facts: facts.draws,
        "the model draws random numbers (dropout) from a generator that is not restored ({generators})",
    ),
    (
        "loss",
        lambda facts: True,
        "a value of the script's own that the loss depends on, such as labels or a weight, is not restored",
    ),
    (
        "gradients",
        lambda facts: True,
        "accumulated gradients, clipping, scaling or their reduction between ranks differ",
    ),
    ("saved", _is_average, "the average of the weights (EMA) is not restored"),
    ("saved", lambda facts: True, "the script saves it and does not restore it"),
    ("steps", lambda facts: True, "the count of steps or epochs is not restored, or not what ends the loop"),
)
"""Likely causes, by the kind of the difference: the first whose condition holds."""


def describe(facts: Facts) -> str:
    """Return what differs, in one sentence: `step 9, rank 1: the batch is that of step 1`."""
    difference = facts.difference
    kind, names = KINDS[difference.kind], list(difference.names)
    where = f"step {difference.step}, rank {difference.rank}: "
    if difference.kind == "steps":
        return where + difference.text
    if difference.kind == "saved":
        held = f"{difference.text} holds another {listed(names, _NAMED)}"
        return f"after step {difference.step}, rank {difference.rank}: {held}"
    if difference.kind == "batch":
        if _fewer_calls(facts):
            return f"{where}the batch is smaller: some forward passes are missing"
        same = f"that of step {facts.same_as[0]}" if facts.same_as else "that of no step of the reference"
        return f"{where}the batch is {same}"
    values = ""
    if difference.kind in ("hyper", "loss", "modes"):
        pairs = [
            (facts.value(difference.actual, name), facts.value(difference.expected, name))
            for name in names[:1]
        ]
        if difference.kind == "loss":
            pairs = [(_float(one), _float(other)) for one, other in pairs]
        values = "".join(f": {_number(one)} instead of {_number(other)}" for one, other in pairs)
        if difference.kind == "loss":
            return f"{where}the loss is another one{values}"
    if facts.missing and len(facts.missing) == len(names):
        return f"{where}{kind} missing: {listed(names, _NAMED)} ({len(names)} of {facts.total})"
    count = "" if values else f" ({len(names)} of {facts.total})"
    verb = "differs" if difference.kind in ("moments", "modes") else "differ"
    return f"{where}{kind} {verb}: {listed(names, _NAMED)}{count}{values}"


def likely(facts: Facts) -> str:
    """Return the likely cause, in one sentence."""
    for kind, holds, sentence in _SIGNATURES:
        if kind == facts.difference.kind and holds(facts):
            same = facts.same_as[0] if facts.same_as else ""
            generators = " and ".join(facts.compared.generators)
            held = listed(list(facts.held_as), 2)
            ratio = f"{facts.ratio:g}"
            ranks = listed([*map(str, facts.compared.ranks)], 4)
            return sentence.format(same=same, generators=generators, held=held, ratio=ratio, ranks=ranks)
    return ""


def facts_of(compared: Compared, difference: Difference, stopped: Recording) -> Facts:
    """Look for the resumed values in the uninterrupted run and in the checkpoint."""
    kind, actual = difference.kind, difference.actual
    values = actual.parts.get(kind, {}) if actual else {}
    expected = difference.expected.parts.get(kind, {}) if difference.expected else {}
    wanted = {name: values.get(name) for name in difference.names}
    names = {**expected, **values}
    return Facts(
        compared,
        difference,
        same_as=[*_same(compared, difference, wanted)] if actual else [],
        missing=[name for name in difference.names if name not in values],
        total=len(names),
        held_as=[*_held(stopped, difference.rank, compared.loaded, wanted)] if kind == "weights" else [],
    )


def _same(compared: Compared, difference: Difference, wanted: Mapping[str, Any]) -> Iterator[int]:
    """Yield the steps that have these values, the nearest first, the start before all."""
    kind = difference.kind
    steps = compared.sequences.get(difference.rank, ())
    fitting = []
    for step in steps:
        have = step.parts.get(kind)
        if have is not None and wanted and all(have.get(name) == value for name, value in wanted.items()):
            fitting.append(step.at)
    if kind == "batch" and not fitting:
        entered = set(wanted.values())
        fitting = [step.at for step in steps if entered & {*step.parts.get(kind, {}).values()}]
    yield from sorted(set(fitting), key=lambda step: (step != 1, abs(step - difference.step)))


def _held(stopped: Recording, rank: int, loaded: int, wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names under which a checkpoint has these values."""
    for save in [save for at in stopped.ranks for save in stopped.saves(at) if save.done == loaded]:
        names = {value: name for name, value in save.content.items() if isinstance(value, int)}
        yield from (names[value] for value in wanted.values() if value in names)
        return


def _float(bits: Any) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0]) if isinstance(bits, int) else math.nan


def _number(value: object) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)
