"""Each explanation of a failure has an injected fault that gets it, and no other row has one."""

from typing import Any

import pytest

from cell.test_alone import FAULTS, sentence_of
from dcpbench.analysis.causes import causes_of, causes_table, signs_of
from dcpbench.core.checks import CHECKS
from dcpbench.core.notes import Note

ON_SEVERAL_RANKS = {"batch_loss_close", "replicas_equal"}
"""Those of `tests/plugins/faults/test_mistrained.py`. Those of trainers are in `tests/runs`."""


def test_every_explanation_has_a_fault() -> None:
    explained = {check for check in causes_table() if check != "error"}
    assert explained == {cause for _, cause in FAULTS.values() if cause} | ON_SEVERAL_RANKS
    assert explained <= {*CHECKS}
    signs = {sign for of in causes_table().values() for names in of["likely"] for sign in names.split()}
    assert signs == signs_of({}).keys()


@pytest.mark.parametrize("status", ["pass", "xfail", "skip", "vacuous", "xpass", "crash", "timeout"])
def test_only_failures_are_explained(status: str) -> None:
    row = {"status": status, "model_equal": False, "reason": "find_unused_parameters"}
    assert causes_of(row) == []


def test_null_checks_prove_nothing() -> None:
    """Where nothing says that the state was restored, nothing says that it is in no checkpoint."""
    assert causes_of({"status": "fail", "loss_resume_equal": False}) == []
    row = {"status": "fail", "loss_resume_equal": False, "model_equal": True, "optim_equal": None}
    assert causes_of(row)[0].startswith("State that no checkpoint contains")


def test_cause_behind_another_is_listed() -> None:
    """Random generators that were not restored hide neither a lost position nor a value in no state dict."""
    row: dict[str, Any] = {"status": "fail", "random_equal": False, "loss_resume_equal": False}
    loader = Note("unreadable", "DataLoader", name="loader").plain()
    random, position = causes_of({**row, "details": {"ranks": [{"notes": [loader]}]}})
    assert random == sentence_of("random_equal")
    assert position == "The load may have lost a position that cannot be read: loader (DataLoader)"
    values = [
        Note("in_no_state_dict", "4, resumed 2", name=f"mine.{name}").plain() for name in ("A", "B", "C", "D")
    ]
    first, *others = causes_of({**row, "details": {"ranks": [{"notes": [loader, *values]}]}})
    named = ", ".join(f"mine.{name}: 4, resumed 2" for name in ("A", "B", "C"))
    assert first == f"{named} and 1 more; in no state dict"
    assert others == [random, position]


def test_wrong_checkpoint_explains_what_it_restores() -> None:
    row = {"status": "fail", "checkpoint_whole": False, "model_equal": False, "side_effect_free": False}
    assert causes_of(row) == [sentence_of("checkpoint_whole")]
