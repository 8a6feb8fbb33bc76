"""Workloads and trainers with state of every kind: what is healthy passes, what torch refuses is a skip that
says so."""

import pytest

from conftest import Finished, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("healthy") / "sweep", "experiment=healthy_workloads")


def test_what_is_healthy_passes(sweep: Finished) -> None:
    assert sweep.rows, sweep.err
    assert {row["cell"]: row["reason"] for row in sweep.rows if row["status"] != "pass"} == {}
