"""The status of a cell in a sweep as one letter: the letters, and their order, are those of report.html."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from dcpbench.analysis.frame import is_false, is_true


@dataclass(frozen=True)
class Kind:
    """`ok`: by the rule of the sweep's exit status. `status` names its style."""

    letter: str
    label: str
    ok: bool
    status: str


KINDS = (
    Kind("?", "unknown", False, "unknown"),
    Kind("M", "fault missed", False, "fail"),
    Kind("C", "crash", False, "crash"),
    Kind("T", "timeout", False, "timeout"),
    Kind("E", "error", False, "error"),
    Kind("F", "fail", False, "fail"),
    Kind("V", "vacuous", False, "vacuous"),
    Kind("~", "flaky", False, "fail"),
    Kind("X", "xpass", False, "xpass"),
    Kind("x", "xfail", True, "xfail"),
    Kind("S", "skip", True, "skip"),
    Kind("D", "fault detected", True, "pass"),
    Kind("P", "pass", True, "pass"),
    Kind("·", "no row", True, "skip"),
)
"""The worst first; the last is for a sweep in which a cell has no row."""

ABSENT = len(KINDS) - 1
_OF_LABEL = {kind.label: number for number, kind in enumerate(KINDS[:ABSENT])}

Numbers = npt.NDArray[np.int8]


def kind_numbers(frame: pd.DataFrame) -> Numbers:
    """For each row which of `KINDS` it is: one whose second try had another status is flaky, whatever that
    was, and a planted fault is seen or missed."""
    known = frame["status"].astype("category")
    of_status = np.array([_OF_LABEL.get(status, 0) for status in known.cat.categories] + [0], dtype=np.int8)
    kinds = of_status[known.cat.codes.to_numpy()]
    kinds[is_true(frame["fault_seen"]).to_numpy()] = _OF_LABEL["fault detected"]
    kinds[is_false(frame["fault_seen"]).to_numpy()] = _OF_LABEL["fault missed"]
    kinds[is_true(frame["flaky"]).to_numpy()] = _OF_LABEL["flaky"]
    return kinds
