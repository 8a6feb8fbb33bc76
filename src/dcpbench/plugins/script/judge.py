"""The verdict on a stop: does the resumed run continue as the uninterrupted one?"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from dcpbench.config.text import clipped, listed
from dcpbench.plugins.script.causes import describe, facts_of, likely
from dcpbench.plugins.script.compare import KINDS, Compared, Difference, Unequal, compare, unequal
from dcpbench.plugins.script.record import Recording, newest_complete
from dcpbench.plugins.script.run import Ended
from dcpbench.records import files

STATUS = {
    "exact": "pass",
    "diverges": "fail",
    "older": "fail",
    "torn": "fail",
    "refuses": "fail",
    "scratch": "fail",
    "hangs": "fail",
    "not_deterministic": "skip",
    "not_reached": "skip",
}
"""The status of a row, by its verdict."""
_RESTORED = ("weights", "frozen", "start_buffers", "moments")
_TAIL = 64 * 1024
_LAUNCHER = re.compile(r"^[WE]\d{4} .*torch/distributed/elastic")
_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit|Interrupt)\b")


@dataclass(frozen=True)
class Verdict:
    """The verdict on a stop.

    Args:
        word: one of `STATUS`.
        reason: what happened, in a sentence; of an exact resume too.
        loaded, newest: the steps after which the loaded, and the newest complete checkpoint were saved.
        step, kind, name: of the first difference.
        last: the last step that was compared.
    """

    word: str
    reason: str
    cause: str = ""
    loaded: int | None = None
    newest: int | None = None
    step: int | None = None
    kind: str | None = None
    name: str | None = None
    rank: int | None = None
    last: int | None = None
    hints: Sequence[str] = ()

    @property
    def status(self) -> str:
        """The status of its row."""
        return STATUS[self.word]


def judge(
    reference: Recording, stopped: Ended, resumed: Ended | None, second: Callable[[int], Recording]
) -> Verdict:
    """Judge a stop, after which the run was resumed.

    Args:
        resumed: None if the stop did not happen.
        second: returns another uninterrupted run, of at least so many steps.
    """
    stop = stopped.recording.stop
    if stop is None or resumed is None:
        how = "ran too long" if stopped.status is None else f"ended with exit status {stopped.status}"
        return Verdict("not_reached", f"the run {how} before this stop")
    cut = str(stop.get("path") or "")
    newest = newest_complete(reference.disk, stopped.recording, cut)
    after = f"; complete: step {newest}" if newest is not None else "; no checkpoint was complete"
    if not resumed.recording.ranks:
        if resumed.status is None:
            return Verdict("hangs", f"made no step in {resumed.seconds:.0f} s{after}", newest=newest)
        if resumed.status:
            message = error_line(resumed.log)
            cause = _refusal(stopped.recording, resumed.recording, newest, cut)
            reason = f"does not start: exit status {resumed.status}: {message}{after}"
            return Verdict("refuses", reason, cause, newest=newest)
        if newest == reference.length:
            return Verdict("not_reached", "nothing was left to do: the last step was saved", newest=newest)
        reason = f"ends without a step{after}"
        return Verdict("diverges", reason, newest=newest, step=(newest or 0) + 1, kind="steps")
    return _of_steps(reference, stopped.recording, resumed, cut, second)


def _of_steps(
    reference: Recording, stopped: Recording, resumed: Ended, cut: str, second: Callable[[int], Recording]
) -> Verdict:
    """Judge a resumed run that made steps."""
    ended_well = resumed.status == 0
    others, values = unequal(reference, stopped)
    compared = compare(reference, stopped, resumed.recording, cut, ended_well, {}, values)
    is_unequal = False
    if compared.difference and compared.difference.kind != "steps":
        more, more_values = unequal(reference, second(compared.difference.step))
        others = {**more, **{kind: min(step, more.get(kind, step)) for kind, step in others.items()}}
        compared = compare(
            reference, stopped, resumed.recording, cut, ended_well, others, values | more_values
        )
        is_unequal = compared.difference is None
    difference = compared.difference
    last = compared.loaded + compared.compared_steps
    verdict = Verdict(
        "exact", "", loaded=compared.loaded, newest=compared.newest,
        last=compared.loaded + compared.compared_steps, hints=[*_hints(compared), *_failed_late(resumed)],
    )  # fmt: skip
    if resumed.status is None and (difference is None or difference.kind == "steps"):
        return replace(verdict, word="hangs", reason=f"hangs after step {last}", step=last + 1, kind="steps")
    text = cause = ""
    if difference:
        facts = facts_of(compared, difference, stopped)
        text, cause = describe(facts), likely(facts)
        if difference.kind == "steps" and not ended_well:
            text += f" (exit status {resumed.status}: {error_line(resumed.log)})"
            cause = ""
        name = next(iter(difference.names), None)
        verdict = replace(
            verdict, step=difference.step, kind=difference.kind, name=name, rank=difference.rank
        )
    if compared.newest is not None and compared.loaded < compared.newest:
        missed = Difference(compared.loaded + 1, 0, "checkpoint", [])
        then = f"; then {text}" if difference else ""
        cause = likely(facts_of(compared, missed, stopped))
        verdict = replace(verdict, step=missed.step, kind="checkpoint", cause=cause)
        if compared.is_scratch:
            reason = f"starts over, though step {compared.newest} was complete"
            cause = _scratch(resumed.recording)
            return replace(verdict, word="scratch", reason=reason, cause=cause)
        places = f" ({listed(list(compared.loaded_paths), 2)})" if compared.loaded_paths else ""
        reason = f"takes step {compared.loaded}{places}, though step {compared.newest} was complete{then}"
        return replace(verdict, word="older", reason=reason)
    if difference is None:
        return _equal(verdict, others if is_unequal else {})
    torn = _torn_paths(stopped, resumed.recording, compared, cut)
    if difference.is_first and difference.kind in _RESTORED and torn:
        cause = "a checkpoint is used before all of it is written: publish it last, by renaming it"
        reason = f"takes a checkpoint that is not complete ({listed(torn, 2)}): {text}"
        return replace(verdict, word="torn", reason=reason, cause=cause)
    return replace(verdict, word="diverges", reason=text, cause=cause)


def _equal(verdict: Verdict, others: Unequal) -> Verdict:
    """Return the verdict where nothing can be blamed on the resume."""
    if others:
        kind = min(others, key=lambda one: (others[one], [*KINDS].index(one)))
        still = listed(
            [text for name, text in KINDS.items() if name in ("batch", "hyper") and name not in others], 2
        )
        reason = f"two uninterrupted runs differ from step {others[kind]} on ({KINDS[kind]})"
        return replace(
            verdict, word="not_deterministic", reason=f"{reason}; compared: what was restored, {still}"
        )
    start = f"from step {verdict.loaded}" if verdict.loaded else "from the start: no checkpoint was complete"
    first = (verdict.loaded or 0) + 1
    steps = f"steps {first} to {verdict.last} are" if (verdict.last or 0) > first else f"step {first} is"
    return replace(verdict, reason=f"{start}; {steps} equal")


def _hints(compared: Compared) -> list[str]:
    if not compared.generators or compared.difference:
        return []
    names = " and ".join(compared.generators)
    return [f"differ after the load, without an effect here: generators of {names}"]


def _failed_late(resumed: Ended) -> list[str]:
    """Report a failure after the last step: it changes no state that was saved."""
    if not resumed.status:
        return []
    return [f"the resumed command ended with exit status {resumed.status}: {error_line(resumed.log)}"]


def _torn_paths(stopped: Recording, resumed: Recording, compared: Compared, cut: str) -> list[str]:
    loaded, read = resumed.paths_read()
    newest = compared.newest or 0
    steps = {path: stopped.disk.step_of(path) or 0 for path in loaded or read}
    return [path for path, step in steps.items() if step > newest or path == cut]


def _refusal(stopped: Recording, resumed: Recording, newest: int | None, cut: str) -> str:
    loaded, read = resumed.paths_read()
    torn = [
        path
        for path in dict.fromkeys([*loaded, *read])
        if cut and (path == cut or cut.startswith(f"{path}/"))
    ]
    # A missing file counts as one of its folder.
    places = [place for path in (*loaded, *read) for place in (path, path.rpartition("/")[0]) if place]
    newer = [place for place in places if (stopped.disk.step_of(place) or 0) > (newest or 0)]
    if torn or newer:
        place = (torn or newer)[0]
        instead = f"; step {newest} was complete" if newest is not None else ""
        return f"it reads {place}, which is not complete{instead}: publish a checkpoint last, by renaming it"
    return ""


def _scratch(resumed: Recording) -> str:
    loaded, read = resumed.paths_read()
    if paths := loaded or read:
        return f"it reads {paths[0]}, and uses none of it"
    return "no checkpoint is read: it is looked for elsewhere, or an option is missing (--resume-args)"


def error_line(log: Path) -> str:
    """Return the line of a log that names the error."""
    # torchrun reports after the error of the rank.
    lines = [*takewhile(lambda line: not _LAUNCHER.match(line), filter(str.strip, tail(log)))]
    of_rank = [re.sub(r"^\[rank\d+\]:\s*", "", line) for line in lines]
    errors = [line for line in of_rank if _ERROR.match(line)]
    return clipped((errors or of_rank or ["it printed nothing"])[-1].strip(), 200)


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    with files.open_regular(log) as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        return file.read().decode(errors="replace").splitlines()[-200:]
