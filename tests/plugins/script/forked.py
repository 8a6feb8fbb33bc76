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
from dataclasses import asdict
from pathlib import Path

import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.utils.data.distributed  # noqa: F401

from dcpbench.plugins.script.record import Recording
from dcpbench.plugins.script.run import OUT, RECORDER, Command, Ended
from dcpbench.records.files import file_lengths
from dcpbench.records.store import write_json


class ForkedCommand(Command):
    """A command `python script.py …`, or `torchrun --nproc-per-node=N script.py …`."""

    def run(self, place, name, limit_s, stop=None, more=()) -> Ended:
        records, out, log = place / f"{name}-records", place / "out", place / f"{name}.log"
        records.mkdir()
        settings = place / f"{name}.json"
        known = {"records": str(records), "watched": str(out), "every": self.every}
        write_json(settings, known | {"stop": asdict(stop) if stop else {}})
        words = [word.replace(OUT, str(out)) for word in (*self.words, *more)]
        at = next(place for place, word in enumerate(words) if word.endswith(".py"))
        ranks = next((int(word[-1]) for word in words if word.startswith("--nproc-per-node")), 0)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        began = time.monotonic()
        pids = []
        for rank in range(ranks or 1):
            sys.stdout.flush()
            if not (pid := os.fork()):
                _child(words[at:], settings, log, rank if ranks else None, ranks, port)
            pids.append(pid)
        grace_s = self.grace_s if stop and stop.kind in ("term", "rank") else 0
        status = _wait(pids, records, limit_s, grace_s)
        recording = Recording.read(records, file_lengths(out))
        return Ended(status, time.monotonic() - began, log, recording, 0)


def _wait(pids: list[int], records: Path, limit_s: float, grace_s: float) -> int | None:
    left, status, deadline, signalled = set(pids), 0, time.monotonic() + limit_s, False
    while left:
        for pid in [*left]:
            ended, raw = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                code = os.waitstatus_to_exitcode(raw)
                if code:
                    status = status or code
                    _kill(left)
        if not signalled and any(path.suffix == "" for path in records.iterdir()):
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


def _child(words: list[str], settings: Path, log: Path, rank: int | None, ranks: int, port: int) -> None:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = words
        os.environ["DCPBENCH_SCRIPT"] = str(settings)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if rank is not None:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
        atexit._clear()
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
