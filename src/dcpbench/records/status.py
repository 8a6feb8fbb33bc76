"""What a cell may come to, and whether that is what one wants to see: decided here and nowhere else."""

STATUSES = ("crash", "timeout", "error", "fail", "vacuous", "xpass", "xfail", "skip", "pass")
"""Every status that a cell may come to, the worst first."""

UNKNOWN = "unknown"
"""Stands for the status of a row that does not tell it; it is not ok."""

OK_STATUSES = frozenset({"pass", "xfail", "skip"})
"""The statuses of a cell that came out as it should."""

WRONG_CONFIGURATION = 2
INTERRUPTED = 130
"""Exit statuses of a sweep beside 0 and 1: nothing was started; the user broke off."""


def is_ok(status: str, flaky: bool | None = None, fault_seen: bool | None = None) -> bool:
    """Whether a cell came out as it should.

    A cell with a planted fault did when the fault was seen for what it is. A flaky cell never did: that its
    second try passed does not say what its first one was.
    """
    if flaky:
        return False
    return status in OK_STATUSES if fault_seen is None else fault_seen
