"""State of models: what is saved. Those that torch does not restore are in test_ordinary_workloads.py."""

import pytest

from dcpbench.core.state import StatePart
from dcpbench.runs.build_run import build
from dcpbench.workloads.workload import batches_of
from support.alone import ONCE, alone, config, world


def test_extra_state_is_compared_as_saved() -> None:
    given = config(model="extra_state")
    trained = build(given, world(), 0)
    trained.train(batches_of(given, world().device), 2)
    held = trained.live_state()[StatePart.model]
    assert held["_extra_state", "seen"] == 2
    assert held["_extra_state", "powers"].local.tolist() == [1.0, 2.0, 4.0]
    saved = trained.state()["model"].state_dict()["_extra_state"]
    assert (saved["seen"], saved["powers"].tolist()) == (2, [1.0, 2.0, 4.0])


def test_frozen_layer_is_saved_unless_left_out() -> None:
    run = build(config(model="frozen"), world(), 0)
    assert run.live_state()[StatePart.flags]["requires_grad", "net1.weight"] is False
    assert "net1.weight" in run.state()["model"].state_dict()


@pytest.mark.cell
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd_plain"])
def test_save_before_the_first_step_passes(optimizer: str) -> None:
    verdict, _ = alone(**ONCE, optimizer=optimizer, save_at=0)
    assert verdict.status == "pass", verdict.reason
