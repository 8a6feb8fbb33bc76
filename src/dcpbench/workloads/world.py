"""The ranks of a cell, as one of them sees them, and its share of their batches."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dcpbench.compare.across_layouts import gathered_values
from dcpbench.compare.whole_tensors import Exchange
from dcpbench.config.mesh import dp_rank
from dcpbench.torch_private import SET_TIMEOUT

LARGE_MODEL_BYTES = 2**26
"""Models of more bytes are exchanged between the devices of the ranks."""
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Longer than any cell: the driver ends hangs, after it has collected every rank's stack."""


def new_group(ranks: Iterable[int] | None = None, backend: str = "gloo") -> Any:
    """Return a new process group of these ranks, or of all, with `COLLECTIVE_TIMEOUT`; collective."""
    return dist.new_group(None if ranks is None else [*ranks], COLLECTIVE_TIMEOUT, backend)


def with_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """Set `COLLECTIVE_TIMEOUT` in the groups of a mesh, for which torch has only a default; return it."""
    for group in mesh.get_all_groups():
        SET_TIMEOUT.value(COLLECTIVE_TIMEOUT, group)
    return mesh


@dataclass
class World:
    """One rank's view of the ranks of a stage. Groups are None where there is no process group.

    Args:
        rank: of this process.
        size: the number of ranks.
        device: of this rank.
        checkpoint_group: a gloo group for saves and loads.
        group: a gloo group for comparisons, so that they do not mix with collectives of a save in flight.
        training_group: on CPUs, used for training instead of the default group, in which a trainer may save
            in the background: gloo has one order of collectives for all threads. On GPUs training uses NCCL.
        compiled_for: identifies the models whose compiled graphs Dynamo keeps.
        kept_run: a run of an earlier cell on these ranks, see `dcpbench.cell.uninterrupted`.
    """

    rank: int
    size: int
    device: torch.device
    checkpoint_group: dist.ProcessGroup | None
    group: dist.ProcessGroup | None
    training_group: dist.ProcessGroup | None = None
    compiled_for: str | None = None
    kept_run: Any = None
    _groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    _meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    _on_several_hosts: bool | None = field(default=None, init=False)

    def mesh(self, sizes: dict[str, int]) -> DeviceMesh | None:
        """Return the device mesh with these dimensions, outermost first; None without dimensions. Meshes are
        reused across cells: the communicators of a new one take NCCL more than a second."""
        if not sizes:
            return None
        key = tuple(sizes.items())
        if key not in self._meshes and self.training_group and len(sizes) == 1:
            self._meshes[key] = DeviceMesh.from_group(
                self.training_group, self.device.type, mesh_dim_names=tuple(sizes)
            )
        elif key not in self._meshes:
            # With a named backend a dimension of all ranks gets a group of its own, not the default one.
            backends: Any = dict.fromkeys(sizes, "gloo") if self.training_group else None
            mesh = init_device_mesh(
                self.device.type,
                tuple(sizes.values()),
                mesh_dim_names=tuple(sizes),
                backend_override=backends,
            )
            self._meshes[key] = with_timeout(mesh)
        return self._meshes[key]

    def group_of(self, slot: int) -> dist.ProcessGroup | None:
        """Return the process group for a save; the first call for a slot is collective. Slot 0 is for saves
        that do not overlap. Saves in flight at the same time need separate groups, or their collectives
        mix."""
        if not slot or self.checkpoint_group is None:
            return self.checkpoint_group
        if slot not in self._groups:
            self._groups[slot] = new_group()
        return self._groups[slot]

    def dp_rank(self, sizes: dict[str, int]) -> int:
        """Return the number of the data share that this rank trains on."""
        return dp_rank(sizes, self.rank)

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.group is not None:
            dist.barrier(self.group)

    def all_meet(self, within_s: float) -> bool:
        """Return whether all ranks make this call within these seconds; others may be in a collective of
        another group."""
        if self.checkpoint_group is None:
            return True
        barrier = dist.barrier(self.checkpoint_group, async_op=True)
        assert barrier is not None
        try:
            barrier.wait(timedelta(seconds=within_s))
        except RuntimeError:
            return False
        return True

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; collective."""
        return gathered_values(value, self.group)

    def any_rank(self, value: object) -> bool:
        """Return whether the value is true on any rank; collective."""
        return self.summed([bool(value)]) != [0.0]

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Sum numbers elementwise over the ranks, in float64 on the CPU; collective. Among ranks that share a
        GPU, NCCL would take many milliseconds."""
        totals = torch.tensor(numbers, dtype=torch.float64)
        if self.group is not None:
            dist.all_reduce(totals, group=self.training_group or self.group)
        sums: list[float] = totals.tolist()
        return sums

    def exchange_of(self, model: nn.Module) -> Exchange:
        """Choose how ranks exchange the tensors of a model: on the CPU, those of large ones on their
        devices."""
        nbytes = sum(math.prod(parameter.shape) * parameter.itemsize for parameter in model.parameters())
        if self.group is not None and self.device.type != "cpu" and nbytes > LARGE_MODEL_BYTES:
            return Exchange(dist.group.WORLD, self.device)
        return Exchange(self.group)

    def on_several_hosts(self, host: str | None) -> bool:
        """Return whether the ranks are on several hosts, this one on `host`; the first call is collective."""
        if self._on_several_hosts is None:
            self._on_several_hosts = len({*self.gathered(host)}) > 1
        return self._on_several_hosts

    def synchronize(self) -> None:
        """Wait for the work on the device, before a time is taken."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def means(self, values: Sequence[torch.Tensor], samples: Sequence[int]) -> list[float]:
        """Return the mean of each scalar over all ranks, weighted by each rank's number of samples;
        collective."""
        numbers = torch.stack([scalar.detach().double().cpu().reshape(()) for scalar in values])
        weights = torch.tensor(samples, dtype=torch.float64)
        totals = self.summed(torch.cat([weights * numbers, weights]).tolist())
        return [total / weight for total, weight in zip(totals, totals[len(samples) :], strict=False)]
