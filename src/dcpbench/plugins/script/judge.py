"""The verdict on a stop, whose texts are those of `kinds.yaml`."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcpbench.analysis.causes import likely_cause
from dcpbench.config.text import listed
from dcpbench.plugins.script.checkpoints import Named, folded
from dcpbench.plugins.script.compare import (
    COMPUTED,
    HINT,
    KINDS,
    LOADED,
    Difference,
    ResumeComparison,
    Stopped,
    family,
    first_noise,
)
from dcpbench.plugins.script.record import RecordedRun, number

STATUS = {
    **dict.fromkeys(("exact", "restored"), "pass"),
    **dict.fromkeys(("diverges", "older", "torn", "refuses", "scratch", "hangs"), "fail"),
    **dict.fromkeys(("vacuous", "not_reached"), "skip"),
}
"""The status of a row, by its verdict."""
_CLOSE = 1e-5
"""Relative difference of losses that the order of a sum can make."""
_AVERAGES = ("ema", "average", "avg_model", "swa_model", "shadow", "teacher")
"""Parts of the names that averages of weights have."""


@dataclass(frozen=True)
class StopVerdict:
    """The verdict on a stop: one of `STATUS`, what happened, in a sentence, the likely cause, the steps after
    which the loaded and the newest complete checkpoint were saved, the first difference, all of its step, and
    how many values of each kind were compared."""

    word: str
    reason: str
    cause: str = ""
    loaded: int | None = None
    newest: int | None = None
    first: Difference | None = None
    differing: Sequence[Difference] = ()
    compared: dict[str, int] = field(default_factory=dict)


def judge(
    stopped: Stopped,
    resumed: RecordedRun,
    second: Callable[[], RecordedRun],
    reference: Callable[[], RecordedRun],
    words: Collection[str] = (),
    is_given: bool = False,
) -> StopVerdict:
    """Judge the resume of a stopped run.

    Args:
        second: makes a second resume of the untouched copy.
        reference: makes an uninterrupted run in addition to the expected one.
        words: words of the command and of its resume that name paths.
        is_given: whether dcpbench chose the checkpoint, so that the choice is not judged.
    """
    if resumed.of_kind("harm"):
        return StopVerdict("vacuous", f"the resume was {resumed.failure}")
    if resumed.ranks:
        verdict = _of_steps(ResumeComparison(stopped, resumed), second, reference, words, is_given)
    else:
        verdict = _without_steps(stopped, resumed)
    broken = [*dict.fromkeys([*stopped.run.broken, *resumed.broken])]
    if not broken:
        return verdict
    reason = f"{verdict.reason}; the recorder failed: {listed(broken)}"
    return replace(verdict, word="vacuous" if STATUS[verdict.word] == "fail" else verdict.word, reason=reason)


def _without_steps(stopped: Stopped, resumed: RecordedRun) -> StopVerdict:
    """Judge a resumed run that made no step."""
    read = resumed.paths_read()
    chosen = family(stopped, read)
    newest = chosen.newest
    incomplete = [member for member in chosen.members if member.missing and member.date > (newest or 0)]
    after = f"; complete: step {newest}" if newest is not None else "; no checkpoint was complete"
    if resumed.status is None:
        return StopVerdict("hangs", f"makes no step{after}", newest=newest)
    if resumed.status:
        torn = [member.missing for member in incomplete if member.opened]
        loads = {event["path"] for event in resumed.of_kind("load")}
        torn += [f"{path} is cut" for path in chosen.cut if path in loads]  # under a temporary name
        cause = KINDS["checkpoint"]["torn"].format(torn[0]) if torn else ""
        return StopVerdict("refuses", f"does not start: {resumed.failure}{after}", cause, newest=newest)
    if newest == stopped.expected.length or chosen.of(stopped.expected.length).opened:
        return StopVerdict("not_reached", "nothing was left to do: the last step was saved", newest=newest)
    first = Difference((newest or 0) + 1, 0, "steps")
    return StopVerdict("diverges", f"ends without a step{after}", newest=newest, first=first)


def _of_steps(
    compared: ResumeComparison,
    second: Callable[[], RecordedRun],
    reference: Callable[[], RecordedRun],
    words: Collection[str],
    is_given: bool,
) -> StopVerdict:
    """Judge a resumed run that made steps."""
    resumed = compared.resumed
    loaded, last, chosen, kinds = compared.loaded, compared.last, compared.family, compared.kinds()
    failure = "; dcpbench chose the checkpoint" if is_given else ""
    failure += f"; fails after its last step: {resumed.failure}" if resumed.status else ""

    def verdict(
        word: str, reason: str, cause: str = "", first: str = "", differing: Sequence[Difference] = ()
    ) -> StopVerdict:
        step = (last if first == "steps" else loaded) + 1
        difference = Difference(step, 0, first) if first else next(iter(differing), None)
        newest = chosen.newest
        return StopVerdict(word, reason + failure, cause, loaded, newest, difference, differing, kinds)

    start = f"from step {loaded}" if loaded else "from the start: no checkpoint was complete"
    equal = f"steps {loaded + 1} to {last} are equal" if last > loaded else "no step was compared"
    if loaded < chosen.lost:
        reason = f"takes step {loaded}" if loaded else "trains from the start"
        reason += f": the complete checkpoint of step {chosen.lost} was removed"
        cause = KINDS["checkpoint"]["lost" if chosen.newest is None else "pruned"]
        return verdict("older" if loaded else "scratch", reason, cause, "checkpoint")
    is_older = compared.newest is not None and loaded < compared.newest and not (loaded and is_given)
    differences, noise = _blamed(compared, second, reference) if loaded or not is_older else ([], "")
    if is_older:
        reason, cause = _explained(compared, [Difference(loaded + 1, 0, "checkpoint")], words)
        reason += f"; then {_explained(compared, differences, words)[0]}" if differences else ""
        return verdict("older" if loaded else "scratch", reason, cause, "checkpoint", differences)
    if error := _failed_to_save(compared):
        reason = f"takes step {loaded}: SIGTERM was handled, but no save followed: {error}"
        cause = KINDS["checkpoint"]["workers"] if "DataLoader worker" in error else ""
        return verdict("older", reason, cause, "checkpoint")
    if resumed.status is None and all(difference.kind == "steps" for difference in differences):
        return verdict("hangs", f"hangs after step {last}", first="steps")
    if differences:
        reason, cause = _explained(compared, differences, words)
        missing = chosen.of(loaded).missing
        if not missing or loaded <= (chosen.newest or 0) or not compared.loaded_paths:
            return verdict("diverges", reason, cause, differing=differences)
        reason = f"takes step {loaded}, which is not complete ({missing}): {reason}"
        return verdict("torn", reason, KINDS["checkpoint"]["torn"].format(missing), differing=differences)
    if nothing := _powerless(compared, kinds):
        return verdict("vacuous", f"{start}; {equal}, but {nothing}")
    counts = _counts(compared, kinds)
    if noise:
        return verdict("restored", f"{start}; {noise}; {counts}")
    return verdict("exact", f"{start}; {equal}: {counts}")


def _blamed(
    compared: ResumeComparison, second: Callable[[], RecordedRun], reference: Callable[[], RecordedRun]
) -> tuple[list[Difference], str]:
    """Return the first differences that are the resume's fault, of each rank that has them; and why the rest
    is not, in words, if the computation does not repeat.

    Differences that a second resume of the same files has too are the resume's fault. So are all of them if
    two uninterrupted runs are equal. What is computed after the first step that does not repeat is left out.
    """
    whole, loaded = compared.stopped.whole, compared.loaded
    found = [*compared.differences(), *(() if whole else _not_saved(compared))]
    found.sort(key=lambda difference: difference.place)
    if not found and whole:
        return [], ""
    is_loaded = bool(found) and found[0].kind in LOADED
    if whole and is_loaded and not loaded and not compared.newest:
        repeated = first_noise(reference(), whole)
        if repeated and repeated.step == 1 and repeated.kind in LOADED:
            return [], "the run is not seeded, and begins with other weights each time"
    if is_loaded and found[0].step == loaded + 1:
        return _first(found), ""
    if whole:
        repeated = first_noise(reference(), whole)
        if repeated is None:
            return _first(_repeating(found, reference(), whole)), ""
    other = second()
    between = first_noise(compared.resumed, other, loaded)
    differences = ResumeComparison(compared.stopped, other).differences()
    again = {(difference.place, difference.rank): difference.actual for difference in differences}
    faults = []
    for difference in _repeating(found, compared.resumed, other):
        values = again.get((difference.place, difference.rank))
        if between is None or difference.place < between.place:
            faults.append(difference)
        elif difference.kind not in COMPUTED and values is not None:
            faults.append(difference if values == difference.actual else replace(difference, text="random"))
        elif difference.kind == "saved" and _whole_numbers(difference):
            faults.append(difference)
    is_random = between is not None and _is_random(between)
    if faults and not (between and is_random and between.place < faults[0].place):
        return _first(faults), ""
    if between is None:
        differ = "uninterrupted runs differ before this stop, two resumes are equal"
        return [], "" if whole else differ
    if is_random:  # in the first step that it changes
        of = f" (generator of {' and '.join(between.names)})" if between.kind == HINT else ""
        return [replace(found[0] if found else between, text=f"random{of}")], ""
    if whole and not (repeated and (repeated.step == 1 or repeated.kind == between.kind)):
        return _first(found), ""
    name = KINDS[between.kind]["name"]
    return [], f"from step {between.step} on two resumes differ ({name}), as two uninterrupted runs do"


def _not_saved(compared: ResumeComparison) -> list[Difference]:
    """Return the state at the first resumed step that the loaded checkpoint does not contain, for a run that
    ended with it. A kind none of whose values is there is saved in another form, and not compared."""
    found = []
    saved = compared.saved
    for rank, steps in compared.actual.items():
        for kind in ("weights", "moments") if compared.last == compared.loaded else ():
            parts = {
                name: value
                for name, value in steps[0]["parts"].get(kind, {}).items()
                if isinstance(value, int)
            }
            names = [name for name, value in parts.items() if value not in saved]
            if names and len(names) < len(parts):
                found.append(Difference(compared.loaded + 1, rank, kind, names, {}, parts))
            elif parts and not names:
                compared.restored.add(kind)
    return found


def _first(differences: Sequence[Difference]) -> list[Difference]:
    """Return the first differences, and those of the same step that follow."""
    return [difference for difference in differences if difference.step == differences[0].step]


def _is_random(noise: Difference) -> bool:
    """Tell whether resumes differ in what is drawn, not in how it is computed."""
    if noise.kind == "loss":
        pairs = zip(noise.expected.values(), noise.actual.values(), strict=False)
        return not all(math.isclose(float(one), float(other), rel_tol=_CLOSE) for one, other in pairs)
    return noise.kind not in COMPUTED


def _repeating(differences: Sequence[Difference], some: RecordedRun, others: RecordedRun) -> list[Difference]:
    """Return the differences without saved values in which two runs of the same differ."""
    noise = set()
    for rank in some.ranks.keys() & others.ranks.keys():
        contents = others.contents(rank)
        for key, content in some.contents(rank).items():
            other = contents.get(key, content)
            noise |= {name for name in {**content, **other} if content.get(name) != other.get(name)}
    left = []
    for difference in differences:
        names = [name for name in difference.names if difference.kind != "saved" or name not in noise]
        if names or difference.kind != "saved":
            left.append(replace(difference, names=names))
    return left


def _whole_numbers(difference: Difference) -> bool:
    """Tell whether only whole numbers of the script differ in what is saved."""
    values = [str(difference.actual.get(name, difference.expected.get(name))) for name in difference.names]
    return all(value.startswith("=") and value[1:].lstrip("-").isdigit() for value in values)


def _failed_to_save(compared: ResumeComparison) -> str:
    """Return the exception that ended a rank after SIGTERM, for which it has a handler, if the checkpoint
    taken was written before the signal; empty without."""
    signalled = compared.stopped.copy.event["t"]
    versions = compared.family.of(compared.loaded).versions
    taken = [place.begins for version in versions for place in version.places]
    failed = compared.stopped.run.of_kind("failed")
    return str(failed[0]["error"]) if failed and max(taken, default=0.0) < signalled else ""


def _powerless(compared: ResumeComparison, kinds: Named) -> str:
    """Return why equal steps prove nothing; empty if they could have differed."""
    if compared.last == compared.loaded and not compared.restored:
        return "there is no step to compare"
    run = compared.stopped.frozen
    saves_state = any(value in run.state for save in run.disk.saves for value in save.content.values())
    if not compared.loaded and compared.newest is None and not saves_state:
        return "no save of the state was recorded: a checkpoint that is ignored would not show"
    if compared.last > compared.loaded and not kinds.get("batch") and not kinds.get("loss"):
        return "neither batch nor loss was recorded"
    counts = [sum(bool(step["parts"].get("weights")) for step in steps) for steps in compared.actual.values()]
    if max(counts) > 1 and compared.changes("weights") == 1:
        return "the weights change in none of them"
    return ""


def _counts(compared: ResumeComparison, kinds: Named) -> str:
    """Say what was compared."""
    texts = [f"{KINDS[kind]['name']} {kinds[kind]}" for kind in ("weights", "moments") if kinds.get(kind)]
    if compared.last == compared.loaded:
        return f"as saved: {listed([KINDS[kind]['name'] for kind in sorted(compared.restored)])}"
    for kind in ("buffers", "batch", "loss"):
        texts.append(KINDS[kind]["name"].removeprefix("the ") if kinds.get(kind) else f"no {kind}")
    if kinds.get("batch") and compared.last > compared.loaded + 1 and compared.changes("batch") == 1:
        texts.append("the batch is the same in each step: a lost position would not show")
    return ", ".join(texts)


def _explained(
    compared: ResumeComparison, differences: Sequence[Difference], words: Collection[str]
) -> tuple[str, str]:
    """Return what differs at a step, the first in causal order, in a sentence, and its likely cause."""
    difference, kind = differences[0], differences[0].kind
    same_kind = [of_rank for of_rank in differences if of_rank.place == difference.place]
    names, ranks = difference.names, [*dict.fromkeys(str(of_rank.rank) for of_rank in same_kind)]
    expected, actual = difference.expected, difference.actual
    missing = [name for name in names if name not in actual]
    differing = {name: actual[name] for name in names if name in actual}
    is_known = differing and (not missing or kind == "batch")
    same = _steps_with(compared, difference, differing) if is_known else []
    pair: list[Any] = [of.get(names[0]) if names else None for of in (actual, expected)]
    ratio = float(pair[0]) / float(pair[1]) if kind == "loss" and all(pair) else math.nan
    total = len({**expected, **actual})
    part = _right_inputs(compared, difference)
    first = difference.step == compared.loaded + 1
    drawn = compared.drawn_in(difference.step) if kind == "loss" else compared.generators
    generators = [name for name in drawn if name not in compared.restored_generators]
    generators_of = (compared.rank_with(difference.rank, HINT, [name]) for name in drawn)
    named = [word for word in words for path in compared.loaded_paths if _names(word, path)]
    taken = [*compared.loaded_paths[:1]]
    complete = [
        version for member in compared.family.members if not member.missing for version in member.versions
    ]
    numbered = {path for version in complete for path in version.paths_at(compared.stopped.copy.time)
                if folded(path) in map(folded, taken)}  # fmt: skip
    imported = compared.resumed.about.get("frameworks", ())
    framework = next((name for name in imported if name in KINDS["checkpoint"]["frameworks"]), "")
    # Words of the texts, and signs, which hold where they are not empty; what was compared has more of them.
    facts: dict[str, Any] = (
        vars(compared)
        | {
            "any": True,
            "first": first,
            "names": listed(names),
            "count": len(names),
            "total": total,
            "all": len(names) == total,
            "differ": "missing" if len(missing) == len(names) else "differ",
            "missing": bool(missing),
            "none": len(missing) == total,
            "actual": pair[0],
            "expected": pair[1],
            "ratio": ratio,
            "scaled": ratio != 1 and math.frexp(abs(ratio))[0] == 0.5,  # by a power of two
            "ranks": listed(ranks),
            "some_ranks": len(ranks) < len(compared.steps),
            "same": f"step {same[0]}" if same else "",
            "part": bool(part),
            "batch": part or (f"step {same[0]}" if same else "no step of the reference"),
            "start": 1 in same,  # the values of a run that has just begun
            "past": any(step < difference.step for step in same),
            "twice": first and same[:1] == [difference.step - 1],
            "skipped": first and same[:1] == [difference.step + 1],
            "rank": difference.rank,
            "near": any(abs(step - difference.step) == 1 for step in same),
            "held": listed(
                [compared.saved[value] for value in differing.values() if value in compared.saved], 2
            ),
            # The checkpoint has none of the expected values.
            "lacks": not any(expected.get(name) in compared.saved for name in names),
            "generators": " and ".join(generators),
            "restored": " and ".join(sorted({*drawn} - {*generators})),
            "of_rank": compared.rank_with(difference.rank, kind, names) if first else "",
            "generator_of": next(filter(None, generators_of), ""),
            "lr": any(name.endswith((" lr", " initial_lr")) for name in names),
            "fewer": len(actual) < len(expected) and {*actual.values()} <= {*expected.values()},
            "average": any(part in name.lower() for name in (difference.text, *names) for part in _AVERAGES),
            "text": difference.text,
            "well": not compared.resumed.status,
            "loaded_paths": listed(compared.loaded_paths, 2) or "nothing",
            "read": listed(compared.paths_read, 1),
            "framework": "" if compared.loaded or compared.paths_read else framework,
            "framework_words": KINDS["checkpoint"]["frameworks"].get(framework, ""),
            "named": named[0] if named else "",
            "sorted_as_text": len(numbered) > 1 and [max(numbered)] == taken,
            # A thread saved what the steps changed meanwhile: its count of steps is an earlier one.
            "aliased": any(save.by_thread for save in compared.loaded_saves)
            and any(f"={step - 1}" in compared.saved and 1 < step <= compared.loaded for step in same),
        }
    )
    where = f"step {difference.step}, rank {difference.rank}"
    has_several = any(step["optimizer"] for step in compared.actual.get(difference.rank, ()))
    if difference.optimizer < math.inf and has_several:
        where += f", optimizer {difference.optimizer + 1:g}"
    where = "" if kind == "checkpoint" else f"{where}: "
    if difference.text.startswith("random"):
        of = difference.text.removeprefix("random")
        text = f"{where}{KINDS[kind]['name']} is another one in each resume"
        return text, KINDS[HINT]["random" if of else "other"].format(of)
    when = "after " if kind == "saved" else ""
    of_step = dict.fromkeys(of.kind for of in differences if of.optimizer == difference.optimizer)
    also = [KINDS[other]["name"] for other in of_step
            if other != kind and other not in ("loss", "gradients", "saved", "steps")]  # fmt: skip
    also += [f"generator of {name}" for name in generators] if first and kind in LOADED else []
    beside = f"; also: {', '.join(also)}" if also else ""
    lost = compared.lost_samples() if kind == "batch" and first and not part else ""
    text = when + where + KINDS[kind]["text"].format(**facts) + lost + beside
    return text, likely_cause(KINDS[kind]["likely"], facts)


def _names(word: str, path: str) -> bool:
    """Tell whether a word of the command ends with the path of a file, or of a folder that it is in."""
    parts = path.split("/")
    return any(f"/{word}".endswith(f"/{'/'.join(parts[:end])}") for end in range(1, len(parts) + 1))


def _steps_with(compared: ResumeComparison, difference: Difference, values: Named) -> list[int]:
    """Return the steps that have these values, the nearest first, the start before all."""
    steps = compared.steps[difference.rank]
    fitting = {
        number(step) for step in steps if values.items() <= step["parts"].get(difference.kind, {}).items()
    }
    if difference.kind == "batch" and not fitting:  # a part of it
        entered = {*values.values()}
        fitting = {number(step) for step in steps if entered & {*step["parts"]["batch"].values()}}
    return sorted(fitting - {difference.step}, key=lambda step: (step != 1, abs(step - difference.step)))


def _right_inputs(compared: ResumeComparison, difference: Difference) -> str:
    """Return how many inputs, up to the first call that differs, are those of the step, if one is that no
    other step has; else empty."""
    if difference.kind != "batch":
        return ""
    expected, steps = difference.expected, compared.steps[difference.rank]

    def call_of(name: str) -> tuple[int, str]:
        call = name.partition(".")[0]
        return len(call), call  # `call 10` comes after `call 9`

    call = min(map(call_of, difference.names))
    inputs = {name: value for name, value in expected.items() if call_of(name) <= call}
    right = [value for name, value in inputs.items() if difference.actual.get(name) == value]
    elsewhere = (step["parts"]["batch"].values() for step in steps if number(step) != difference.step)
    if not {*right}.difference(*elsewhere):
        return ""
    return f"step {difference.step} in {len(right)} of its {len(inputs)} tensors"
