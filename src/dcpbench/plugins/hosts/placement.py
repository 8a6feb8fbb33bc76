"""Which ranks of a world live on which host: neighbours together, and as many on one host as on another, so
that a mesh, whose innermost dimensions are those of neighbours, is sharded within hosts and replicated across
them."""

from collections.abc import Mapping
from typing import TypeVar

Host = TypeVar("Host")


def spread(world_size: int, room: Mapping[Host, int], exactly: int | None = None) -> dict[Host, range] | None:
    """The ranks that each host has: on as many hosts as there are for which they divide evenly, the roomiest
    first where not all are needed; None if there is no room.

    Args:
        room: how many ranks each host has room for.
        exactly: on how many hosts they have to be, evenly or not; at most one for each rank.
    """
    if exactly:
        return _shared_out(world_size, room, exactly)
    roomiest = sorted(room, key=lambda host: -room[host])
    for count in range(min(len(room), world_size), 0, -1):
        each, over = divmod(world_size, count)
        chosen = set(roomiest[:count])
        if not over and all(room[host] >= each for host in chosen):
            hosts = [host for host in room if host in chosen]  # in the order in which they are known
            return {host: range(number * each, (number + 1) * each) for number, host in enumerate(hosts)}
    return _packed(world_size, room)


def _shared_out(world_size: int, room: Mapping[Host, int], hosts: int) -> dict[Host, range] | None:
    """On that many hosts, the roomiest, as evenly as their room allows."""
    share: dict[Host, int] = {}
    for host in reversed(sorted(room, key=lambda host: -room[host])[:hosts]):
        share[host] = min(room[host], (world_size - sum(share.values())) // (hosts - len(share)))
    if len(share) < hosts or not all(share.values()):
        return None
    return _packed(world_size, {host: share[host] for host in room if host in share})


def _packed(world_size: int, room: Mapping[Host, int]) -> dict[Host, range] | None:
    """One host after the other, each full before the next."""
    placed: dict[Host, range] = {}
    first = 0
    for host, most in room.items():
        if first < world_size and most:
            placed[host] = range(first, min(first + most, world_size))
            first = placed[host].stop
    return placed if first == world_size else None
