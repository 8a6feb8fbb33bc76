"""Runs scripts in forks of this process, which has imported torch: a case takes a second, not twenty.

What differs from a real run: the recorder starts after the import of torch, and this process, not torchrun,
starts the ranks and ends them when one of them dies.
"""

import atexit
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import BinaryIO

import numpy
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.data.distributed

from dcpbench.plugins.script.run import RECORDER, Command


class ForkedCommand(Command):
    """A command `python script.py …`, or `torchrun --nproc-per-node=N script.py …`."""

    def _status(self, words, output, settings, deadline, stop) -> int | None:
        at = next(place for place, word in enumerate(words) if word.endswith(".py"))
        ranks = next((int(word[-1]) for word in words if word.startswith("--nproc-per-node")), 0)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(ranks or 1):
            sys.stdout.flush()
            if not (pid := os.fork()):
                _child(words[at:], settings, output, rank if ranks else None, ranks, port)
            pids.append(pid)
        grace_s = self.grace_s if stop.startswith(("term", "rank")) else 0
        return _wait(pids, settings.with_name(f"{settings.stem}-records"), deadline, grace_s)


def _wait(pids: list[int], records: Path, deadline: float, grace_s: float) -> int | None:
    left, status, signalled = set(pids), 0, False
    while left:
        for pid in [*left]:
            ended, raw = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                code = os.waitstatus_to_exitcode(raw)
                if code:
                    status = status or code
                    _kill(left)
        if not signalled and any(records.glob("stopped-*")):
            signalled, deadline = True, time.monotonic() + grace_s
        if time.monotonic() > deadline:
            _kill(left)
            for other in left:
                os.waitpid(other, 0)
            return -signal.SIGKILL if signalled else None
        time.sleep(0.01)
    return status


def _kill(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _child(
    words: list[str], settings: Path, output: BinaryIO, rank: int | None, ranks: int, port: int
) -> None:
    code = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = words
        os.environ["DCPBENCH_SCRIPT"] = str(settings)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if rank is not None:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
        atexit._clear()
        torch.seed()  # forks have equal generators, processes have not
        numpy.random.seed()
        sys.path.insert(0, str(RECORDER))
        importlib.import_module("dcpbench_recorder").start(str(settings))
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)
