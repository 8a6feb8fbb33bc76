"""Mesh arithmetic: the dimensions of a mesh, their sizes, and the ranks' shares of the data."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from dcpbench.config.errors import ConfigError

REST = -1
"""The mesh size of a dimension that takes the rest of the world size."""

Dimension = StrEnum("Dimension", "pp dp_replicate dp_shard ep tp")
"""The dimensions of a mesh: pipeline stages, replicas, shards, experts, tensors."""

SHARE_DATA = (Dimension.pp, Dimension.tp)
"""The dimensions along which all ranks train on the same samples."""


def mesh_sizes(
    parallel: str, mesh: Sequence[str], given: Mapping[str, int], world_size: int
) -> dict[str, int]:
    """Return the size of each dimension of `mesh` on `world_size` ranks, outermost first; `given` has the
    sizes of all dimensions.

    Raises:
        ConfigError: a size is not positive, is of a dimension that the mesh lacks, or the sizes do not
            multiply to the world size.
    """
    for name, size in given.items():
        if name not in mesh and size != 1:
            has = f"no {name} dimension ({' × '.join(mesh) or 'no mesh'})"
            raise ConfigError(f"parallel.{name}={size}: parallel={parallel} has {has}")
    if unknown := [name for name in mesh if name not in given]:
        known = ", ".join(given)
        raise ConfigError(f"parallel.mesh: unknown dimension {unknown[0]!r}; known are {known}")
    sizes = {name: given[name] for name in mesh}
    for name, size in sizes.items():
        if size < 1 and size != REST:
            raise ConfigError(f"parallel.{name}={size}: a mesh size is at least 1, or -1 for the rest")
    rest = [name for name, size in sizes.items() if size == REST]
    if len(rest) > 1:
        raise ConfigError(f"parallel: only one of {', '.join(rest)} may be -1 (the rest)")
    wanted = " × ".join(f"{name}={size}" for name, size in sizes.items())
    fixed = math.prod(size for size in sizes.values() if size != REST)
    if rest and world_size % fixed == 0:
        sizes[rest[0]] = world_size // fixed
    if sizes and math.prod(sizes.values()) != world_size:
        how = "cannot be made to multiply" if rest else f"multiplies to {fixed}, not"
        why = f", which is not a multiple of {fixed}" if rest else ""
        reason = f"the mesh {wanted} {how} to the world size {world_size}{why}"
        raise ConfigError(f"parallel={parallel}: {reason}")
    return sizes


def dp_degree(sizes: Mapping[str, int]) -> int:
    """Return how many parts a global batch has on a mesh of these sizes: one without a mesh."""
    return math.prod(size for name, size in sizes.items() if name not in SHARE_DATA)


def dp_rank(sizes: Mapping[str, int], rank: int) -> int:
    """Return the number of a rank's part of a global batch, given the mesh sizes, outermost first."""
    number, stride = 0, 1
    for name, size in reversed([*sizes.items()]):
        rank, coordinate = divmod(rank, size)
        if name not in SHARE_DATA:
            number += coordinate * stride
            stride *= size
    return number
