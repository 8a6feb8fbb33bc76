"""Ranks on every host of a Ray cluster: one driver outside any rank, and on each host an actor that owns the
ranks there (`dcpbench.executors.host_agent`).

Ray starts the actors, carries calls, and tells when an actor or a host has died. Actors outlive the deaths of
ranks, and the driver those of actors and hosts. An actor that has died is replaced where its host is still
there; cells go on with the hosts that are left as long as there is room on them.
"""

import ray

from dcpbench.config.errors import ConfigError
from dcpbench.executors.base import Engine
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.placement import spread
from dcpbench.executors.ray_executor import RayExecutor
from dcpbench.executors.ray_hosts import START_S, RayHosts


class RayEngine(RayHosts, Engine):
    """The hosts of a Ray cluster."""

    def probe(self) -> Machine:
        described = [self.ask(host, "describe", wait_s=START_S) for host in self.hosts.values()]
        for host, one in zip(self.hosts.values(), described, strict=True):
            if one is None:
                raise ConfigError(f"executor=ray: host {host.name} did not start: {host.lost}")
            if one["torch"] != described[0]["torch"]:
                raise ConfigError(
                    f"executor=ray: torch is {one['torch']} on host {host.name} and {described[0]['torch']} "
                    f"on {described[0]['host']}; must be the same on every host"
                )
        gpus = sum(len(host.gpus) for host in self.hosts.values())
        of_first = {name: value for name, value in described[0].items() if name not in ("host", "address")}
        return Machine(gpus, {**of_first, "gpu_count": gpus, "hosts": described}, hosts=self._hosts_of)

    def _hosts_of(self, ranks: int, device: str) -> int:
        room = self.room(device, range(sum(len(host.gpus) for host in self.hosts.values())))
        return len(spread(ranks, room) or room)

    def executor(self, gpus: tuple[int, ...]) -> RayExecutor:
        return RayExecutor(self, self.next_number(), gpus)

    def end(self) -> None:
        if not ray.is_initialized():
            return
        for host in self.hosts.values():
            if not host.lost:
                self.ask(host, "end")
            ray.kill(host.actor)
        self.hosts.clear()
        ray.shutdown()
