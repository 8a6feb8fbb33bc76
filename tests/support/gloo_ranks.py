"""Four ranks that stay up and call what they are sent, for tests that try many small things on real ranks."""

import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from support.drivers import start_server

WORLD_SIZE = 4
NAME = "one of the ranks that stay up"
Ask = Callable[..., list[Any]]
"""Call a function of a module, with the same arguments, on every rank; what each returned, by rank."""


@contextmanager
def gloo_ranks() -> Iterator[Ask]:
    context = start_server()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [context.Pipe() for _ in range(WORLD_SIZE)]
    ranks = [
        context.Process(target=_serve, name=NAME, args=(rank, port, there), daemon=True)
        for rank, (_, there) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()

    def ask(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for here, _ in pipes:
            here.send((function, arguments))
        answers = [here.recv() if here.poll(120) else "no answer" for here, _ in pipes]
        for rank, (good, _) in enumerate(answers):
            assert good is True, f"rank {rank}: {answers[rank]}"
        return [answer for _, answer in answers]

    try:
        yield ask
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _serve(rank: int, port: int, connection: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    while True:
        function, arguments = connection.recv()
        try:
            connection.send((True, function(*arguments)))
        except Exception:  # noqa: BLE001 - the test is told
            connection.send((False, traceback.format_exc()))
