"""Optimizers whose state is of another kind than Adam's: each comes back, or is a skip in torch's words."""

import pytest

from conftest import SMALL, Finished, run

pytestmark = pytest.mark.slow

OPTIMIZERS = ("adagrad", "adafactor", "adam_tensor_lr", "rprop", "nadam")


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
