"""The store of torchrun, asked in a process of its own, since what owns a rank has no torch. The driver is
started from here too: this process waits for its end, also where torchrun has ended the one that asked.

Under the name of its run the store has where the `driver` listens and with what key, and, once that has
ended, its exit status, `ended`: below zero if a signal has ended it.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection

import torch.distributed as dist

from dcpbench.worker.main import let_server_go
from dcpbench.worker.messages import DRIVER_OF_TORCHRUN, ElasticRun

_DRIVER, _ENDED = "driver", "ended"


def main(connection: Connection, run: ElasticRun) -> None:
    """Answer `driver` and `ended` with what the store has, or None; start a driver for a list of words."""
    let_server_go()
    os.setsid()
    at = dist.TCPStore(run.store, run.port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(f"dcpbench/{run.id}", at)
    waiting: list[threading.Thread] = []
    with suppress(EOFError, OSError, dist.DistError):  # who asks has died, or torchrun
        while (asked := connection.recv()) is not None:
            if isinstance(asked, str):
                connection.send(json.loads(store.get(asked)) if store.check([asked]) else None)
            else:
                driver = _started(store, run, asked)
                waiting.append(threading.Thread(target=_wait, args=(store, driver)))
                waiting[-1].start()
                connection.send(None)
    for thread in waiting:
        thread.join()
    os._exit(0)


def _started(store: dist.Store, run: ElasticRun, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a driver with these words, and tell where it listens: at this host's address alone."""
    store.delete_key(_ENDED)
    key = secrets.token_hex(32)
    with socket.create_server((run.address, 0), backlog=1024) as listener:
        given = {"run": asdict(run), "key": key, "listener": listener.fileno()}
        driver = subprocess.Popen(
            [sys.executable, "-m", "dcpbench", *words],
            env={**os.environ, DRIVER_OF_TORCHRUN: json.dumps(given)},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        store.set(_DRIVER, json.dumps([run.address, listener.getsockname()[1], key]))
    return driver


def _wait(store: dist.Store, driver: subprocess.Popen[bytes]) -> None:
    """Tell how the driver ended, once it has."""
    status = driver.wait()
    with suppress(dist.DistError):  # torchrun ended before it
        store.set(_ENDED, json.dumps(status))
