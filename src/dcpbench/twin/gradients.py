"""Comparison of a training step of a parallel run with the same step of an unwrapped twin that has the same
parameters: gradients within the rounding bound of their sum, the optimizer step bit for bit.

States that both have trained to cannot be compared closely, because Adam makes a step of full size out of a
gradient that is only rounding. So gradients are compared before the optimizer step, and then both sides step
on the same gradients.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcpbench.compare.leaves import Absence, differences_by_name, relative_distance
from dcpbench.compare.whole_tensors import real_elements
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.state import Name
from dcpbench.state.snapshot import EmptyShard, Leaf, Leaves, TensorLeaf, may_be_absent

_TIMES_NOISE, _TIMES_FACTOR = 16, 8
"""Limits of the difference of a gradient's elements, and of its factor, as multiples of the noise between two
jittered twins. 39 healthy runs needed at most 7.9 and 3.7."""
_LARGEST_FACTOR = 0.5
"""A gradient with a larger limit for its factor is mostly noise, so that the factor is not compared."""
_LARGEST_NOISE = 0.25
"""Nor is it compared if the noise has more than this fraction of the gradient's norm: `rms / norm` assumes
that errors of elements are independent, and those of a gradient of low rank are not. A vision transformer
whose class token attends to itself alone has key gradients of rounding, with any factor on a GPU."""

_OF_ELEMENTS = (Problem.differs, Problem.nan)
"""The problems that a tolerance of elements excuses."""
_OF_STEPS = {Problem.missing: Problem.only_twin, Problem.unexpected: Problem.only_parallel}
"""The problems of a step that other comparisons name otherwise."""


@dataclass(frozen=True)
class GradientBound:
    """The bound for the difference of a gradient from the twin's: the rounding of a sum of `parts` terms, in
    the dtype with this `eps`; with `noise`, also measured noise, if the twin cannot run the same kernels.
    Gradients that accumulate are summed `sums` times. Roundings of a statistic of many elements, by which
    each of them is then normalized, are `worst` times as large as the noise."""

    parts: int
    eps: float
    noise: bool
    sums: int = 1
    worst: float = 1.0

    @property
    def name(self) -> str:
        """Name of the bound in a row."""
        return "measured_noise" if self.noise else "rounding_of_sum"

    @property
    def control(self) -> float:
        """The fraction by which a gradient is changed in the negative control."""
        return 1.0 if self.noise else min(1.0, max(2**-6, 8 * (self.parts + 1) * self.sums * self.eps))


@dataclass(frozen=True)
class TwinGradient:
    """The twin's full gradient of a parameter, elements in float64, shape (elements,).

    Args:
        mean: the mean over the parts of the batch.
        tolerance: by element.
        factor_tolerance: of a common factor of all elements; None if noise hides a factor.
    """

    mean: torch.Tensor
    tolerance: torch.Tensor
    factor_tolerance: float | None = None

    @classmethod
    def of(
        cls, bound: GradientBound, total: torch.Tensor, size: torch.Tensor, *others: torch.Tensor
    ) -> "TwinGradient":
        """Return it from sums over the parts: of the gradients, of their magnitudes, and of the differences
        of jittered twins from the twin."""
        parts, eps = bound.parts, bound.eps
        mean = total / parts
        tolerance = (
            (parts + 1) * bound.sums * (eps * size / parts + torch.finfo(torch.float32).smallest_normal * eps)
        )
        if not bound.noise:
            return cls(mean, tolerance)
        noises = [bound.worst * other / parts for other in others]
        noise = torch.stack(noises).abs().amax(0)
        rms = float(noise.square().mean().sqrt())
        norm = float(mean.norm())
        factors = [abs(_factor(one, mean)) for one in noises] if norm else []
        least = (parts + 1) * bound.sums * torch.finfo(torch.float32).eps
        factor = _TIMES_FACTOR * max(*factors, rms / norm, least) if norm else math.inf
        comparable = factor < _LARGEST_FACTOR and float(noise.norm()) <= _LARGEST_NOISE * norm
        factor_tolerance = factor if comparable else None
        return cls(mean, tolerance + _TIMES_NOISE * noise.clamp(min=rms), factor_tolerance)

    def detects(self, relative_change: float) -> bool:
        """Return whether a gradient that is wrong by this fraction would be detected. One that consists of
        rounding cannot be distinguished from a wrong one."""
        if not bool(self.mean.any()):
            return True
        by_factor = self.factor_tolerance is not None and relative_change > 2 * self.factor_tolerance
        return by_factor or bool((relative_change * self.mean.abs() > 2 * self.tolerance).any())

    def perturbed(self, relative_change: float) -> "TwinGradient":
        """Return a gradient for the negative control, changed by this fraction; ones for a gradient of
        zeros."""
        other = self.mean * (1 + relative_change) if bool(self.mean.any()) else torch.ones_like(self.mean)
        return replace(self, mean=other)


@dataclass(frozen=True)
class TwinGradients:
    """The reference of a step's gradients.

    Args:
        twins: the twin's gradients of the global batch, by name.
        local: the twin's gradients of this rank's share of the batch, elements in float64.
        check: that compares them.
    """

    twins: Mapping[str, TwinGradient]
    local: Mapping[str, torch.Tensor]
    check: str = "gradient_close"


def _factor(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return float(difference @ reference) / float(reference @ reference)


@dataclass(frozen=True)
class GradientPart:
    """A rank's part of a parameter's gradient.

    Args:
        leaf: the rank's part of the parameter.
        local: None if the rank has no gradient.
        full: the full gradient, from all ranks.
    """

    leaf: TensorLeaf
    local: torch.Tensor | None
    full: torch.Tensor | None

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """Return this part of a full tensor, given and returned as elements in float64."""
        extent = self.leaf.extent
        if self.leaf.dtype.is_complex:
            pairs = torch.view_as_complex(elements.reshape(*extent.shape, 2).contiguous())
            return real_elements(extent.take(pairs))
        return extent.take(elements.reshape(extent.shape))


def compare_gradient(
    name: str, step: int, part: GradientPart, twin: TwinGradient | None
) -> tuple[Mismatch | None, float]:
    """Compare a part of a gradient with the twin's; None if the twin has none. A gradient of zeros equals a
    missing one, because parallelisms differ in that.

    Returns:
        the mismatch, if any, and the largest difference as a fraction of its tolerance.
    """
    facts: dict[str, Any] = {"step": step}
    if twin is None:
        wrong = part.local is not None and bool(part.local.any())
        return Mismatch(name, Problem.only_parallel, "gradient", facts=facts) if wrong else None, 0.0
    expected, tolerance = part.of(twin.mean), part.of(twin.tolerance)
    if not expected.numel():
        return None, 0.0
    here = torch.zeros_like(expected) if part.local is None else real_elements(part.local).to(expected.device)
    distance = (here - expected).abs()
    tolerance = tolerance.clamp(min=torch.finfo(torch.float64).tiny)
    used = float((distance / tolerance).max())
    if math.isnan(used):  # two infinities are equal, and two NaN, whose tolerance is NaN
        same = (here == expected) | (here.isnan() & expected.isnan())
        distance = distance.masked_fill(same, 0.0)
        used = float((distance / tolerance).masked_fill(same, 0.0).max())
    if not used <= 1:
        if part.local is None:
            return Mismatch(name, Problem.only_twin, "gradient", facts=facts), used
        farthest = float(distance.max())
        facts |= {
            "bounds": used,
            "share": relative_distance(farthest, float(twin.mean.abs().nan_to_num(0.0).max())),
        }
        problem = Problem.nan if math.isnan(farthest) else Problem.far
        return Mismatch(name, problem, "gradient", farthest, facts), used
    if twin.factor_tolerance is None or part.full is None:
        return None, used
    factor = _factor(real_elements(part.full).to(twin.mean.device) - twin.mean, twin.mean)
    by_factor = abs(factor) / twin.factor_tolerance
    if not by_factor <= 1:
        facts |= {"factor": 1 + factor, "share": abs(factor)}
        return Mismatch(name, Problem.far, "gradient", float(distance.max()), facts), by_factor
    return None, max(used, by_factor)


def is_close(name: str, twin: TwinGradient, part: GradientPart | Absence) -> bool:
    """Return whether a part of a gradient is within the tolerance of the twin's."""
    return isinstance(part, GradientPart) and compare_gradient(name, 0, part, twin)[0] is None


