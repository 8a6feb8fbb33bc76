"""Describe a difference in words, and name its likely cause: a table of signatures in `causes.yaml`."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from dcpbench.config.text import listed
from dcpbench.plugins.script.compare import KINDS, Compared, Difference
from dcpbench.plugins.script.record import Recording, Step

_NAMED = 3
_AVERAGES = ("ema", "average", "avg_model", "swa", "shadow", "teacher")
"""Parts of the names that averages of weights have."""
_CAUSES: dict[str, dict[str, str]] = yaml.safe_load(
    files("dcpbench.plugins.script").joinpath("causes.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Facts:
    """The facts about a difference.

    Args:
        ranks: those that have it.
        same_as: the steps of the uninterrupted run that have the resumed values, the nearest first.
        missing: names that the resumed run does not have at all.
        total: how many names of the kind there are.
        held_as: names under which the checkpoint has the resumed values.
    """

    compared: Compared
    difference: Difference
    ranks: Sequence[int]
    same_as: Sequence[int]
    missing: Sequence[str]
    total: int
    held_as: Sequence[str]

    def values(self, name: str) -> tuple[Any, Any]:
        """Return the resumed and the expected value of a name; a loss as a number."""
        actual, expected = (
            _parts(of, self.difference.kind).get(name)
            for of in (self.difference.actual, self.difference.expected)
        )
        return (_float(actual), _float(expected)) if self.difference.kind == "loss" else (actual, expected)

    @property
    def ratio(self) -> float:
        """The resumed loss divided by the expected one; NaN if there is none."""
        if self.difference.kind != "loss":
            return math.nan
        actual, expected = self.values(self.difference.names[0])
        return actual / expected if expected else math.nan


def describe(facts: Facts) -> str:
    """Return what differs, in one sentence: `step 9, rank 1: the batch is that of step 1`."""
    difference = facts.difference
    kind, names = KINDS[difference.kind], listed(list(difference.names), _NAMED)
    where = f"step {difference.step}, rank {difference.rank}: "
    if difference.kind == "steps":
        return where + difference.text
    if difference.kind == "saved":
        return f"after {where}{difference.text} holds another {names}"
    if difference.kind == "batch":
        same = f"step {facts.same_as[0]}" if facts.same_as else "no step of the reference"
        return f"{where}the batch is that of {same}"
    count = f" ({len(difference.names)} of {facts.total})"
    if difference.kind in ("hyper", "loss", "modes"):
        actual, expected = map(_number, facts.values(difference.names[0]))
        count = f": {actual} instead of {expected}"
    if difference.kind == "loss":
        return f"{where}the loss is another one{count}"
    if len(facts.missing) == len(difference.names):
        return f"{where}{kind} missing: {names}{count}"
    verb = "differs" if difference.kind in ("moments", "modes") else "differ"
    return f"{where}{kind} {verb}: {names}{count}"


def likely(facts: Facts) -> str:
    """Return the likely cause, in one sentence."""
    held = {name for name, holds in _signs(facts).items() if holds}
    for signs, sentence in _CAUSES.get(facts.difference.kind, {}).items():
        if held.issuperset(signs.split()):
            return sentence.format(
                same=next(iter(facts.same_as), ""),
                generators=" and ".join(facts.compared.generators),
                held=listed(list(facts.held_as), 2),
                ratio=facts.ratio,
                ranks=listed([*map(str, facts.ranks)], 4),
            )
    return ""


def _signs(facts: Facts) -> dict[str, bool]:
    """Return the signs that `causes.yaml` names, and whether each holds."""
    compared, difference, same = facts.compared, facts.difference, facts.same_as
    newest, loaded = str(compared.newest), str(compared.loaded)
    calls, expected_calls = (
        {name.partition(".")[0] for name in _parts(of, "batch")}
        for of in (difference.actual, difference.expected)
    )
    return {
        "any": True,
        "first": difference.is_first,
        "later": not difference.is_first,
        "all": len(difference.names) == facts.total,
        "some_ranks": len(facts.ranks) < len(compared.sequences),
        "known": bool(same),
        "start": 1 in same,  # the values of a run that has just begun
        "past": any(step < difference.step for step in same),
        "near": any(abs(step - difference.step) == 1 for step in same),
        "held": bool(facts.held_as),
        "missing": bool(facts.missing),
        "none": len(facts.missing) == facts.total,
        "new": difference.kind == "moments" and _is_new(facts),
        "lr": all(name.endswith((" lr", " initial_lr")) for name in difference.names),
        "fewer_calls": len(calls) < len(expected_calls),
        "generators": bool(compared.generators),
        "draws": not {"torch", "CUDA"}.isdisjoint(compared.generators),
        "scaled": facts.ratio != 1 and math.frexp(abs(facts.ratio))[0] == 0.5,  # by a power of two
        "average": any(part in name.lower() for name in difference.names for part in _AVERAGES),
        "sorted_as_text": loaded > newest and len(loaded) < len(newest),
    }


def _is_new(facts: Facts) -> bool:
    """Tell whether several entries of each parameter are equal: zeros, as in a new optimizer."""
    entries: dict[str, list[Any]] = {}
    for name in facts.difference.names:
        parameter, _, entry = name.rpartition(".")
        if entry != "step":
            entries.setdefault(parameter, []).append(facts.values(name)[0])
    return bool(entries) and all(len(of) > 1 == len({*of}) for of in entries.values())


def facts_of(compared: Compared, differences: Sequence[Difference], stopped: Recording) -> Facts:
    """Look for the resumed values in the uninterrupted run and in the checkpoint. The differences are the
    same one, of several ranks."""
    difference = differences[0]
    values = _parts(difference.actual, difference.kind)
    wanted = {name: values.get(name) for name in difference.names}
    return Facts(
        compared,
        difference,
        ranks=[of_rank.rank for of_rank in differences],
        same_as=_same(compared, difference, wanted) if difference.actual else [],
        missing=[name for name in difference.names if name not in values],
        total=len({**_parts(difference.expected, difference.kind), **values}),
        held_as=_held(stopped, compared.loaded, wanted) if difference.kind == "weights" else [],
    )


def _same(compared: Compared, difference: Difference, wanted: Mapping[str, Any]) -> list[int]:
    """Return the steps that have these values, the nearest first, the start before all."""
    steps = compared.sequences.get(difference.rank, ())
    fitting = {step.at for step in steps if wanted.items() <= _parts(step, difference.kind).items()}
    if difference.kind == "batch" and not fitting:  # a part of it
        entered = {*wanted.values()}
        fitting = {step.at for step in steps if entered & {*_parts(step, "batch").values()}}
    return sorted(fitting, key=lambda step: (step != 1, abs(step - difference.step)))


def _held(stopped: Recording, loaded: int, wanted: Mapping[str, Any]) -> list[str]:
    """Return the names under which a checkpoint has these values."""
    saves = [stopped.saves(rank) for rank in stopped.ranks]
    contents = [content for of_rank in saves for (done, _), content in of_rank.items() if done == loaded]
    names = {value: name for name, value in contents[0].items()} if contents else {}
    return [names[value] for value in wanted.values() if value in names]


def _parts(step: Step | None, kind: str) -> Mapping[str, Any]:
    return step.parts.get(kind, {}) if step else {}


def _float(bits: Any) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0]) if isinstance(bits, int) else math.nan


def _number(value: object) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)
