"""Placement of ranks on hosts."""

import pytest

from dcpbench.plugins.hosts.placement import spread


@pytest.mark.parametrize(
    ("world_size", "hosts", "room", "placed"),
    [
        (4, None, {"a": 9, "b": 9}, {"a": range(2), "b": range(2, 4)}),
        (4, None, {"a": 9, "b": 9, "c": 9}, {"a": range(2), "b": range(2, 4)}),
        (3, None, {"a": 1, "b": 1, "c": 1}, {"a": range(1), "b": range(1, 2), "c": range(2, 3)}),
        (4, None, {"a": 1, "b": 4, "c": 2}, {"b": range(2), "c": range(2, 4)}),
        (5, None, {"a": 2, "b": 4}, {"a": range(2), "b": range(2, 5)}),
        (1, None, {"a": 4, "b": 4}, {"a": range(1)}),
        (4, None, {"a": 2}, None),
        (4, None, {}, None),
        (4, 2, {"a": 9, "b": 9, "c": 9}, {"a": range(2), "b": range(2, 4)}),
        (3, 2, {"a": 9, "b": 9}, {"a": range(2), "b": range(2, 3)}),
        (4, 2, {"a": 1, "b": 1, "c": 3}, {"a": range(1), "c": range(1, 4)}),
        (4, 2, {"a": 9}, None),
        (4, 2, {"a": 2, "b": 1, "c": 1}, None),
        (4, 2, {"a": 4, "b": 0}, None),
    ],
)
def test_neighbors_share_the_requested_hosts_evenly(
    world_size: int, hosts: int | None, room: dict[str, int], placed: dict[str, range] | None
) -> None:
    assert spread(world_size, room, hosts) == placed
