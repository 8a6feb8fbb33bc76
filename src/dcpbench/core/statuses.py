"""Statuses, each declared once, the worst first. Everything that judges, shows or compares them iterates over
`STATUSES`, or over `SHOWN`, which also has the ones that a row is only shown as."""

from dataclasses import dataclass
from typing import Literal

BAD = "bold red"
"""The style of whatever is not known to be harmless."""


@dataclass(frozen=True)
class StatusSpec:
    """One status.

    Args:
        name: the value of the column `status`, or what a row is shown as.
        letter: its sign in a history and in report.html.
        help: what it means, in one sentence.
        text: how it is shown; its name if empty.
        ok: whether a row that has it makes a sweep exit with 0.
        style: how the terminal shows it.
        junit: the kind of its testcase.
        stored: whether a row can have it; the others follow from `flaky` and `fault_seen`, or from no row.
    """

    name: str
    letter: str
    help: str
    text: str = ""
    ok: bool = False
    style: str = BAD
    junit: Literal["passed", "failure", "error", "skipped"] = "failure"
    stored: bool = True

    @property
    def label(self) -> str:
        """How it is shown."""
        return self.text or self.name


UNKNOWN = StatusSpec("unknown", "?", "a status that this version does not know", stored=False)
MISSED = StatusSpec("missed", "M", "no check saw the planted fault", "fault missed", stored=False)
FLAKY = StatusSpec("flaky", "~", "two tries came to different statuses", stored=False)
SEEN = StatusSpec(
    "seen", "D", "a planted fault was seen for what it is", "fault detected",
    ok=True, style="green", junit="passed", stored=False,
)  # fmt: skip
ABSENT = StatusSpec("absent", "·", "the sweep has no row of it", "no row", ok=True, style="dim", stored=False)

_ALL = (
    UNKNOWN,
    MISSED,
    StatusSpec("crash", "C", "a rank died, by a signal or its own exit", junit="error"),
    StatusSpec("timeout", "T", "a phase took longer than it may", junit="error"),
    StatusSpec("error", "E", "a rank raised", junit="error"),
    StatusSpec("fail", "F", "a check did not hold"),
    StatusSpec(
        "vacuous", "V", "the checks held, but one of them could not have failed, or a rank did not look",
        style="bold magenta",
    ),
    FLAKY,
    StatusSpec(
        "xpass", "X", "a failure listed in known_failures.yaml did not happen any more", style="bold yellow"
    ),
    StatusSpec(
        "xfail", "x", "a failure listed in known_failures.yaml happened, and nothing beside it",
        ok=True, style="yellow", junit="skipped",
    ),
    StatusSpec("skip", "S", "this machine or this combination cannot", ok=True, style="dim", junit="skipped"),
    SEEN,
    StatusSpec(
        "pass", "P", "every check that applies held, and each was shown to be able to fail",
        ok=True, style="green", junit="passed",
    ),
    ABSENT,
)  # fmt: skip

SHOWN = {spec.name: spec for spec in _ALL}
"""Everything that a cell is shown as, by its name."""

STATUSES = {spec.name: spec for spec in _ALL if spec.stored}
"""Every status that a row can have, by its name."""

SEVERITY = {name: place for place, name in enumerate(SHOWN)}
"""How bad each is: the least is the worst."""


def shown(status: str, flaky: bool | None = None, fault_seen: bool | None = None) -> StatusSpec:
    """Return what a row is shown as.

    A flaky row is never ok: its second attempt does not say what its first one was. A row with an injected
    fault is ok if the fault was detected as expected.
    """
    if flaky:
        return FLAKY
    if fault_seen is None:
        return STATUSES.get(status, UNKNOWN)
    return SEEN if fault_seen else MISSED
