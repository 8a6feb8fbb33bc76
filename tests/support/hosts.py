"""Several hosts on this machine: Ray's own simulated nodes, each with a loopback address of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from support.drivers import environment

_SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


class Hosts:
    """A cluster whose hosts are named by their addresses, from 127.0.0.2 on."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._last = 1
        self._cluster = Cluster()
        for _ in range(count):
            self.add()

    @property
    def words(self) -> tuple[str, str]:
        """What has a sweep run on them."""
        return "executor=ray", f"executor.address={self._cluster.address}"

    def add(self) -> None:
        """One more host, at the next address."""
        self._last += 1
        self._cluster.add_node(node_ip_address=f"127.0.0.{self._last}", **_SMALL)

    def end(self) -> None:
        """End all of them."""
        self._cluster.shutdown()


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts, until the end."""
    with mock.patch.dict(os.environ, environment()):
        made = Hosts(count)
    try:
        yield made
    finally:
        made.end()
