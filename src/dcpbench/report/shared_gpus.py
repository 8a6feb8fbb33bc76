"""Sentences about ranks that shared GPUs, for the terminal and the page."""

from collections.abc import Iterable, Mapping
from typing import Any


def shared_gpu_sentences(
    rows: Iterable[Mapping[str, Any]], environments: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return how ranks shared GPUs in these rows, and what that does not test."""
    versions = ", ".join(dict.fromkeys(str(one["nccl"]) for one in environments if one.get("nccl")))
    how = {(row["ranks_per_gpu"], row["backend"]) for row in rows if (row["ranks_per_gpu"] or 0) > 1}
    return [
        f"{ranks} ranks shared each GPU (gloo): NCCL, NVLink and peer copies were not tested"
        if backend == "gloo"
        else f"{ranks} ranks shared each GPU (NCCL {versions}): NVLink and peer copies were not tested"
        for ranks, backend in sorted(how)
    ]
