"""Statuses: the outcome of a row. Each is declared once, the worst first. Code that judges, shows or compares
statuses iterates over `STATUSES`, or over `SHOWN`, which adds those that a row is only shown as."""

from dataclasses import dataclass
from typing import Literal

BAD = "bold red"
"""Style of everything that is not known to be harmless."""


@dataclass(frozen=True)
class StatusSpec:
    """Declaration of a status.

    >>> STATUSES["xfail"].ok, shown("fail", flaky=True).label
    (True, 'flaky')

    Args:
        name: value of the column `status`, or what a row is shown as.
        letter: its letter in a history and in report.html.
        help: its meaning, in one sentence.
        text: the text that it is shown as; its name if empty.
        ok: True if a sweep whose rows have it exits with 0.
        style: its style on a terminal.
        junit: the kind of its testcase.
        stored: True if a row can have it; the others follow from `flaky` and `fault_seen`, or from a missing
            row.
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
        """The text that it is shown as."""
        return self.text or self.name


UNKNOWN = StatusSpec("unknown", "?", "a status that this version of dcpbench does not know", stored=False)
MISSED = StatusSpec("missed", "M", "no check detected the injected fault", "fault missed", stored=False)
FLAKY = StatusSpec("flaky", "~", "its retry had another status", stored=False)
SEEN = StatusSpec(
    "seen", "D", "the injected fault was detected as expected", "fault detected",
    ok=True, style="green", junit="passed", stored=False,
)  # fmt: skip
ABSENT = StatusSpec(
    "absent", "·", "the cell has no row in the sweep", "no row", ok=True, style="dim", stored=False
)

_ALL = (
    UNKNOWN,
    MISSED,
    StatusSpec("crash", "C", "a rank died: it was killed by a signal, or exited", junit="error"),
    StatusSpec("timeout", "T", "a phase exceeded its time limit", junit="error"),
    StatusSpec("error", "E", "a rank raised", junit="error"),
    StatusSpec("fail", "F", "a check failed"),
    StatusSpec(
        "vacuous", "V", "the checks passed, but one of them could not have failed, or a rank did not compare",
        style="bold magenta",
    ),
    FLAKY,
    StatusSpec(
        "xpass", "X", "a failure listed in known_failures.yaml no longer happens", style="bold yellow"
    ),
    StatusSpec(
        "xfail", "x", "a failure listed in known_failures.yaml happened, and no other",
        ok=True, style="yellow", junit="skipped",
    ),
    StatusSpec(
        "skip", "S", "this machine cannot run the cell, or its combination is not possible",
        ok=True, style="dim", junit="skipped",
    ),
    SEEN,
    StatusSpec(
        "pass", "P", "every check that applies passed, and each was shown to be able to fail",
        ok=True, style="green", junit="passed",
    ),
    ABSENT,
)  # fmt: skip

SHOWN = {spec.name: spec for spec in _ALL}
"""Everything that a cell can be shown as, by name."""

STATUSES = {spec.name: spec for spec in _ALL if spec.stored}
"""Every status that a row can have, by name."""

SEVERITY = {name: place for place, name in enumerate(SHOWN)}
"""Severity by name; 0 is the worst."""


def shown(status: str, flaky: bool | None = None, fault_seen: bool | None = None) -> StatusSpec:
    """Return what a row is shown as.

    A flaky row is never ok, because its retry does not explain it. A row with an injected fault is ok if the
    fault was detected as expected.
    """
    if flaky:
        return FLAKY
    if fault_seen is None:
        return STATUSES.get(status, UNKNOWN)
    return SEEN if fault_seen else MISSED
