"""A rank that never joins its peers."""

import time
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from dcpbench.rank.messages import RankSpec


def main(connection: Connection, spec: RankSpec) -> None:
    """Run what a rank process runs, but keep rank 1 away."""
    from dcpbench.rank import main

    honest = main._join

    def join(*arguments: Any) -> Any:
        while spec.rank == 1:
            time.sleep(60)
        return honest(*arguments)

    with mock.patch.object(main, "_join", join):
        main.main(connection, spec)
