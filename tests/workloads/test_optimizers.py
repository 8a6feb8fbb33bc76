"""Optimizers whose state is of another kind than Adam's: each comes back, or is a skip in torch's words."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from conftest import SMALL, Finished, run
from dcpbench.executors.fork_server import Machine
from dcpbench.sweep.plan.validity import resolve, why_skip
from support.alone import config, group_of_one

OPTIMIZERS = ("adagrad", "adafactor", "adam_tensor_lr", "rprop", "nadam")


def test_what_refuses_to_hand_out_its_state_is_a_skip_in_torchs_words() -> None:
    given = config(optimizer="zero_redundancy", parallel="ddp")
    told = why_skip(given, resolve(given, Machine(gpus=0, description={})))
    assert told is not None
    assert told.startswith("optimizer=zero_redundancy takes no parallel, not ddp: ")
    model = torch.nn.Linear(2, 2)
    with group_of_one():
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        with pytest.raises(RuntimeError) as raised:
            get_optimizer_state_dict(model, optimizer)
    assert str(raised.value) in told


@pytest.fixture(scope="module")
def optimizers(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = (
        f"optimizer={','.join(OPTIMIZERS)}",
        "parallel=ddp,fsdp2",
        "device=cpu",
        "world_size=2",
        "saves=2",
    )
    return run(tmp_path_factory.mktemp("optimizers") / "sweep", "-m", *cells, *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_its_state_comes_back(optimizers: Finished, optimizer: str, parallel: str) -> None:
    row = optimizers.row(optimizer=optimizer, parallel=parallel)
    if parallel == "fsdp2" and optimizer in ("adafactor", "rprop"):
        assert row["status"] == "skip"
        assert "DTensor refuses a step of it" in row["reason"]
        return
    assert (row["model_equal"], row["optim_equal"], row["extra_equal"], row["powered"]) == (True,) * 4
    if optimizer == "adam_tensor_lr":
        assert row["status"] == "xfail", row["reason"]
        assert "seen as flags_equal: rank 0: defaults.lr" in row["reason"]
        assert row["loss_resume_equal"] is True
    else:
        assert row["status"] == "pass", row["reason"]
