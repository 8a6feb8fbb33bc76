"""A checkpoint is saved over an older one, and the process is killed before the n-th change of its files.

python overwritten_in_a_crash.py
"""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

warnings.simplefilter("ignore")


def save(step: int, folder: Path) -> None:
    state = {"a": torch.full((4,), float(step)), "b": torch.full((4,), float(step))}
    dcp.save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)


def killing(before: int) -> list[str]:
    """From now on this process is killed before so many changes of files have been made."""
    made: list[str] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Path, *args: Any) -> Any:
            if call.__name__ != "open" or "w" in args[0]:
                if len(made) == before:
                    os.kill(os.getpid(), signal.SIGKILL)
                made.append(f"{call.__name__} {path.name}")
            return call(path, *args)

        return called

    for name in ("open", "unlink", "rename"):
        setattr(Path, name, counted(getattr(Path, name)))
    return made


def load(folder: Path) -> str:
    loaded = {"a": torch.zeros(4), "b": torch.zeros(4)}
    try:
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        return f"refused ({type(next(iter(error.failures.values()))[0]).__name__})"
    return ", ".join(f"{name} of step {value[0]:.0f}" for name, value in loaded.items())


print(f"torch {torch.__version__}")
torch.distributed.checkpoint.state_dict_loader.logger.disabled = True
old = Path(tempfile.mkdtemp()) / "old"
save(1, old)
wrong = 0
for number in range(9):
    folder = old.parent / f"killed-{number}"
    shutil.copytree(old, folder)
    child = os.fork()
    if child == 0:
        made = killing(number)
        save(2, folder)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    found = load(folder)
    print(f"  {f'killed before change {number + 1}' if killed else 'not killed'}: {found}")
    wrong += found not in ("a of step 1, b of step 1", "a of step 2, b of step 2")
    if not killed:
        break
sys.exit(bool(wrong))
