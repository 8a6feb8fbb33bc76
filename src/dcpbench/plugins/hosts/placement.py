"""Place the ranks of a world on hosts: neighbors together, and equal numbers on each host. So a mesh, whose
innermost dimensions consist of neighbors, is sharded within hosts and replicated across them."""

from collections.abc import Mapping
from typing import TypeVar

Host = TypeVar("Host")


def spread(world_size: int, room: Mapping[Host, int], exactly: int | None = None) -> dict[Host, range] | None:
    """Return the ranks of each host; None if there is no room. Uses as many hosts as divide the ranks evenly,
    preferring those with the most slots.

    Args:
        room: number of slots of each host.
        exactly: required number of hosts, even if they do not divide the ranks; at most one per rank.
    """
    if exactly:
        return _shared_out(world_size, room, exactly)
    roomiest = sorted(room, key=lambda host: -room[host])
    for count in range(min(len(room), world_size), 0, -1):
        per_host, over = divmod(world_size, count)
        chosen = set(roomiest[:count])
        if not over and all(room[host] >= per_host for host in chosen):
            hosts = [host for host in room if host in chosen]  # in the order of `room`
            return {
                host: range(number * per_host, (number + 1) * per_host) for number, host in enumerate(hosts)
            }
    return _packed(world_size, room)


def _shared_out(world_size: int, room: Mapping[Host, int], hosts: int) -> dict[Host, range] | None:
    """Place the ranks on `hosts` hosts, those with the most slots, as evenly as their slots allow."""
    share: dict[Host, int] = {}
    for host in reversed(sorted(room, key=lambda host: -room[host])[:hosts]):
        share[host] = min(room[host], (world_size - sum(share.values())) // (hosts - len(share)))
    if len(share) < hosts or not all(share.values()):
        return None
    return _packed(world_size, {host: share[host] for host in room if host in share})


def _packed(world_size: int, room: Mapping[Host, int]) -> dict[Host, range] | None:
    """Fill one host after the other."""
    placed: dict[Host, range] = {}
    first = 0
    for host, most in room.items():
        if first < world_size and most:
            placed[host] = range(first, min(first + most, world_size))
            first = placed[host].stop
    return placed if first == world_size else None
