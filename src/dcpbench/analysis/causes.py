"""The likely causes of a row's failure."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from dcpbench.config.text import listed
from dcpbench.core.checks import CHECKS
from dcpbench.core.explanations import EXPLANATIONS
from dcpbench.records.row_reader import dict_in, list_in

_MOST, _NAMED = 3, 3
"""How many causes are listed at most, and how many names of each."""
_RESUMED = {"loss_resume_equal", "loss_resume_close", "state_resume_equal"}


def causes_of(row: Mapping[str, Any]) -> list[str]:
    """Return the likely causes of a row's failure, at most three: values in no state dict that differ, what
    the pattern of checks suggests, and what could not be read.

    >>> values = {"in_no_state_dict": {"model.calls": "8, resumed 4"}, "unreadable": {"loader": "DataLoader"}}
    >>> row = {"status": "fail", "loss_resume_equal": False, "details": {"ranks": [values]}}
    >>> for cause in causes_of(row):
    ...     print(cause)
    model.calls: 8, resumed 4; in no state dict
    The load may have lost a position that cannot be read: loader (DataLoader)
    """
    failed = {check for check in CHECKS if row.get("status") == "fail" and row.get(check) is False}
    values, unreadable = (
        _of_ranks(row, key) if failed & _RESUMED else {} for key in ("in_no_state_dict", "unreadable")
    )
    texts = [f"{name}: {value}" for name, value in values.items()]
    causes = [f"{listed(texts, _NAMED)}; in no state dict"] if values else []
    explained = _RESUMED if values else set[str]()
    if values and "save_harmless" in failed:  # the twin changes them too
        explained = explained | {check for check in failed if CHECKS[check].training}
    if failed & _RESUMED and any(rank.get("unrestored_generators") for rank in _ranks(row)):
        causes += [one.sentence for one in EXPLANATIONS if one.failed == "random_equal"][:1]
    for check, explanations in groupby(EXPLANATIONS, key=lambda explanation: explanation.failed):
        fitting = [explanation for explanation in explanations if explanation.fits(row)]
        causes += [explanation.sentence for explanation in fitting[:1] if check not in explained]
        if fitting and fitting[0].alone:
            break
    if not unreadable:
        return causes[:_MOST]
    named = listed([f"{name} ({kind})" for name, kind in unreadable.items()], _NAMED)
    return [*causes[: _MOST - 1], f"The load may have lost a position that cannot be read: {named}"]


def likely(row: Mapping[str, Any]) -> list[str]:
    """Return a line for each likely cause."""
    return [f"likely: {cause}" for cause in causes_of(row)]


def _of_ranks(row: Mapping[str, Any], key: str) -> dict[str, object]:
    """Return the entries that the ranks of a row reported under a key."""
    return {name: value for rank in _ranks(row) for name, value in dict_in(rank.get(key)).items()}


def _ranks(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*map(dict_in, list_in(dict_in(row.get("details")).get("ranks")))]
