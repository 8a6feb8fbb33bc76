"""One FileSystemWriter that is given to asynchronous saves, each of which begins before the last has ended.

python shared_writer.py
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
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter


class HeldPlanner(DefaultSavePlanner):
    """A save that is given one writes nothing before `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.planned, self.go_on = threading.Event(), threading.Event()

    def finish_plan(self, new_plan: Any) -> Any:
        self.planned.set()
        self.go_on.wait()
        return super().finish_plan(new_plan)


def wrong_checkpoints(folder: Path, writers: list[FileSystemWriter]) -> int:
    """Save ones, twos and threes, each begun before the last save has ended; how many checkpoints are not
    what was saved."""
    under_way = []
    for number, writer in enumerate(writers, 1):
        planner = HeldPlanner()
        state = {"weight": torch.full((4,), float(number))}
        how = {"storage_writer": writer, "planner": planner, "process_group": dist.new_group([0])}
        under_way.append((planner, dcp.async_save(state, checkpoint_id=folder / str(number), **how)))
        planner.planned.wait()
        if number > 1:
            end(*under_way[-2])
    end(*under_way[-1])
    wrong = 0
    for number in range(1, len(writers) + 1):
        files = sorted(path.name for path in (folder / str(number)).glob("*"))
        loaded = {"weight": torch.zeros(4)}
        try:
            dcp.load(loaded, checkpoint_id=folder / str(number))
            holds = f"loaded {loaded['weight'].tolist()}"
        except dcp.CheckpointException:
            holds = "the load is refused"
        wrong += holds != f"loaded {[float(number)] * 4}"
        print(f"    save {number} reported success: files {files}, {holds}")
    return wrong


def end(planner: HeldPlanner, save: Future[Any]) -> None:
    planner.go_on.set()
    save.result()  # raises where a save fails


print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
    print("  a writer for each save")
    wrong = wrong_checkpoints(Path(one), [FileSystemWriter(one) for _ in range(3)])
    print("  one writer for all")
    wrong += wrong_checkpoints(Path(other), [FileSystemWriter(other)] * 3)
dist.destroy_process_group()
sys.exit(bool(wrong))
