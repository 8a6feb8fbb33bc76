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


def test_fault_without_new_process_is_skipped() -> None:
    given, machine = config(fault=FAULTS[0]), Machine(gpus=0, description={})
    assert "takes verify=deep and not standard" in str(why_skip(given, resolve(given, machine), machine))
