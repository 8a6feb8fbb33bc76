"""The process of an interpreter other than the driver's. It runs an executor that the driver controls.

It exits when the driver does, even if the driver is killed, and its ranks exit with it.
"""

import os
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from dcpbench.config.groups import ExecutorConfig
from dcpbench.executors.local import LocalEngine, LocalExecutor

Request = tuple[str, tuple[Any, ...]]
"""The name of an executor's method, and its arguments."""


def main(descriptor: int) -> None:
    """Carry out requests from a connection until `end`."""
    connection = Connection(descriptor)
    python, modules, gpus = connection.recv()
    engine = LocalEngine(ExecutorConfig())
    engine.begin(modules)
    executor = engine.executor(gpus)
    executor.python = python
    requests: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, executor), daemon=True).start()
    while True:
        method, arguments = requests.get()
        if method == "run":
            kind, spec, timeouts = arguments
            connection.send(executor.run(kind, spec, timeouts, lambda *phase: connection.send(phase)))
        elif method == "keep_only":
            executor.keep_only(*arguments)
        else:
            executor.end()
            engine.end()
            return


def _listen(connection: Connection, requests: SimpleQueue[Request], executor: LocalExecutor) -> None:
    """Queue requests, except an interrupt, which cannot wait for the end of a stage."""
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            os._exit(1)
        if method == "interrupt":
            executor.interrupt()
        else:
            requests.put((method, arguments))
