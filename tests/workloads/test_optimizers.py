"""Optimizers whose state is not like Adam's: each is restored, or is a skip in torch's words."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from conftest import SMALL, Finished, blocks, run, selected
from dcpbench.compose.limits import resolve, why_skip
from dcpbench.executors.machine import Machine
from dcpbench.state.snapshot import snapshot_optimizer
from dcpbench.workloads.optimizers import Optimizers
from support.alone import ONCE, config, group_of_one, run_alone, trained

NO_GPU = Machine(gpus=0, description={})
OPTIMIZERS = (
    "adagrad",
    "adafactor",
    "adam_tensor_lr",
    "rprop",
    "nadam",
    "adam_and_sgd",
    "muon",
    "adam_capturable",
)
SKIPPED = {
    ("fsdp2", "adafactor"): "DTensor refuses a step of it",
    ("fsdp2", "rprop"): "DTensor refuses a step of it",
    ("ddp", "adam_capturable"): "its state is on an accelerator",
    ("fsdp2", "adam_capturable"): "its state is on an accelerator",
}


def test_refused_optimizer_is_a_skip_in_torchs_words() -> None:
    given = config(optimizer="zero_redundancy", parallel="ddp")
    told = why_skip(given, resolve(given, NO_GPU), NO_GPU)
    assert told is not None
    assert told.startswith("optimizer=zero_redundancy takes no parallel, not ddp: ")
    model = torch.nn.Linear(2, 2)
    with group_of_one():
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        with pytest.raises(RuntimeError) as raised:
            get_optimizer_state_dict(model, optimizer)
    assert str(raised.value) in told


CELLS = [(parallel, optimizer) for optimizer in OPTIMIZERS for parallel in ("ddp", "fsdp2")]


@pytest.fixture(scope="module")
def optimizers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = selected(request, "parallel", "optimizer")
    cells = blocks({"parallel": parallel, "optimizer": optimizer} for parallel, optimizer in asked)
    words = (*cells, "device=cpu", "world_size=2", "saves=1", *SMALL)
    return run(tmp_path_factory.mktemp("optimizers") / "sweep", *words)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "optimizer"), CELLS)
def test_optimizer_state_is_restored(optimizers: Finished, optimizer: str, parallel: str) -> None:
    row = optimizers.row(optimizer=optimizer, parallel=parallel)
    if why := SKIPPED.get((parallel, optimizer)):
        assert row["status"] == "skip"
        assert why in row["reason"]
        return
    assert (row["model_equal"], row["optim_equal"], row["extra_equal"], row["powered"]) == (True,) * 4
    if optimizer == "adam_tensor_lr":
        assert row["status"] == "xfail", row["reason"]
        assert "observed: flags_equal: rank 0: defaults.lr" in row["reason"]
        assert row["loss_resume_equal"] is True
    else:
        assert row["status"] == "pass", row["reason"]


def test_several_optimizers_act_as_one() -> None:
    run, other = (trained(steps, optimizer="adam_and_sgd") for steps in (2, 1))
    held = snapshot_optimizer(run.model, run.optimizer)
    assert {name[-1] for name in held if name[:2] == ("state", "net1.weight")} == {
        *("exp_avg", "exp_avg_sq", "step")
    }
    assert [name[2:] for name in held if name[:2] == ("state", "net1.bias")] == [("momentum_buffer",)]
    assert held["param_groups", 0, "betas"] == (0.9, 0.99)
    assert held["param_groups", 1, "momentum"] == 0.9
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    assert isinstance(other.optimizer, Optimizers)
    adam, sgd = other.optimizer.optimizers
    assert {str(held["step"]) for held in adam.state.values()} == {"tensor(2.)"}
    momenta = snapshot_optimizer(other.model, sgd)["state", "net1.bias", "momentum_buffer"].local
    assert torch.equal(momenta, held["state", "net1.bias", "momentum_buffer"].local)


@pytest.mark.cell
def test_groups_of_the_wrong_optimizer_are_reported() -> None:
    ran = run_alone("groups_exchanged", **ONCE, optimizer="adam_and_sgd")
    assert ran.verdict.fault_seen is True, ran.verdict.reason


@pytest.mark.cell
def test_optimizer_that_steps_in_backward_is_a_skip() -> None:
    ran = run_alone(workload={"target": "support.ordinary_optimizers.in_backward"})
    assert ran.verdict.status == "skip"
    assert "the optimizer steps in the backward pass; use checkpointer=trainer" in str(ran.verdict.reason)
