"""dcp.async_save in a process, several at once of which one has to fail: whose future is told?

python process_answers.py
"""

import os
import sys
import tempfile
import warnings
from concurrent.futures import Future
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

ROUNDS = 20
LIMIT_S = 5
REFUSED = "Checkpoint already exists"
warnings.simplefilter("ignore")


def begin(path: Path) -> Future:
    return dcp.async_save(
        {"weight": torch.ones(2**20)},
        storage_writer=FileSystemWriter(path, overwrite=False),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )


def told(save: Future) -> str:
    try:
        save.result(timeout=LIMIT_S)
    except CheckpointException as error:
        return "refused" if REFUSED in str(error) else f"{error}"
    except (OSError, EOFError, RuntimeError, TimeoutError, UnpicklingError) as error:
        return type(error).__name__
    return "success"


def main(folder: Path) -> int:
    begin(folder / "before").result()  # and now the process is up
    wrong = 0
    for number in range(1, ROUNDS + 1):
        saves = {name: begin(folder / name) for name in (f"{number}-first", "before", f"{number}-last")}
        heard = {name: told(save) for name, save in saves.items()}
        if [*heard.values()] != ["success", "refused", "success"]:
            wrong += 1
            print(f"  round {number}: {', '.join(f'{name}: {answer}' for name, answer in heard.items())}")
            if "TimeoutError" in heard.values():
                break
    print(f"  {wrong} of {number} rounds are wrong")
    return wrong


if __name__ == "__main__":
    print(f"torch {torch.__version__}", flush=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as one:
        wrong = main(Path(one))
    sys.stdout.flush()
    os._exit(bool(wrong))  # a future that is told nothing would be waited for
