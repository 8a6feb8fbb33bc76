"""With `verify=deep` new processes load from the disk what a cell has saved."""

import pytest

from conftest import SMALL, Finished, run, selected
from dcpbench.compose.limits import resolve, why_skip
from dcpbench.executors.machine import Machine
from support.alone import config

FAULTS = ("right_in_page_cache_alone", "value_served_from_memory")


@pytest.fixture(scope="module")
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    lists = (f"parallel={','.join(selected(request, 'parallel'))}", f"fault=none,{','.join(FAULTS)}")
    words = ("verify=deep", "saves=1", "world_size=2", "device=cpu", "retry=0", *SMALL)
    return run(tmp_path_factory.mktemp("deep") / "sweep", "-m", *lists, *words)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_only_a_new_process_sees_the_fault(deep: Finished, parallel: str) -> None:
    row = deep.row(parallel=parallel, fault=None)
    assert (row["status"], row["restart"]) == ("pass", "interpreter"), row["reason"]
    assert [rank["rank"] for rank in row["details"]["ranks"]] == [0, 0, 0, 1, 1, 1], "three stages"
    for fault in FAULTS:
        row = deep.row(parallel=parallel, fault=fault)
        assert (row["status"], row["fault_seen"]) == ("fail", True), row["reason"]


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"fault": FAULTS[0]}, "takes verify=deep and not standard"),
        ({"scenario": "no_dist", "parallel": "fsdp"}, "one process cannot shard a model"),
        ({"scenario": "no_cpu_backend", "save": "async"}, "takes device=cuda and not cpu"),
    ],
)
def test_impossible_cells_are_skipped_with_a_reason(chosen: dict[str, str], why: str) -> None:
    given, machine = config(**chosen), Machine(gpus=0, description={})
    assert why in str(why_skip(given, resolve(given, machine), machine))
