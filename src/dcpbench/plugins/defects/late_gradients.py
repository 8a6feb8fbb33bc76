"""Second derivatives under `fully_shard`: gradients are used a step late, and never if a load comes first
(docs/findings/second-derivatives-fsdp2.md)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Resumed
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp2_of_user
from dcpbench.plugins.defects._loads import exact_with
from dcpbench.plugins.defects._reductions import Gradients, Reductions
from dcpbench.verify.layout import called_modules
from dcpbench.verify.snapshot import named_parameters
from dcpbench.verify.training import TwinGradient, TwinGradients
from dcpbench.workloads.build_run import build, plan_of
from dcpbench.workloads.layers import layers_of_their_own
from dcpbench.workloads.parallelisms import fsdp2_per_layer
from dcpbench.workloads.run_state import State
from dcpbench.workloads.training_run import TrainingRun

_late_after: WeakKeyDictionary[nn.Module, dict[int, Gradients]] = WeakKeyDictionary()
"""The gradients that wait after each step of a twin, which are used in the next one."""


def _expected(
    cell: Cell, moment: Moment, reference: TwinGradients | Resumed
) -> Iterator[Mapping[str, Mapping[str, TwinGradient]] | State]:
    if isinstance(reference, TwinGradients):
        yield {reference.check: _delayed(cell, reference)}
    else:
        yield from _resumed(cell, reference)


def _delayed(cell: Cell, reference: TwinGradients) -> Mapping[str, TwinGradient]:
    """Return the twin's gradients, reduced when `fully_shard` reduces them; collective."""
    by_layer = cell.config.parallel.target.endswith(f".{fsdp2_per_layer.__name__}")
    patterns = plan_of(cell.config, cell.world).layers

    def reduce_late(model: nn.Module) -> None:
        # A step is made again for each use of gradients, with the same result.
        earlier = {step: one for step, one in _late_after.get(model, {}).items() if step < reference.step}
        before = earlier[max(earlier)] if earlier else {}
        late = {one: gradient.clone() for one, gradient in before.items()}
        _late_after[model] = {reference.step - 1: before, reference.step: late}
        for root in called_modules(model):
            inner = layers_of_their_own(root, patterns) if by_layer else []
            groups = {one: [*one.parameters()] for one in inner}
            held = {value for values in groups.values() for value in values}
            groups[root] = [*groups.get(root, ()), *(one for one in root.parameters() if one not in held)]
            Reductions(groups, late)

    if not (made := reference.after(reduce_late)):
        return {}
    nothing = {name: torch.zeros_like(twin.mean) for name, twin in reference.twins.items()}
    return {name: TwinGradient(none, none) for name, none in nothing.items()} | {**made}


def _resumed(cell: Cell, reference: Resumed) -> Iterator[State]:
    """Train on as loaded, if that is exact with the gradients that wait when the checkpoint is saved."""
    replayed = build(cell.config, cell.world, cell.config.seed)
    replayed.train(reference.data, reference.checkpoint.step)
    with _unsharded(replayed.model) as parameters:
        late = {name: one.grad for name, one in parameters.items() if one.grad is not None}
    if not any(cell.world.gathered(bool(late))):
        return

    def mend(run: TrainingRun) -> None:
        with _unsharded(run.model) as parameters:
            for name, gradient in late.items():
                parameters[name].grad = gradient

    yield from exact_with(cell, reference, mend)


@contextmanager
def _unsharded(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Context manager: the full parameters, by FQN, whose gradients have not been reduced."""
    sharded = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for one in sharded:
        one.unshard()
    try:
        yield named_parameters(model)
    finally:
        for one in sharded:
            one.reshard()


defect = Defect(("twin", "resumed"), fsdp2_of_user, _expected, from_before=False)
