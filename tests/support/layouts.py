"""Layouts with a defect, for cells that must see it."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dcpbench.config.groups import ParallelConfig
from dcpbench.workloads import parallelisms


def experts_unscaled(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Experts whose gradients are not divided by the number of ranks whose samples they are of."""
    wrapped = parallelisms.expert_parallel(model, mesh, config)
    wrapped.experts.set_gradient_divide_factor(1)  # type: ignore[union-attr, operator]
    return wrapped


def stages_alike(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Stages that each call their first layer `net1`, and so on."""
    stage = parallelisms.pipeline(model, mesh, config)
    own = dict(stage.named_children())
    for name in own:
        delattr(stage, name)
    for number, layer in enumerate(own.values(), start=1):
        stage.add_module(f"net{number}", layer)
    return stage
