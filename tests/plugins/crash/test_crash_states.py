"""Cells in which every state that a crash may leave is loaded."""

from typing import Any
from unittest import mock

import pytest

from conftest import tiered
from dcpbench.checkpointers import torch_save
from support.alone import Ran, run_alone, unexplained

SMALL: dict[str, Any] = {"model": "few_rows", "train_steps": 1, "saves": 1}
pytestmark = pytest.mark.cell
CRASH_CHECKS = ("crash_consistent", "crash_recoverable", "crash_durable")


def failed(ran: Ran) -> set[str]:
    return {check for check in CRASH_CHECKS if ran.verdict.checks[check] is False}


@pytest.mark.parametrize("scenario", tiered(["crash_states", "crash_overwrite"], "crash_overwrite"))
def test_a_durable_writer_passes(scenario: str) -> None:
    ran = run_alone(scenario=scenario, storage="durable", **SMALL)
    assert (ran.verdict.status, ran.verdict.reason) == ("pass", None)
    assert all(ran.verdict.checks[check] for check in CRASH_CHECKS)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("scenario", "storage", "checks"),
    [
        ("crash_states", "rename_not_synced", {"crash_durable"}),
        ("crash_overwrite", "data_over_old_data", {"crash_consistent", "crash_recoverable"}),
    ],
)
def test_a_writer_with_a_defect_fails(scenario: str, storage: str, checks: set[str]) -> None:
    assert failed(run_alone(scenario=scenario, storage=storage, **SMALL)) == checks


@pytest.mark.extended
@pytest.mark.parametrize("scenario", ["crash_states", "crash_overwrite"])
def test_torch_save_passes_as_dcpbench_calls_it(scenario: str) -> None:
    """The file is synced, renamed, and its name is synced, and that of its folder."""
    ran = run_alone(scenario=scenario, checkpointer="torch_save", **SMALL)
    assert (ran.verdict.status, ran.verdict.reason) == ("pass", None)
    assert all(ran.verdict.checks[check] for check in CRASH_CHECKS)


def test_torch_save_that_syncs_nothing_fails() -> None:
    with mock.patch.object(torch_save, "_sync"):
        ran = run_alone(scenario="crash_states", checkpointer="torch_save", **SMALL)
    assert failed(ran) == {"crash_durable"}


def test_what_is_found_of_torch_is_known() -> None:
    ran = run_alone(scenario="crash_states", storage="file", **SMALL)
    assert failed(ran) == {"crash_durable"}
    assert unexplained(ran, "success-is-not-synced") == set()
