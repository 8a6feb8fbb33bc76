"""Pipeline parallelism: a rank's stage of the model, and the schedule that trains it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from dcpbench.config.groups import ParallelConfig
from dcpbench.workloads.batch import Batch

StageLoss = Callable[[nn.Module, Batch], torch.Tensor]


def keep_stage(model: nn.Module, mesh: DeviceMesh) -> None:
    """Remove the children of a sequential model that are not in this rank's stage. The rest keep their names.

    Raises:
        ValueError: there are fewer children than stages.
    """
    names = [name for name, _ in model.named_children()]
    stage, stages = mesh.get_local_rank(), mesh.size()
    if len(names) < stages:
        raise ValueError(f"parallel.pp={stages}: the model has {len(names)} layers")
    of_stage = names[len(names) * stage // stages : len(names) * (stage + 1) // stages]
    for name in names:
        if name not in of_stage:
            delattr(model, name)


class Pipeline:
    """The schedule of one rank's stage.

    Args:
        stage: the module with the layers of the stage, wrapped as it is trained.
        mesh: of the stages.
        loss: of a workload whose batches are pairs of inputs and targets.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh, config: ParallelConfig, loss: StageLoss) -> None:
        device = next(stage.parameters()).device
        self._stage = PipelineStage(stage, mesh.get_local_rank(), mesh.size(), device, group=mesh.get_group())
        schedule = get_schedule_class(config.pp_schedule)
        assert issubclass(schedule, PipelineScheduleSingle), (
            f"{config.pp_schedule} needs several stages a rank"
        )
        self._schedule = schedule(
            self._stage,
            config.pp_microbatches,
            # The output of the last stage is that of the model.
            loss_fn=lambda output, targets: loss(_Constant(output), (None, targets)),
        )

    def forward_backward(self, share: Batch) -> torch.Tensor:
        """Compute gradients for a rank's share of a batch. Return its loss, times the number of stages, on
        the last stage and zero on the others: the mean over all ranks is that of the batch."""
        inputs, targets = share
        losses: list[torch.Tensor] = []
        first, last = self._stage.is_first, self._stage.is_last
        given = {"target": targets, "losses": losses} if last else {}
        self._schedule.step(*([inputs] if first else []), **given)
        if not last:
            return torch.zeros((), device=inputs.device)
        return torch.stack(losses).mean() * self._stage.num_stages


class _Constant(nn.Module):
    """A model that returns an output which was computed before."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, _: object) -> torch.Tensor:
        return self._output
