"""The verdict on a stop: does the resumed run continue as the uninterrupted one?"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from dcpbench.config.text import clipped, listed
from dcpbench.plugins.script.causes import describe, facts_of, likely
from dcpbench.plugins.script.compare import KINDS, ORDER, Compared, Difference, Unequal
from dcpbench.plugins.script.record import Recording, is_in, newest_complete
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
_INCOMPLETE = "it reads {}, which is not complete: publish a checkpoint last, by renaming it"
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
    if resumed.recording.ranks:
        return _of_steps(reference, stopped.recording, resumed, cut, second)
    newest = newest_complete(reference.disk, stopped.recording, cut)
    after = f"; complete: step {newest}" if newest is not None else "; no checkpoint was complete"
    if resumed.status is None:
        return Verdict("hangs", f"made no step in {resumed.seconds:.0f} s{after}", newest=newest)
    if resumed.status:
        reason = f"does not start: exit status {resumed.status}: {error_line(resumed.log)}{after}"
        paths = [path for paths in resumed.recording.paths_read() for path in paths]
        torn = _incomplete(stopped.recording, paths, newest, cut)
        cause = _INCOMPLETE.format(torn[0]) if torn else ""
        return Verdict("refuses", reason, cause, newest=newest)
    if newest == reference.length:
        return Verdict("not_reached", "nothing was left to do: the last step was saved", newest=newest)
    reason = f"ends without a step{after}"
    return Verdict("diverges", reason, newest=newest, step=(newest or 0) + 1, kind="steps")


def _of_steps(
    reference: Recording, stopped: Recording, resumed: Ended, cut: str, second: Callable[[int], Recording]
) -> Verdict:
    """Judge a resumed run that made steps."""
    compared = Compared(reference, stopped, resumed.recording, cut, resumed.status == 0)
    unequal = Unequal.of(reference, stopped)
    differences = compared.first(unequal)
    is_noise = False
    if differences and differences[0].kind != "steps":
        unequal = Unequal.of(reference, stopped, second(differences[0].step))
        differences = compared.first(unequal)
        is_noise = not differences
    hints = []
    if resumed.status:
        hints.append(f"fails after its last step: exit status {resumed.status}: {error_line(resumed.log)}")
    verdict = Verdict(
        "exact",
        _equal(compared),
        loaded=compared.loaded,
        newest=compared.newest,
        last=compared.last,
        hints=hints,
    )
    if resumed.status is None and all(difference.kind == "steps" for difference in differences):
        step = compared.last + 1
        return replace(verdict, word="hangs", reason=f"hangs after step {step - 1}", step=step, kind="steps")
    text = ""
    if differences:
        difference = differences[0]
        facts = facts_of(compared, differences, stopped)
        text, cause = describe(facts), likely(facts)
        if difference.kind == "steps" and resumed.status:
            text += f" (exit status {resumed.status}: {error_line(resumed.log)})"
            cause = ""
        verdict = replace(
            verdict, word="diverges", reason=text, cause=cause, step=difference.step,
            kind=difference.kind, name=next(iter(difference.names), None), rank=difference.rank,
        )  # fmt: skip
    if compared.newest is not None and compared.loaded < compared.newest:
        missed = Difference(compared.loaded + 1, 0, "checkpoint")
        verdict = replace(verdict, step=missed.step, kind=missed.kind)
        complete = f"though step {compared.newest} was complete"
        if compared.is_scratch:
            return replace(
                verdict, word="scratch", reason=f"starts over, {complete}", cause=_scratch(resumed.recording)
            )
        places = f" ({listed(compared.loaded_paths, 2)})" if compared.loaded_paths else ""
        reason = f"takes step {compared.loaded}{places}, {complete}{text and f'; then {text}'}"
        return replace(
            verdict, word="older", reason=reason, cause=likely(facts_of(compared, [missed], stopped))
        )
    if differences and differences[0].is_restored:
        loaded, read = resumed.recording.paths_read()
        if torn := _incomplete(stopped, loaded or read, compared.newest, cut):
            reason = f"takes a checkpoint that is not complete ({listed(torn, 2)}): {text}"
            return replace(verdict, word="torn", reason=reason, cause=_INCOMPLETE.format(torn[0]))
    elif is_noise and unequal.kinds:
        kind = min(unequal.kinds, key=lambda kind: (unequal.kinds[kind], ORDER[kind]))
        reason = f"two uninterrupted runs differ from step {unequal.kinds[kind]} on ({KINDS[kind]})"
        return replace(verdict, word="not_deterministic", reason=reason)
    elif not differences and compared.generators:
        names = " and ".join(compared.generators)
        hints.append(f"differ after the load, without an effect here: generators of {names}")
    return verdict


def _equal(compared: Compared) -> str:
    start = (
        f"from step {compared.loaded}" if compared.loaded else "from the start: no checkpoint was complete"
    )
    first, last = compared.loaded + 1, compared.last
    return f"{start}; {f'steps {first} to {last} are' if last > first else f'step {first} is'} equal"


def _incomplete(stopped: Recording, paths: Iterable[str], newest: int | None, cut: str) -> list[str]:
    """Return those of the paths, which were read, that belong to a checkpoint that is not complete."""
    incomplete = []
    for path in dict.fromkeys(paths):
        # A missing file counts as one of its folder.
        steps = [stopped.disk.step_of(place) for place in (path, path.rpartition("/")[0])]
        step = next((step for step in steps if step is not None), 0)
        if (cut and is_in(cut, path)) or step > (newest or 0):
            incomplete.append(path)
    return incomplete


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
