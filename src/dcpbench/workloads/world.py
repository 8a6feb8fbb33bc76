"""The ranks that a cell runs on, as one of them sees it, and its share of their batches."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dcpbench.config.mesh import dp_degree, dp_rank
from dcpbench.verify.compare_layouts import gathered
from dcpbench.workloads.workload import Tensors, each_tensor


@dataclass
class World:
    """One rank's view of its world; meshes are kept from cell to cell.

    `checkpoint_group` is a gloo group of its own for checkpoints, and `group` one for what is compared or
    waited for meanwhile: collectives of a save that goes on would meet its own. Both are None where there is
    no process group.
    `training_group` is, on CPUs, what is used in training instead of the default group: gloo has one order of
    collectives for all of them, and a trainer may save in the background in the default group, as it may on
    GPUs, where training has NCCL's.
    A new mesh means new communicators, which cost more than a second on NCCL, so a rank that runs
    several cells makes each mesh once.
    """

    rank: int
    size: int
    device: torch.device
    checkpoint_group: dist.ProcessGroup | None
    group: dist.ProcessGroup | None
    training_group: dist.ProcessGroup | None = None
    compiled_for: str | None = None
    """What the graphs that Dynamo holds were compiled for."""
    _groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    _meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)

    def mesh(self, sizes: dict[str, int]) -> DeviceMesh | None:
        """The device mesh with these dimensions, outermost first; None where there are none."""
        if not sizes:
            return None
        key = tuple(sizes.items())
        if key not in self._meshes and self.training_group and len(sizes) == 1:
            self._meshes[key] = DeviceMesh.from_group(
                self.training_group, self.device.type, mesh_dim_names=tuple(sizes)
            )
        elif key not in self._meshes:
            # One that is named gives a dimension of all ranks a group of its own, and not the default one.
            backends: Any = dict.fromkeys(sizes, "gloo") if self.training_group else None
            self._meshes[key] = init_device_mesh(
                self.device.type,
                tuple(sizes.values()),
                mesh_dim_names=tuple(sizes),
                backend_override=backends,
            )
        return self._meshes[key]

    def submesh(self, sizes: dict[str, int], dimension: str) -> DeviceMesh:
        """One dimension of the device mesh of these sizes."""
        mesh = self.mesh(sizes)
        assert mesh is not None
        return mesh[dimension]

    def group_of(self, slot: int) -> dist.ProcessGroup | None:
        """The group for a save: slot 0 is for one that no other goes on beside. Of those that are under way
        at once each needs its own, or their collectives would meet each other's. It is made when it is first
        asked for, by all ranks."""
        if not slot or self.checkpoint_group is None:
            return self.checkpoint_group
        if slot not in self._groups:
            group: Any = dist.new_group(backend="gloo")
            self._groups[slot] = group
        return self._groups[slot]

    def share(self, sizes: dict[str, int], batch: Tensors) -> Tensors:
        """The samples of a global batch that this rank trains on, as many as any other on a mesh of these
        sizes.

        Raises:
            ValueError: they cannot be shared evenly.
        """
        degree, number = dp_degree(sizes), self.dp_rank(sizes)

        def part(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[0] % degree:
                raise ValueError(f"a batch of {tensor.shape[0]} samples does not divide over {degree} ranks")
            return tensor.chunk(degree)[number]

        return each_tensor(part, batch)

    def dp_rank(self, sizes: dict[str, int]) -> int:
        """Which share of the data this rank trains on."""
        return dp_rank(sizes, self.rank)

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            dist.barrier(self.group)

    def gathered(self, value: Any) -> list[Any]:
        """Return what every rank gives, by rank."""
        return gathered(value, self.group)

    def synchronize(self) -> None:
        """Wait for the device, so that a phase's time is its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mean(self, value: torch.Tensor) -> float:
        """Return the mean of a scalar over all ranks, summed in float64 on the CPU: among ranks that share a
        GPU a collective of NCCL takes many milliseconds."""
        total = value.detach().double().cpu()
        if self.group is not None:
            dist.all_reduce(total, group=self.training_group or self.group)
        return float(total.item()) / self.size
