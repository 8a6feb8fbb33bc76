"""Mesh arithmetic: how large each dimension of a device mesh is on so many ranks."""

import math
from collections.abc import Mapping, Sequence

from dcpbench.config.errors import ConfigError

DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
REST = -1
"""A mesh size that stands for whatever the other dimensions leave of the world size."""


def mesh_sizes(
    parallel: str, mesh: Sequence[str], given: Mapping[str, int], world_size: int
) -> dict[str, int]:
    """The size of each dimension of a mesh, outermost first.

    Args:
        parallel: the name of the parallelism, for messages.
        mesh: the dimensions that it has, out of `DIMENSIONS`; none means a replica on every rank.
        given: the size that is asked for of each of `DIMENSIONS`, one of which may be `REST`.

    Raises:
        ConfigError: the sizes are not positive, name a dimension that the mesh does not have, or do not
            multiply to the world size.
    """
    for name, size in given.items():
        if name not in mesh and size != 1:
            has = " × ".join(mesh) or "no mesh"
            raise ConfigError(f"parallel.{name}={size}: parallel={parallel} has no {name} dimension ({has})")
    if unknown := [name for name in mesh if name not in given]:
        raise ConfigError(
            f"parallel.mesh: unknown dimension {unknown[0]!r}; known are {', '.join(DIMENSIONS)}"
        )
    sizes = {name: given[name] for name in mesh}
    if not sizes:
        return {}
    for name, size in sizes.items():
        if size < 1 and size != REST:
            raise ConfigError(f"parallel.{name}={size}: a mesh size is at least 1, or -1 for the rest")
    rest = [name for name, size in sizes.items() if size == REST]
    if len(rest) > 1:
        raise ConfigError(f"parallel: only one of {', '.join(rest)} may be -1 (the rest)")
    fixed = math.prod(size for size in sizes.values() if size != REST)
    wanted = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if rest and world_size % fixed == 0:
        sizes[rest[0]] = world_size // fixed
    if math.prod(sizes.values()) != world_size:
        verb = "cannot be made to multiply" if rest else "multiplies"
        amount = "" if rest else f" to {fixed}, not"
        raise ConfigError(
            f"parallel={parallel}: the mesh {wanted} {verb}{amount} to the world size {world_size}"
        )
    return sizes


def dp_degree(sizes: Mapping[str, int], world_size: int) -> int:
    """How many parts a global batch has on a mesh of these sizes: tp shares its data, and without a
    mesh every rank sees the whole."""
    return world_size // sizes.get("tp", 1) if sizes else 1