def compare_step(
    step: int,
    twin: Leaves,
    actual: Leaves,
    elsewhere: Collection[Name] = (),
    tolerances: Mapping[Name, torch.Tensor] | None = None,
    closely: bool = True,
) -> list[Mismatch]:
    """Compare the state after a step with the twin's, bit for bit.

    Args:
        twin: the complete state.
        actual: this rank's parts. An optimizer's entry for a parameter of which it has no element is ignored.
        elsewhere: names that only other ranks have.
        tolerances: by name, a full tensor with the tolerance of each element, if the step is not
            reproducible.
        closely: False for a control, which needs only the names.
    """
    tolerances = tolerances or {}
    here = {name: leaf for name, leaf in actual.items() if not isinstance(leaf, EmptyShard)}
    expected = {
        name: _part_of(leaf, here.get(name))
        for name, leaf in twin.items()
        if name in here or not (name in actual or name in elsewhere or may_be_absent(name, actual))
    }
    wrong = differences_by_name(expected, here, closely=closely)
    for name in wrong.keys() & tolerances.keys():
        if wrong[name].problem in _OF_ELEMENTS and _is_near(expected[name], here[name], tolerances[name]):
            del wrong[name]
    found = [wrong[name] for name in dict.fromkeys((*here, *expected)) if name in wrong]
    return [
        replace(
            one,
            problem=_OF_STEPS.get(one.problem, one.problem),
            max_abs_diff=None if one.problem is Problem.value else one.max_abs_diff,  # of tensors alone
            facts={"step": step, **one.facts},
        )
        for one in found
    ]


