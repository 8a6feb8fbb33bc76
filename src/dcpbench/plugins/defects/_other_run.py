"""Another run with a known defect, which resumes as the run under test did and may round differently."""

from collections.abc import Mapping
from functools import cache, partial

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Resumed
from dcpbench.verify.compare import ABSENT, distances, same_leaves, same_value
from dcpbench.verify.losses import TOLERANCES, ResumedRule, compare_losses, loss_tolerance, rounding
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf, may_be_absent, of_kind
from dcpbench.workloads.run_state import State, live_state

_ROUNDINGS = 8
"""The largest difference that counts as close, in roundings of the parameters' dtype, if that is larger than
the tolerance of the cell. Each step rounds once more. In bfloat16 it is 6.3e-2."""

_DRAWN = {"loss": 0.02, "model_equal": 0.1, "optim_equal": 2.0}
"""Tolerances for a run with a known defect that draws different random numbers: of losses, as a fraction of
the loss, and of tensors, as a fraction of their largest magnitude."""

_RECORDED = {"train_state.losses", "train_state.current_loss"}
"""Names of the losses in a run's state."""


def as_resumed(cell: Cell, reference: Resumed, state: State) -> State:
    """Return the state that explains a resumed run, by that of another run. It has the values of the resumed
    run under the names of the losses that are close, and of the values that are the same."""
    run, rule = reference.run, reference.rule
    actual = {**live_state(run), rule.check: rule.by_name(reference.losses)}
    drawn = bool(run.draws and run.sizes)
    recorded = [*reference.before, *reference.losses]
    explained: State = {}
    share = TOLERANCES[cell.config.tolerance.value]
    same = cache(partial(same_state, recorded, actual, state))
    for check, leaves in actual.items():
        if check == rule.check:
            close = rule.tolerance or loss_tolerance(share, run.dtypes)
            names = same_losses(reference.losses, state, rule, _DRAWN["loss"] if drawn else close)
        else:
            names = same(_DRAWN.get(check, share) if drawn else share)
        explained[check] = {name: leaves.get(name, ABSENT) for name in names}
    return explained


def same_losses(losses: list[float], state: State, rule: ResumedRule, tolerance: float) -> set[str]:
    """Return the names of the resumed losses that are close to those of another run, which has this state now
    and can have been restored at another step."""
    theirs = state["extra_equal"]["train_state.losses"]
    theirs = theirs[len(theirs) - len(losses) :]
    far = {one.name for one in compare_losses(theirs, losses, rule.first, tolerance)}
    return rule.by_name(max(losses, rule.expected, key=len)).keys() - far


def same_state(
    recorded: list[float], own: Mapping[str, Leaves], state: Mapping[str, Leaves], tolerance: float
) -> set[str]:
    """Return the names in a resumed run's `own` state that equal another run's: tensors of model and
    optimizer closely, the rest bit for bit, and the losses if they are the recorded ones. Names that must be
    `ABSENT` equal if they are."""
    (tensors, objects), (own_tensors, own_objects) = map(_tensors_and_objects, (state, own))
    far = far_tensors(tensors, own_tensors, tolerance)
    names = tensors.keys() - far | same_leaves(objects, {**own_tensors, **own_objects})
    for check, leaves in state.items():
        absent = {name: leaf for name, leaf in leaves.items() if leaf is ABSENT}
        names |= same_leaves(absent, own.get(check, {}))
    losses, last = (own["extra_equal"][f"train_state.{name}"] for name in ("losses", "current_loss"))
    return names | _RECORDED if same_value([losses, last], [recorded, recorded[-1]]) else names - _RECORDED


def _tensors_and_objects(state: Mapping[str, Leaves]) -> tuple[Leaves, Leaves]:
    """Return the tensors of model, optimizer and component, and all other leaves of a run."""
    extra = state["extra_equal"]
    trained = {**state["model_equal"], **state["optim_equal"]}
    tensors = {**trained, **of_kind("param", extra), **of_kind("buffer", extra)}
    tensors = {name: leaf for name, leaf in tensors.items() if isinstance(leaf, TensorLeaf | Idle)}
    return tensors, {name: leaf for name, leaf in {**trained, **extra}.items() if name not in tensors}


def far_tensors(expected: Leaves, actual: Leaves, tolerance: float) -> list[str]:
    """Return the names of tensors whose part on this rank is missing, has another shape, or differs by more
    than `tolerance` of the largest magnitude in the full tensor. The tolerance is larger if the dtype of the
    parameters is coarse, and 0 for integers and flags.

    Args:
        expected: live state, complete on every rank or in the same parts.
        actual: live state, in parts on each rank. An optimizer's entries for a parameter without an element
            on this rank are ignored, because FSDP1 does not even count its steps.
    """
    full = {name: leaf for name, leaf in expected.items() if isinstance(leaf, TensorLeaf)}
    parts = {name: leaf for name, leaf in actual.items() if not isinstance(leaf, Idle)}
    coarsest = rounding(leaf.dtype for leaf in full.values() if leaf.kind == "param")
    far = []
    for name, leaf in full.items():
        part = parts.get(name)
        if part is None:
            is_far = not may_be_absent(name, actual)
        elif not isinstance(part, TensorLeaf) or part.extent.shape != leaf.extent.shape:
            is_far = True
        else:
            is_far = part.extent.numel > 0 and _is_far(leaf, part, _tolerance(leaf, tolerance, coarsest))
        far += [name] if is_far else []
    return far


def _tolerance(leaf: TensorLeaf, tolerance: float, coarsest: float) -> float:
    """Return the tolerance of a tensor. Optimizers compute their scalars in the scalars' dtype, and
    everything else from the parameters."""
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return 0.0
    if leaf.extent.shape:
        return max(tolerance, _ROUNDINGS * max(coarsest, rounding([leaf.dtype])))
    return tolerance


def _is_far(full: TensorLeaf, part: TensorLeaf, tolerance: float) -> bool:
    same_part = full.extent == part.extent
    expected = full.local.reshape(-1) if same_part else part.extent.take(full.local)
    value = part.local.reshape(-1).to(full.local.device)
    same = (expected == value) | (expected.isnan() & value.isnan())  # also for two infinities
    distance = float(distances(expected, value).masked_fill(same, 0.0).max().item())
    return not distance <= tolerance * _magnitude(full.local)


def _magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude in a tensor."""
    if tensor.element_size() == 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()  # for other dtypes `abs` is not defined, or can be negative
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
