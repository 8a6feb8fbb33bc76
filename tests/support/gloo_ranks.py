"""Four ranks that stay up and call what they are sent, for tests that try many small things on real ranks."""

import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from support import drivers

WORLD_SIZE = 4
kept = set[int]()
"""Their pids."""
Ask = Callable[..., list[Any]]
"""Call a function of a module, with the same arguments, on every rank; what each returned, by rank."""


@contextmanager
def gloo_ranks() -> Iterator[Ask]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [drivers.fork(_serve, rank, port) for rank in range(WORLD_SIZE)]

    kept.update(process.pid for _, process in ranks)

    def ask(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for here, _ in ranks:
            here.send((function, arguments))
        answers = [here.recv() if here.poll(120) else "no answer" for here, _ in ranks]
        for rank, (good, _) in enumerate(answers):
            assert good is True, f"rank {rank}: {answers[rank]}"
        return [answer for _, answer in answers]

    try:
        yield ask
    finally:
        for _, process in ranks:
            process.kill()
            process.wait()


def _serve(connection: Connection, _: object, rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    while True:
        function, arguments = connection.recv()
        try:
            connection.send((True, function(*arguments)))
        except Exception:  # noqa: BLE001 - the test is told
            connection.send((False, traceback.format_exc()))
