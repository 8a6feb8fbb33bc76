"""A cell as a test of PyTorch's own harness: `DTensorTestBase` spawns a process for each rank, which imports
torch and its testing modules, finds the other ranks through a file, runs the cell and ends. The code of
the cell is dcpbench's.
"""

import logging
import os
import pickle
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

from dcpbench.core.rank_report import RankReport
from dcpbench.rank.messages import CellSpec, RunId
from dcpbench.rank.run_cell import run_cell
from dcpbench.workloads.world import World

CELL = "DCPBENCH_BENCH_CELL"
"""Names the file with the configuration of the cell to test: the spawned processes inherit it."""


class CellTest(DTensorTestBase):
    """One test: the cell that the environment names."""

    @property
    def world_size(self) -> int:
        return int(asked().world_size)

    @with_comms(backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    def test_cell(self) -> None:
        config = asked()
        device = torch.device("cuda", self.rank) if config.device.value == "cuda" else torch.device("cpu")
        groups = [dist.new_group(backend="gloo") for _ in range(2)]
        world = World(self.rank, config.world_size, device, *groups)
        folder = str(Path(os.environ[CELL]).parent)
        report = RankReport(self.rank)
        spec = CellSpec(RunId("bench", "cell", 0), config, folder, folder)
        run_cell(spec, world, report, say_nothing, say_nothing)
        assert not any(check.count for check in report.checks.values())


def asked() -> Any:
    """The configuration of the cell; the file was written by this process or its parent."""
    return pickle.loads(Path(os.environ[CELL]).read_bytes())  # noqa: S301


def seconds(config: Any, threads: int | None = None) -> float:
    """How long the harness takes for one cell, from the start of the test to its verdict.

    The harness leaves each rank as many CPU threads as there are cores; `threads` gives them fewer.

    Raises:
        RuntimeError: the test did not pass.
    """
    with tempfile.TemporaryDirectory() as folder:
        cell = Path(folder) / "cell"
        cell.write_bytes(pickle.dumps(config))
        os.environ[CELL] = str(cell)
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        else:
            os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        logging.disable(logging.INFO)
        result = unittest.TestResult()
        started = time.perf_counter()
        CellTest("test_cell").run(result)
        took = time.perf_counter() - started
    if not result.wasSuccessful() or result.skipped:
        raise RuntimeError(f"the test did not pass: {result.failures}{result.errors}{result.skipped}")
    return took


def say_nothing(_: object) -> None:
    """Nobody follows the phases here."""
