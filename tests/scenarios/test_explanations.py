"""Each explanation of a failure has an injected fault that gets it, and a similar one that must not."""

from functools import cache
from typing import Any

import pytest

from conftest import tiered
from dcpbench.core.checks import CHECKS
from dcpbench.core.explanations import EXPLANATIONS, explanation_of
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
    ("random_equal", ("generator_seeded_again", {}), ("noise_seeded_again", {})),
    ("extra_equal", ("train_step_off_by_one", {}), ("lr_next_float", {})),
    ("side_effect_free", ("load_leaves_file_open", {}), ("save_draws_noise", {})),
    ("loss_resume_equal", ("scheduler_stuck", {}), ("noise_one_draw_ahead", {})),
    ("state_resume_equal", ("second_step_wrong", TWO_STEPS), ("second_step_wrong", {})),
    ("gradient_close", ("layer_gradient_scaled", {}), ("eps_tenfold", {})),
    ("step_equal", ("eps_tenfold", {}), ("layer_gradient_scaled", {})),
)
"""The check whose failure is explained, a fault that gets the explanation, and one that must not."""
ON_SEVERAL_RANKS = {"batch_loss_close", "replicas_equal"}
"""Those of `tests/plugins/faults/test_mistrained.py`. Those of trainers are in `tests/workloads`."""


@cache
def _explained(fault: str, values: str) -> str | None:
    verdict, _ = alone(fault, **{**SMALL, "resume_steps": 3, **VALUES[values]})
    assert verdict.status == "fail", verdict.reason
    return explanation_of({"status": verdict.status, "reason": verdict.reason, **verdict.checks})


VALUES = {str(values): values for case in CASES for _, values in case[1:]}


def _sentence(failed: str) -> str:
    (one,) = (one for one in EXPLANATIONS if one.failed == failed and not one.checkpointer)
    return one.sentence


OF_EACH_KIND = ("files_equal", "optim_equal", "state_resume_equal", "gradient_close")
"""Of a save, a load, a resume and of training."""


@pytest.mark.parametrize("failed", tiered([case[0] for case in CASES], *OF_EACH_KIND))
def test_faults_get_their_explanation(failed: str) -> None:
    ((_, gets, must_not),) = (case for case in CASES if case[0] == failed)
    expected = _sentence(failed)
    assert _explained(gets[0], str(gets[1])) == expected
    assert _explained(must_not[0], str(must_not[1])) != expected


def test_every_explanation_has_a_fault() -> None:
    explained = [one.failed for one in EXPLANATIONS if not one.raised and not one.checkpointer]
    assert sorted(explained) == sorted([*(failed for failed, _, _ in CASES), *ON_SEVERAL_RANKS])
    assert {*explained, *(check for one in EXPLANATIONS for check in one.passed)} <= {*CHECKS}


@pytest.mark.parametrize("status", ["pass", "xfail", "skip", "vacuous", "xpass", "crash", "timeout"])
def test_only_failures_are_explained(status: str) -> None:
    row = {"status": status, "model_equal": False, "reason": "find_unused_parameters"}
    assert explanation_of(row) is None


def test_null_checks_prove_nothing() -> None:
    """Where nothing says that the state was restored, nothing says that it is in no checkpoint."""
    assert explanation_of({"status": "fail", "loss_resume_equal": False}) is None
    row = {"status": "fail", "loss_resume_equal": False, "model_equal": True, "optim_equal": None}
    assert "state that no checkpoint contains" in str(explanation_of(row))
