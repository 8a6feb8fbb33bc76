"""Each explanation of a failure has an injected fault that gets it, and a similar one that must not."""

from functools import cache
from typing import Any

import pytest

from dcpbench.analysis.causes import causes_of, causes_table, signs_of
from dcpbench.core.checks import CHECKS
from support.alone import alone

pytestmark = pytest.mark.cell

SMALL: dict[str, Any] = {"model": "buffered", "optimizer": "adamw_groups", "saves": 2, "train_steps": 1}
TWO_STEPS: dict[str, Any] = {"resume_steps": 2}
"""After the second step no loss shows what it did."""

Cell = tuple[str, dict[str, Any]]

CASES: tuple[tuple[str, Cell, Cell], ...] = (
    ("files_unchanged", ("file_overwritten_later", {}), ("file_stray", {})),
    ("checkpoint_whole", ("key_added", {}), ("weight_lowest_bit", {})),
    ("files_equal", ("moment_staged_as_zeros", {}), ("exp_avg_zeroed", {})),
    ("save_harmless", ("save_nudges_weight", {}), ("save_leaves_thread", {})),
    ("model_equal", ("weight_lowest_bit", {}), ("keys_exchanged", {})),
    ("flags_equal", ("training_mode_lost", {}), ("scheduler_stuck", {})),
    ("optim_equal", ("lr_not_restored", {}), ("requires_grad_lost", {})),
    ("random_equal", ("generator_seeded_again", {}), ("noise_one_draw_ahead", {})),
    ("extra_equal", ("train_step_off_by_one", {}), ("lr_next_float", {})),
    ("side_effect_free", ("load_leaves_file_open", {}), ("save_nudges_weight", {})),
    ("loss_resume_equal", ("scheduler_stuck", {}), ("noise_one_draw_ahead", {})),
    ("state_resume_equal", ("second_step_wrong", TWO_STEPS), ("second_step_wrong", {})),
    ("gradient_close", ("layer_gradient_scaled", {}), ("eps_tenfold", {})),
    ("step_equal", ("eps_tenfold", {}), ("layer_gradient_scaled", {})),
)
"""The check whose failure is explained, a fault that gets the explanation, and one that must not."""
ON_SEVERAL_RANKS = {"batch_loss_close", "replicas_equal"}
"""Those of `tests/plugins/faults/test_mistrained.py`. Those of trainers are in `tests/workloads`."""


@cache
def _explained(fault: str, values: str) -> list[str]:
    verdict, _ = alone(fault, **{**SMALL, "resume_steps": 3, **VALUES[values]})
    assert verdict.status == "fail", verdict.reason
    return causes_of({"status": verdict.status, "reason": verdict.reason, **verdict.checks})


VALUES = {str(values): values for case in CASES for _, values in case[1:]}


def _sentence(failed: str) -> str:
    """The last sentence of a check, which is for any checkpointer."""
    *_, sentence = causes_table()[failed]["likely"].values()
    return str(sentence)


@pytest.mark.parametrize("failed", [case[0] for case in CASES])
def test_faults_get_their_explanation(failed: str) -> None:
    ((_, gets, must_not),) = (case for case in CASES if case[0] == failed)
    expected = _sentence(failed)
    assert _explained(gets[0], str(gets[1]))[0] == expected
    assert _explained(must_not[0], str(must_not[1]))[0] != expected


def test_every_explanation_has_a_fault() -> None:
    explained = {check for check in causes_table() if check != "error"}
    assert explained == {*(failed for failed, _, _ in CASES), *ON_SEVERAL_RANKS}
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
    rank = {"unreadable": {"loader": "DataLoader"}}
    random, position = causes_of({**row, "details": {"ranks": [rank]}})
    assert random == _sentence("random_equal")
    assert position == "The load may have lost a position that cannot be read: loader (DataLoader)"
    values = {f"mine.{name}": "4, resumed 2" for name in ("A", "B", "C", "D")}
    first, *others = causes_of({**row, "details": {"ranks": [{**rank, "in_no_state_dict": values}]}})
    named = ", ".join(f"mine.{name}: 4, resumed 2" for name in ("A", "B", "C"))
    assert first == f"{named} and 1 more; in no state dict"
    assert others == [random, position]


def test_wrong_checkpoint_explains_what_it_restores() -> None:
    row = {"status": "fail", "checkpoint_whole": False, "model_equal": False, "side_effect_free": False}
    assert causes_of(row) == [_sentence("checkpoint_whole")]
