"""Cells that load every disk state which a crash can leave."""

from typing import Any
from unittest import mock

import pytest

from dcpbench.checkpointers import torch_save
from support.alone import Ran, run_alone, unexplained

SMALL: dict[str, Any] = {"model": "few_rows", "train_steps": 1, "saves": 1}
pytestmark = pytest.mark.cell
CRASH_CHECKS = ("crash_consistent", "crash_recoverable", "crash_durable")


def failed(ran: Ran) -> set[str]:
    return {check for check in CRASH_CHECKS if ran.verdict.checks[check] is False}


@pytest.mark.parametrize("scenario", ["crash_states", "crash_overwrite"])
def test_durable_writer_passes(scenario: str) -> None:
    ran = run_alone(scenario=scenario, storage="durable", **SMALL)
    assert (ran.verdict.status, ran.verdict.reason) == ("pass", None)
    assert all(ran.verdict.checks[check] for check in CRASH_CHECKS)


@pytest.mark.parametrize(
    ("scenario", "storage", "checks"),
    [
        ("crash_states", "rename_not_synced", {"crash_durable"}),
        ("crash_overwrite", "data_over_old_data", {"crash_consistent", "crash_recoverable"}),
    ],
)
def test_faulty_writer_fails(scenario: str, storage: str, checks: set[str]) -> None:
    assert failed(run_alone(scenario=scenario, storage=storage, **SMALL)) == checks


@pytest.mark.parametrize("scenario", ["crash_states", "crash_overwrite"])
def test_torch_save_with_syncs_passes(scenario: str) -> None:
    """dcpbench syncs the file, renames it, and syncs its name and that of its folder."""
    ran = run_alone(scenario=scenario, checkpointer="torch_save", **SMALL)
    assert (ran.verdict.status, ran.verdict.reason) == ("pass", None)
    assert all(ran.verdict.checks[check] for check in CRASH_CHECKS)


def test_torch_save_without_syncs_fails() -> None:
    with mock.patch.object(torch_save, "_sync"):
        ran = run_alone(scenario="crash_states", checkpointer="torch_save", **SMALL)
    assert failed(ran) == {"crash_durable"}


def test_failures_of_torch_are_known() -> None:
    ran = run_alone(scenario="crash_states", storage="file", **SMALL)
    assert failed(ran) == {"crash_durable"}
    assert unexplained(ran, "success-is-not-synced") == set()
