"""With `verify=deep` a fresh process loads from the disk what a cell has saved."""

import pytest

from conftest import SMALL, Finished, run, selected, tiered
from dcpbench.executors.fork_server import Machine
from dcpbench.sweep.validity import resolve, why_skip
from support.alone import config

WHERE = "in the checkpoint of step 1, loaded by a fresh process"
FAULTS = ("right_in_page_cache_alone", "value_served_from_memory")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("deep") / "sweep"
    lists = (
        f"parallel={','.join(selected(request, 'parallel') or ['fsdp2'])}",
        f"fault=none,{','.join(FAULTS)}",
        "verify=deep",
    )
    return run(folder, "-m", *lists, "saves=1", "world_size=2", "device=cpu", "retry=0", *SMALL)


@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], "fsdp2"))
def test_fresh_process_compares_all_with_controls(deep: Finished, parallel: str) -> None:
    row = deep.row(parallel=parallel, fault=None)
    assert row["status"] == "pass", row["reason"]
    assert [rank["rank"] for rank in row["details"]["ranks"]] == [0, 0, 1], "the fresh process has one rank"
    names = {
        "model_equal": "net1.weight",
        "optim_equal": "state.net2.bias.exp_avg",
        "extra_equal": "train_state.losses",
        "files_equal": "model.net1.weight",
    }
    for check, name in names.items():
        fired = row["details"]["checks"][check]["control"]
        assert fired[f"{name} {WHERE}"] is True
    lr = row["details"]["checks"]["optim_equal"]["control"][f"param_groups.0.lr {WHERE}"]
    assert lr is True, "hyperparameters too"


@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], "fsdp2"))
@pytest.mark.parametrize("fault", FAULTS)
def test_only_a_fresh_process_sees_the_fault(deep: Finished, parallel: str, fault: str) -> None:
    row = deep.row(parallel=parallel, fault=fault)
    assert (row["status"], row["fault_seen"]) == ("fail", True), row["reason"]
    seen = row["details"]["checks"]
    assert {worst["where"] for check in seen.values() for worst in check["worst"]} == {WHERE}
    assert row["files_unchanged"] is True
    assert row["loss_resume_equal"] is True


def test_fault_without_fresh_process_is_skipped() -> None:
    given, machine = config(fault=FAULTS[0]), Machine(gpus=0, description={})
    assert "takes verify=deep and not standard" in str(why_skip(given, resolve(given, machine), machine))
