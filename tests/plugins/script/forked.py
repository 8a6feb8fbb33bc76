"""Runs scripts in forks of this process, which has imported torch: a case takes a second, not twenty.

What differs from a real run: the recorder starts after the import of torch, and this process, not torchrun,
starts the ranks and ends them when one of them dies.
"""

import atexit
import contextlib
import importlib
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import BinaryIO

import numpy
import psutil
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.data.distributed

from dcpbench.plugins.script.process import Process
from dcpbench.plugins.script.run import RECORDER, ScriptCommand


class ForkedCommand(ScriptCommand):
    """A command `python script.py …`, or `torchrun --nproc-per-node=N script.py …`."""

    def _started(self, words, settings, output) -> Process:
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
        return ForkedRanks(pids)


class ForkedRanks(Process):
    """Ranks that were forked from this process. If one fails, the others are ended."""

    def __init__(self, pids: list[int]) -> None:
        self._left, self._exit = set(pids), 0

    def poll(self) -> int | None:
        for pid in [*self._left]:
            ended, raw = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._left.discard(pid)
                code = os.waitstatus_to_exitcode(raw)
                if code:
                    self._exit = self._exit or code
                    for other in self._left:
                        os.kill(other, signal.SIGKILL)
        return None if self._left else self._exit

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            ranks = [psutil.Process(pid) for pid in self._left]
            return [*ranks, *(child for rank in ranks for child in rank.children(recursive=True))]
        return []

    def end(self) -> None:
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for pid in self._left:
            os.waitpid(pid, 0)
        self._left = set()


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
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(code)
