"""Every scenario reports a defect in the restored state, and its row names it."""

from typing import Any

import pytest

from conftest import cells_of, experiment, run, selected

SEEN = {
    "save_load": ("fail", "model_equal", "net2.weight (param) in the checkpoint of step"),
    "twice": (
        "fail",
        "state_resume_equal",
        "net1.weight (param) after the checkpoint of step 2: index [0, 0]: ",
    ),
    "pretrained": ("fail", "model_equal", "net1.weight (param) before the fine-tuning"),
    "tuned": ("fail", "model_equal", "layer2.bias (param) in the checkpoint of step"),
    "replica": ("fail", "model_equal", "replicas differ: index"),
    "swapped": ("fail", "extra_equal", "gathering.data (data) in the checkpoint of step"),
    "overwritten": ("fail", "contract_held", "it was not refused"),
    "second": ("fail", "model_equal", "net2.bias (param) in the checkpoint of step 2"),
    "alone": ("fail", "optim_equal", "state.net2.bias.exp_avg (exp_avg) in the checkpoint of step"),
    "lr": ("fail", "optim_equal", "param_groups.0.lr (lr) in the checkpoint of step"),
    "moment": ("fail", "optim_equal", "state.net2.weight.exp_avg_sq (exp_avg_sq) in the checkpoint of step"),
    "by_key": ("fail", "optim_equal", "net1.weight.exp_avg (exp_avg) read by the key optimizer.state"),
    "half": ("fail", "extra_equal", "half.sharded (sharded) in the checkpoint of this rank's half"),
    "broadcast": ("fail", "model_equal", "net2.weight (param) in the checkpoint of step"),
    "by_parameter": ("fail", "optim_equal", "param_groups.0.lr (lr) in the checkpoint of step"),
    "hangs": ("timeout", None, "still in load (rank 0-3)"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [name for name in SEEN if name in selected(request, "name")]
    ended = run(tmp_path_factory.mktemp("planted") / "sweep", *experiment("planted", names))
    assert ended.status == 1
    return dict(zip(names, ended.rows, strict=True))


@pytest.mark.parametrize("name", SEEN)
def test_injected_defect_is_reported_as_itself(planted: dict[str, Any], name: str) -> None:
    status, check, told = SEEN[name]
    row = planted[name]
    assert row["status"] == status, row["reason"]
    assert told in row["reason"]
    if check:
        assert row[check] is False
        assert f"{check}: rank " in row["reason"]


def test_nothing_else_ran() -> None:
    assert set(SEEN) == set(cells_of("planted"))
