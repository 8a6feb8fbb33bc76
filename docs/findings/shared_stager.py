"""One DefaultStager that is given to asynchronous saves, each of which begins before the last has ended.

python shared_stager.py
"""

import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class HeldPlanner(DefaultSavePlanner):
    """A save that is given one writes nothing before `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.planned, self.go_on = threading.Event(), threading.Event()

    def finish_plan(self, new_plan: Any) -> Any:
        self.planned.set()
        self.go_on.wait()
        return super().finish_plan(new_plan)


def wrong_checkpoints(folder: Path, stagers: list[DefaultStager]) -> int:
    """Save a weight that is 1, 2, then 3, each save begun before the last has ended; how many checkpoints
    hold something else."""
    weight, under_way = torch.zeros(4), []
    for number, stager in enumerate(stagers, 1):
        weight.fill_(number)  # as an optimizer does, where it lies
        planner = HeldPlanner()
        how = {"async_stager": stager, "planner": planner, "process_group": dist.new_group([0])}
        try:
            save = dcp.async_save({"weight": weight}, checkpoint_id=folder / str(number), **how)
        except KeyError:  # torch 2.11 cannot stage twice
            for held, _ in under_way:
                held.go_on.set()
            raise
        under_way.append((planner, save))
        planner.planned.wait()
        if number > 1:
            end(*under_way[-2])
    end(*under_way[-1])
    wrong = 0
    for number in range(1, len(stagers) + 1):
        loaded = {"weight": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=folder / str(number))
        wrong += loaded["weight"].tolist() != [float(number)] * 4
        print(f"    save {number} reported success: loaded {loaded['weight'].tolist()}")
    return wrong


def end(planner: HeldPlanner, save: Future[Any]) -> None:
    planner.go_on.set()
    save.result()  # raises where a save fails


print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
    print("  a stager for each save")
    wrong = wrong_checkpoints(Path(one), [DefaultStager(PLAIN) for _ in range(3)])
    print("  one stager for all")
    wrong += wrong_checkpoints(Path(other), [DefaultStager(PLAIN)] * 3)
dist.destroy_process_group()
sys.exit(bool(wrong))
