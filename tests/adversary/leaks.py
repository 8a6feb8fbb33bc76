"""Leaks of a cell into its rank, each of which would affect the next cell."""

import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _async_process_executor
from torch.overrides import TorchFunctionMode

from dcpbench.cell.cell import Cell
from dcpbench.scenarios.save_load import save_load


class _Halving(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function is nn.functional.linear else result


def _spin() -> None:
    while True:
        pass


_kept: list[Any] = []

LEAKS: dict[str, Callable[[], object]] = {
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "cached_plans": lambda: dcp.SavePlanner._cached_all_plans.update(DefaultSavePlanner=[]),
    "checkpoint_process": lambda: setattr(_async_process_executor, "_CHECKPOINT_PROCESS", mock.Mock()),
    "child": lambda: _kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])),
    "default_device": lambda: torch.set_default_device("meta"),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "descriptor": lambda: _kept.append(open("/dev/null")),  # noqa: SIM115, PTH123
    "destroyed_group": lambda: dist.destroy_process_group(list(dist.distributed_c10d._world.pg_names)[-1]),
    "folder": lambda: os.chdir("/"),
    "function_mode": lambda: _Halving().__enter__(),
    "hook": lambda: nn.modules.module.register_module_forward_hook(lambda _, __, out: out * 2),
    "limit": lambda: resource.setrlimit(
        resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    ),
    "no_grad": lambda: torch.set_grad_enabled(False),
    "path": lambda: sys.path.insert(0, "/nowhere"),
    "recursion_limit": lambda: sys.setrecursionlimit(150),
    "signal": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "stream": lambda: setattr(sys, "stdout", open(os.devnull, "w")),  # noqa: SIM115, PTH123
    "thread": lambda: threading.Thread(target=_spin, daemon=True).start(),
    "umask": lambda: os.umask(0o777),
    "variable": lambda: os.environ.update(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"),
    "warnings": lambda: warnings.simplefilter("error"),
}
"""By name."""
ENDED_WITH_THE_CELL = ("cached_plans", "checkpoint_process")
"""What the checkpointer that is closed then clears: nothing of it is left behind that could be told."""


def leaks(cell: Cell, what: str) -> None:
    """A healthy cell that leaves something behind."""
    save_load(cell)
    LEAKS[what]()
