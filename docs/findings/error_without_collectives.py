"""What the other ranks do when one of them cannot write, and the save is one without collectives.

python error_without_collectives.py

Two ranks save; the storage of rank 0 is full. Prints what each is told; exits with 1 if one of them waits
on after ten seconds.
"""

import multiprocessing
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

warnings.filterwarnings("ignore")
LIMIT_S = 10


class FullDisk(FileSystemWriter):
    def write_data(self, *_: Any) -> Any:
        raise OSError("no space left on device")


def save(rank: int, folder: str, use_collectives: bool) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    writer = (FullDisk if rank == 0 else FileSystemWriter)(f"{folder}/saved")
    state = {f"of rank {rank}": torch.ones(4)}
    try:
        dcp.save(state, storage_writer=writer, use_collectives=use_collectives)
        told = "success"
    except BaseException as error:  # noqa: BLE001
        told = f"{type(error).__name__}"
    Path(folder, f"told-{rank}").write_text(told)
    signal.pause()  # a trainer that handles its error lives on


def hangs(use_collectives: bool) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=save, args=(rank, folder, use_collectives)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        while not any(Path(folder).glob("told-*")):
            time.sleep(0.1)
        until = time.monotonic() + LIMIT_S
        while len([*Path(folder).glob("told-*")]) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        told = {rank: Path(folder, f"told-{rank}") for rank in range(2)}
        print(f"  use_collectives={use_collectives}")
        for rank, file in told.items():
            still = f"still waits after {LIMIT_S} s"
            print(f"    rank {rank}: {file.read_text() if file.exists() else still}")
        for process in ranks:
            process.kill()
            process.join()
        return not all(file.exists() for file in told.values())


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    sys.exit(any([hangs(True), hangs(False)]))
