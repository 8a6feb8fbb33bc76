"""The process of another interpreter than the driver's: an executor of its own, which does as it is told.

It ends when the driver does, however that ends, and its ranks with it.
"""

import os
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from dcpbench.config.groups import ExecutorConfig
from dcpbench.executors.local import LocalEngine, LocalExecutor

Request = tuple[str, tuple[Any, ...]]
"""The name of a method of an executor, and what it is called with."""


def main(descriptor: int) -> None:
    """Do what comes over a connection, until it says `end`."""
    connection = Connection(descriptor)
    python, modules, gpus = connection.recv()
    engine = LocalEngine(ExecutorConfig())
    engine.begin(modules)
    executor = engine.executor(gpus)
    executor.python = python
    requests: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests, executor), daemon=True).start()
    while True:
        what, arguments = requests.get()
        if what == "run":
            kind, spec, timeouts = arguments
            connection.send(executor.run(kind, spec, timeouts, lambda *phase: connection.send(phase)))
        elif what == "keep_only":
            executor.keep_only(*arguments)
        else:
            executor.end()
            engine.end()
            return


def _listen(connection: Connection, requests: SimpleQueue[Request], executor: LocalExecutor) -> None:
    """Pass on what is asked for; an interrupt cannot wait until a stage has ended."""
    while True:
        try:
            what, arguments = connection.recv()
        except EOFError:
            os._exit(1)
        if what == "interrupt":
            executor.interrupt()
        else:
            requests.put((what, arguments))
