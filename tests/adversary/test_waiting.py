"""Whatever is stopped, the sweep ends, with a row for each cell."""

from collections.abc import Callable
from functools import partial

import pytest

from conftest import SMALL, Finished, alive_in
from support.drivers import plant

pytestmark = pytest.mark.slow


def test_an_agent_that_is_stopped_is_replaced(sweep: Callable[..., Finished]) -> None:
    """It neither forks the next ranks nor says that those before have ended."""
    dies = "scenario: dies, scenario.options.how: stops_agent, scenario.options.phase: train"
    blocks = (f"{{{dies}, seed: 1}}", "{scenario: save_load, seed: 3}", f"{{{dies}, seed: 4}}")
    matrix = [f"+hydra.sweeper.matrix.b{number}={block}" for number, block in enumerate(blocks)]
    asked = ("parallel=ddp", "saves=1", "device=cpu", "world_size=2", "retry=0", *SMALL)
    soon = partial(plant, "dcpbench.executors.agent", "ANSWER_LIMIT_S", 60.0)
    ended = sweep(*matrix, *asked, prepare=soon)
    assert [row["status"] for row in ended.rows] == ["error", "pass", "error"], ended.out
    assert {row["reason"] for row in ended.rows if row["status"] == "error"} == {
        "rank 0 in train without a save: ValueError: planted (support/deaths.py:181)"
    }
    assert ended.status == 1
    assert alive_in(ended.folder) == []
