"""After a load with a known defect: the results of a plain run that starts from the restored state."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Resumed
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import (
    has_local_experts,
    has_tensor_parallel_fsdp1,
    loads_alone,
    never_averages,
    shares_stager_or_writer,
    unfreeze,
)
from dcpbench.plugins.defects._other_run import as_resumed
from dcpbench.workloads import build_run
from dcpbench.workloads.build_run import copy_state
from dcpbench.workloads.run_state import State, live_state
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.world import World


def _has_state_in_low_precision(config: Config) -> bool:
    """docs/findings/state-in-low-precision.md"""
    return bool(config.model.name == "bf16")


def _loads_into_another_state(config: Config) -> bool:
    """docs/findings/gradients-at-load.md, docs/findings/scheduler-after-load.md"""
    return bool(config.load_into.name != "default")


_CAUSES = (
    never_averages,
    has_tensor_parallel_fsdp1,
    has_local_experts,
    shares_stager_or_writer,
    loads_alone,
    _has_state_in_low_precision,
    _loads_into_another_state,
)


def _applies(config: Config) -> bool:
    return any(cause(config) for cause in _CAUSES)


def _expected(cell: Cell, moment: Moment, reference: Resumed) -> Iterator[State]:
    yield as_resumed(cell, reference, trained_on(cell, reference))


def trained_on(cell: Cell, reference: Resumed) -> State:
    """Train on from the restored state, as ranks with the defect do."""
    config, restored = cell.config, reference.restored
    assert restored
    run = restored
    if never_averages(config) or has_local_experts(config):
        make = build_replica if never_averages(config) else build_run.build
        run = make(config, cell.world, config.seed)
        copy_state(restored, run)
    if has_tensor_parallel_fsdp1(config):
        unfreeze(run.model, build_run.plan_of(config, cell.world).tp_plan)
    run.train(reference.data, reference.until)
    return live_state(run)


def build_replica(config: Config, world: World, seed: int) -> TrainingRun:
    """Build a twin that divides its gradients by the number of shares and never sums them. Its losses are the
    mean over the ranks."""
    run = build_run.build_twin(config, world, seed)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / dp_degree(run.sizes))
    return run


defect = Defect(("resumed",), _applies, _expected)