def _part_of(twin: Leaf, actual: Leaf) -> Leaf:
    """Return the rank's part of a leaf of the twin."""
    if type(twin) is not TensorLeaf or type(actual) is not TensorLeaf:
        return twin
    extent = actual.extent
    if twin.extent.shape != extent.shape:
        return twin
    is_whole = twin.extent is extent and twin.local.shape == actual.local.shape
    local = twin.local if is_whole else extent.take(twin.local).reshape(actual.local.shape)
    return TensorLeaf(local, extent, actual.placements, actual.kind)


def _is_near(expected: TensorLeaf, actual: TensorLeaf, tolerance: torch.Tensor) -> bool:
    distance = (expected.local.double() - actual.local.to(expected.local.device).double()).abs()
    return bool((distance.reshape(-1) <= actual.extent.take(tolerance)).all())


def measured_tolerances(
    twin: Leaves, others: Iterable[Leaves], times: float = 1.0
) -> dict[Name, torch.Tensor]:
    """Return the tolerance of each element after a step that is not reproducible, from the steps that
    `others` took with slightly different gradients, and `times` their difference. A rounding of the element's
    dtype is added, because it can go either way even if the other steps do not show it."""
    tolerances: dict[Name, torch.Tensor] = {}
    for other in others:
        for name, leaf in other.items():
            if isinstance(leaf, TensorLeaf) and leaf.dtype.is_floating_point:
                noise = (leaf.local.double() - twin[name].local.double()).abs()
                largest = tolerances.setdefault(name, torch.zeros_like(noise))
                torch.maximum(largest, noise, out=largest)
    return {
        name: times * _TIMES_NOISE * noise.clamp(min=float(noise.square().mean().sqrt()))
        + torch.finfo(twin[name].dtype).eps * twin[name].local.double().abs()
        for name, noise in tolerances.items()
        if noise.numel()
    }


def perturbed_beyond(leaves: Leaves, tolerances: Mapping[Name, torch.Tensor]) -> Leaves:
    """Return the leaves, with those that have a tolerance changed by more than it."""
    changed = {
        name: replace(leaf, local=(leaf.local.double() + 4 * float(tolerances[name].max())).to(leaf.dtype))
        for name, leaf in leaves.items()
        if isinstance(leaf, TensorLeaf) and name in tolerances and leaf.extent.numel
    }
    return {**leaves, **changed}
