"""The drivers that tests fork leave what a driver of a shell leaves."""

import re
from pathlib import Path

import pytest

from conftest import SMALL, Finished, run
from support.rows import measured

BLOCKS = (
    "{scenario: save_load, parallel: fsdp2, save: 'sync,async_cached'}",
    "{scenario: 'raises,kills_itself', parallel: ddp}",
    "{scenario: save_load, parallel: fsdp2, fault: weight_lowest_bit}",
    "{scenario: save_load, parallel: ddp, compile: true}",
)


@pytest.mark.slow
@pytest.mark.extended
def test_a_forked_driver_leaves_what_one_of_a_shell_leaves(tmp_path: Path) -> None:
    matrix = [f"+hydra.sweeper.matrix.b{number}={block}" for number, block in enumerate(BLOCKS)]

    def ran(name: str, own_process: bool) -> Finished:
        asked = ("saves=1", "world_size=3", "device=cpu", "retry=0", *SMALL)
        (tmp_path / name).mkdir()  # neither sweep is beside the other
        return run(tmp_path / name / "sweep", *matrix, *asked, own_process=own_process)

    # Names of one length: paths stand in the metadata, and bytes are compared.
    forked, own = ran("forked", own_process=False), ran("a-own-", own_process=True)
    assert measured(forked.rows) == measured(own.rows)
    assert [row["status"] for row in own.rows] == ["pass", "skip", "error", "crash", "fail", "pass"]
    assert forked.status == own.status == 1
    for one, other in ((forked.out, own.out), (forked.err, own.err)):
        assert without_numbers(one, "forked") == without_numbers(other, "a-own-")
    for name in (path.name for path in own.folder.iterdir()):
        assert (forked.folder / name).exists(), name


def without_numbers(text: str, name: str) -> list[str]:
    """What was printed without times and widths of columns, which follow from them."""
    words = re.sub(r"\d[\d.]*", "0", text.replace(f"/{name}", "/sweep"))
    return [" ".join(line.split()) for line in words.splitlines() if not line.endswith(" left")]
