"""Imported by the agents of the tests: what torch.compile does once in a process, before any rank is forked.

It imports a hundred modules and preprocesses torch's headers with the compiler before its first kernel, three
seconds on each of four fresh ranks. Ranks of a driver of a shell do all of it; tests of that start one.
"""

import sys
from contextlib import suppress
from importlib.util import find_spec

import torch
from torch._dynamo.utils import counters


def _twice(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ x).sum()


if find_spec("tqdm"):
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # a thread would not outlive the fork


def _prepare() -> None:
    limit = sys.getrecursionlimit()  # the compiler raises it, and drivers are forked too
    with suppress(Exception):  # without a compiler the cells that compile say so
        # Forward alone: a CUDA build refuses autograd in what is forked from a process that has used it.
        torch.compile(_twice)(torch.ones(4, 4))
    sys.setrecursionlimit(limit)
    torch._dynamo.reset()
    counters.clear()


_prepare()
