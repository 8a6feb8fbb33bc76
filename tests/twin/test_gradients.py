"""A training step compared with a twin's: only differences that rounding explains pass."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dcpbench.compare.controls import names_of_control, perturbed_leaves
from dcpbench.compare.losses import batch_loss_tolerance
from dcpbench.compare.whole_tensors import dense, magnitudes, real_elements
from dcpbench.core.mismatch import TWIN, Mismatch, Problem
from dcpbench.core.sentences import describe
from dcpbench.core.state import Name, text_of
from dcpbench.state.layout import Extent, whole
from dcpbench.state.snapshot import EmptyShard, Leaves, TensorLeaf, snapshot_model
from dcpbench.twin.gradients import (
    GradientBound,
    GradientPart,
    TwinGradient,
    compare_gradient,
    compare_step,
    measured_tolerances,
    perturbed_beyond,
)
from support.models import Adversarial

EPS = torch.finfo(torch.float32).eps
PARTS = 4
ROUNDING = GradientBound(PARTS, EPS, noise=False)
NOISE = GradientBound(PARTS, EPS, noise=True)
ROW = Extent((2, 3), (1, 0), (1, 3), 0, 3)


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return gradients of the parts of a batch, of very different magnitudes."""
    torch.manual_seed(3)
    scales = torch.logspace(-6, 3, 6).reshape(2, 3)
    return [(torch.randn(2, 3) * scales).to(dtype) for _ in range(PARTS)]


def twin_of(
    terms: list[torch.Tensor], bound: GradientBound = ROUNDING, *noises: torch.Tensor
) -> TwinGradient:
    elements = [real_elements(one) for one in terms]
    total, size = sum(elements), sum(one.abs() for one in elements)
    assert isinstance(total, torch.Tensor)
    assert isinstance(size, torch.Tensor)
    return TwinGradient.of(bound, total, size, *map(real_elements, noises))


def part_of(value: torch.Tensor | None, extent: Extent | None = None, like: Any = None) -> GradientPart:
    """Return a full gradient, or a rank's part of it."""
    tensor = torch.zeros(2, 3) if like is None else like
    tensor = tensor if value is None else value
    extent = extent or whole(tensor)
    leaf = TensorLeaf(extent.take(tensor), extent, None, "param")
    return GradientPart(leaf, None if value is None else extent.take(value), value)


def seen(value: torch.Tensor | None, twin: TwinGradient | None, **where: Any) -> Mismatch | None:
    return compare_gradient("w", 2, part_of(value, **where), twin)[0]


def mean(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for one in terms[1:]:
        total = total + one
    return total / PARTS


def test_summation_order_is_within_the_bound() -> None:
    terms = gradients()
    twin = twin_of(terms)
    for order in (terms, terms[::-1], [*terms[2:], *terms[:2]]):
        finding, used = compare_gradient("w", 1, part_of(mean(order)), twin)
        assert finding is None
        assert used < 1
    pairs = (terms[0] + terms[1]) / PARTS + (terms[2] + terms[3]) / PARTS
    assert seen(pairs, twin) is None


@pytest.mark.parametrize("factor", [1.001, 0.999, 1 / 1.01, PARTS, 1 / PARTS, 0.0])
def test_factor_is_not_rounding(factor: float) -> None:
    terms = gradients()
    finding = seen(mean(terms) * factor, twin_of(terms))
    assert finding is not None
    assert (finding.name, finding.kind, finding.problem) == ("w", "gradient", Problem.far)
    assert describe(finding).startswith("in step 2, ")
    assert finding.facts["bounds"] > 1


def test_each_element_has_its_own_tolerance() -> None:
    """The smallest is a billionth of the largest, and is still compared."""
    terms = gradients()
    wrong = mean(terms)
    smallest = int(wrong.abs().argmin())
    wrong.view(-1)[smallest] *= 1.001
    assert seen(wrong, twin_of(terms)) is not None
    assert seen(wrong, twin_of(terms), extent=Extent((2, 3), (0, 0), (1, 3), 0, 3)) is not None
    assert seen(wrong, twin_of(terms), extent=ROW) is None, "a rank looks at its part"


def test_cancelling_terms_widen_the_bound() -> None:
    """A key's bias has a gradient that is only rounding: its bound depends on the terms."""
    terms = [torch.full((2, 3), one) for one in (1.0, -1.0, 1.0, -1.0)]
    twin = twin_of(terms)
    assert seen(torch.full((2, 3), EPS), twin) is None
    assert seen(torch.full((2, 3), 4 * EPS * PARTS), twin) is not None
    assert not twin_of([*terms[:3], terms[3] * (1 + EPS)]).detects(ROUNDING.control), "it is rounding alone"


def test_missing_gradient_equals_zeros() -> None:
    terms = gradients()
    zeros = twin_of([torch.zeros(2, 3)] * PARTS)
    assert seen(None, None) is None
    assert seen(torch.zeros(2, 3), None) is None
    assert seen(None, zeros) is None
    assert seen(torch.zeros(2, 3), zeros) is None
    only_here, only_twin = seen(mean(terms), None), seen(None, twin_of(terms))
    assert only_here is not None
    assert only_twin is not None
    assert [only_here.problem, only_twin.problem] == [Problem.only_parallel, Problem.only_twin]
    assert describe(only_here) == "in step 2, the parallel model has it, the twin does not"
    assert seen(torch.full((2, 3), 1e-30), zeros) is not None
    empty = torch.zeros(0, 3)
    nothing = twin_of([empty] * PARTS)
    assert compare_gradient("w", 1, part_of(empty), nothing) == (None, 0.0)
    here = Extent((2, 3), (2, 0), (0, 3), 0, 0)
    assert seen(mean(terms) * 2, twin_of(terms), extent=here) is None, "of which this rank has nothing"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_equals_only_nan(value: float) -> None:
    terms = gradients()
    broken = mean(terms)
    broken[1, 1] = value
    finding = seen(broken, twin_of(terms))
    assert finding is not None
    assert finding.problem is (Problem.nan if math.isnan(value) else Problem.far)
    terms[0][1, 1] = value
    assert seen(broken, twin_of(terms)) is None
    assert seen(mean(gradients()), twin_of(terms)) is not None
    wrong = broken.clone()
    wrong[0] *= 1.001
    assert seen(wrong, twin_of(terms)) is not None, "of the others it hides nothing"


def test_both_parts_of_complex_gradients_are_compared() -> None:
    terms = [torch.complex(one, other) for one, other in zip(gradients(), gradients()[::-1], strict=True)]
    twin = twin_of(terms)
    assert seen(mean(terms), twin) is None
    assert seen(mean(terms), twin, extent=ROW) is None
    for factor in (torch.complex(torch.tensor(1.0), torch.tensor(1e-3)), 1.001):
        assert seen(mean(terms) * factor, twin) is not None
        assert seen(mean(terms) * factor, twin, extent=ROW) is not None
    conjugated = mean(terms).conj()
    assert seen(conjugated, twin) is not None


def test_bfloat16_reduction_has_its_rounding_bound() -> None:
    coarse = torch.finfo(torch.bfloat16).eps
    bound = GradientBound(PARTS, coarse, noise=False)
    terms = gradients(torch.bfloat16)
    reduced = mean(terms)
    assert reduced.dtype == torch.bfloat16
    twin = twin_of(terms, bound)
    assert seen(reduced, twin) is None
    assert seen(reduced, twin_of(terms)) is not None, "it is no gradient of float32"
    assert seen(reduced * 1.5, twin) is not None
    assert twin.detects(bound.control)
    assert seen(reduced, twin.perturbed(bound.control)) is not None


def noises(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the differences of two jittered twins from the twin, summed over the parts."""
    torch.manual_seed(5)
    one, other = (torch.randn(2, 3) * scale for _ in range(2))
    return one, other


def test_measured_noise_is_tolerated() -> None:
    terms = [torch.ones(2, 3) + torch.rand(2, 3) for _ in range(PARTS)]
    twin = twin_of(terms, NOISE, *noises(1e-4))
    rms = float(torch.stack(noises(1e-4)).abs().amax(0).square().mean().sqrt()) / PARTS
    signs = torch.tensor([[1.0, -1, 1], [-1, 1, -1]])
    assert seen(mean(terms) + 8 * rms * signs, twin) is None
    assert seen(mean(terms) + 8 * rms * signs, twin_of(terms)) is not None, "none is allowed to rounding"
    far = mean(terms)
    far[0, 0] += 100 * rms
    finding = seen(far, twin)
    assert finding is not None
    assert "bounds" in finding.facts


@pytest.mark.parametrize("seed", range(5))
def test_bound_counts_repeated_rows(seed: int) -> None:
    """Ranks sum the rows of a sparse gradient in another order than the twin; a wrong row is still seen."""
    draw = torch.Generator().manual_seed(seed)
    indices = [torch.randint(3, (1, 400), generator=draw) for _ in range(PARTS)]
    terms = [
        torch.sparse_coo_tensor(one, torch.randn(400, 2, generator=draw), (3, 2), check_invariants=True)
        for one in indices
    ]
    total, size = (
        torch.stack([each(one) for one in terms]).sum(0)
        for each in (lambda one: real_elements(dense(one)), magnitudes)
    )
    twin = TwinGradient.of(ROUNDING, total, size)
    by_rank = torch.stack([one.coalesce().to_dense() for one in terms]).sum(0) / PARTS
    assert seen(by_rank, twin) is None
    assert seen(by_rank, TwinGradient.of(ROUNDING, total, total.abs())) is not None, (
        "no other bound is needed"
    )
    by_rank[1, 1] *= 1 + ROUNDING.control
    assert seen(by_rank, twin) is not None


def test_factor_is_detected_despite_noise() -> None:
    """Single elements are allowed to differ far more than all of them by a common factor."""
    torch.manual_seed(1)
    terms = [torch.ones(64, 64) + torch.rand(64, 64) for _ in range(PARTS)]
    noise = [torch.randn(64, 64) * 1e-3 for _ in range(2)]
    twin = twin_of(terms, NOISE, *noise)
    assert twin.factor_tolerance is not None
    assert twin.factor_tolerance < 1e-3
    signs = torch.randn(64, 64).sign()
    assert seen(mean(terms) + 2e-3 * signs, twin) is None
    finding = seen(mean(terms) * 1.001, twin)
    assert finding is not None
    assert finding.facts["factor"] == pytest.approx(1.001, rel=1e-5)
    assert describe(finding).startswith("in step 2, 1.001")
    # Each rank compares the factor of the full gradient, also if it has only a part.
    rows = Extent((64, 64), (0, 0), (1, 64), 0, 64)
    assert seen(mean(terms) * 1.001, twin, extent=rows) is not None


def test_factor_of_noise_is_ignored() -> None:
    """A gradient that is mostly noise has any factor: of a vision transformer's first key projection -0.7."""
    terms = gradients()
    total = sum(terms)
    assert isinstance(total, torch.Tensor)
    assert twin_of(terms, NOISE, 0.05 * total, -0.05 * total).factor_tolerance == pytest.approx(0.4, rel=0.2)
    assert twin_of(terms, NOISE, 0.2 * total, -0.2 * total).factor_tolerance is None


def test_factor_of_correlated_noise_is_ignored() -> None:
    """Errors of a gradient of low rank are those of a few rows of activations, and none cancels another."""
    torch.manual_seed(2)
    rows = torch.linalg.qr(torch.randn(16, 3)).Q.T
    gradient, *errors = (torch.outer(row, row) for row in rows)
    noise = [0.5 * PARTS * error for error in errors]
    assert twin_of([gradient] * PARTS, NOISE, *noise).factor_tolerance is None
    assert twin_of([gradient] * PARTS, NOISE, *(one / 100 for one in noise)).factor_tolerance is not None


def test_zeros_have_no_factor() -> None:
    twin = twin_of([torch.zeros(2, 3)] * PARTS, NOISE, torch.zeros(2, 3), torch.zeros(2, 3))
    assert twin.factor_tolerance is None
    assert seen(torch.zeros(2, 3), twin) is None
    assert seen(torch.ones(2, 3), twin) is not None


@pytest.mark.parametrize("bound", [ROUNDING, NOISE])
def test_control_fires_where_errors_are_detectable(bound: GradientBound) -> None:
    terms = gradients()
    twin = twin_of(terms, bound, *(noises(1e-9) if bound.noise else ()))
    assert twin.detects(bound.control)
    assert seen(mean(terms), twin.perturbed(bound.control)) is not None
    zeros = twin_of([torch.zeros(2, 3)] * PARTS, bound, *([torch.zeros(2, 3)] * 2 if bound.noise else ()))
    assert zeros.detects(bound.control)
    assert seen(None, zeros.perturbed(bound.control)) is not None


def test_large_noise_has_no_control() -> None:
    twin = twin_of(gradients(), NOISE, *noises(1e6))
    assert not twin.detects(NOISE.control)


def test_bounds_have_different_names() -> None:
    assert [bound.name for bound in (ROUNDING, NOISE)] == ["rounding_of_sum", "measured_noise"]
    assert 0 < ROUNDING.control < NOISE.control == 1.0


def leaf(value: torch.Tensor, kind: str = "param", extent: Extent | None = None) -> TensorLeaf:
    return TensorLeaf(value, extent or whole(value), None, kind)


WHOLE = torch.arange(6.0).reshape(2, 3) + 1


def after_step() -> Leaves:
    """Return the twin's complete state after a step."""
    return {
        ("w",): leaf(WHOLE),
        ("state", "w", "exp_avg"): leaf(WHOLE / 7, "exp_avg"),
        ("state", "w", "step"): leaf(torch.tensor(3.0), "step"),
        ("param_groups", 0, "lr"): 1e-3,
        ("param_groups", 0, "betas"): (0.9, 0.999),
    }


def on_rank(leaves: Leaves, extent: Extent = ROW) -> Leaves:
    """Return a rank's part of it."""
    return {
        name: leaf(extent.take(one.local), one.kind, extent)
        if isinstance(one, TensorLeaf) and one.extent.shape == (2, 3)
        else one
        for name, one in leaves.items()
    }


@pytest.mark.parametrize("extent", [whole(WHOLE), ROW, Extent((2, 3), (0, 0), (2, 3), 1, 4)])
def test_step_is_compared_bitwise(extent: Extent) -> None:
    assert compare_step(1, after_step(), on_rank(after_step(), extent)) == []
    for name in (("w",), ("state", "w", "exp_avg")):
        other = on_rank(after_step(), extent)
        changed = other[name].local.clone()
        changed.view(torch.int32).view(-1)[-1] ^= 1
        other[name] = leaf(changed, other[name].kind, extent)
        (found,) = compare_step(4, after_step(), other)
        assert (found.name, found.problem, found.facts["step"]) == (text_of(name), Problem.differs, 4)
        index = extent.global_index(extent.numel - 1)
        assert describe(replace(found, sides=TWIN)).startswith(f"after step 4, index {index}: twin ")
        assert "; 1 of " in describe(found)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (("param_groups", 0, "lr"), 1.001e-3, "after step 2, twin 0.001, here 0.001001"),
        (("param_groups", 0, "betas"), [0.9, 0.999], "after step 2, twin (0.9, 0.999), here [0.9, 0.999]"),
        (("state", "w", "step"), leaf(torch.tensor(4.0), "step"), "after step 2, index []: twin 3.0"),
        (
            ("state", "w", "step"),
            leaf(torch.tensor(3), "step"),
            "dtype: twin torch.float32, here torch.int64",
        ),
        (("w",), leaf(torch.ones(3, 2)), "after step 2, global shape: twin (2, 3), here (3, 2)"),
        (("w",), 1.0, "here 1.0"),
        (("more",), 1.0, "in step 2, the parallel model has it, the twin does not"),
    ],
)
def test_step_compares_values_dtypes_and_shapes(name: Name, value: Any, told: str) -> None:
    (found,) = compare_step(2, after_step(), {**after_step(), name: value})
    assert (found.name, found.facts["step"]) == (text_of(name), 2)
    assert told in describe(replace(found, sides=TWIN))
    assert (found.max_abs_diff is None) is ("index []" not in told)  # a distance only of elements


def test_missing_names_are_reported() -> None:
    fewer = {name: one for name, one in after_step().items() if name != ("state", "w", "exp_avg")}
    (found,) = compare_step(1, after_step(), fewer)
    assert (found.name, found.problem) == ("state.w.exp_avg", Problem.only_twin)
    assert compare_step(1, after_step(), fewer, elsewhere={("state", "w", "exp_avg")}) == []
    none_of_it = Extent((2, 3), (2, 0), (0, 3), 0, 0)
    empty = {
        ("w",): leaf(torch.empty(0, 3), extent=none_of_it),
        ("state", "w", "step"): EmptyShard(leaf(torch.tensor(1.0), "step")),
        **{name: one for name, one in after_step().items() if name[0] == "param_groups"},
    }
    assert compare_step(1, after_step(), empty) == []


def test_constants_have_a_control() -> None:
    """Masks, tables and odd values: the control of a step changes each by a bit."""
    leaves = snapshot_model(Adversarial([4, 8, 3]))
    assert compare_step(1, leaves, leaves) == []
    changed = {one.name for one in compare_step(1, leaves, perturbed_leaves(leaves))}
    assert changed == {*names_of_control(leaves)} >= {"causal", "bias", "rope", "large", "odd", "narrow"}


def test_irreproducible_step_tolerates_its_noise() -> None:
    twin = after_step()
    others = [
        {**twin, ("w",): leaf(WHOLE + change), ("state", "w", "exp_avg"): twin["state", "w", "exp_avg"]}
        for change in (torch.tensor([[1e-3, 0, 0], [0, 0, 0]]), torch.full((2, 3), -1e-4))
    ]
    tolerances = measured_tolerances(twin, others)
    assert tolerances.keys() == {("w",), ("state", "w", "exp_avg"), ("state", "w", "step")}
    rms = math.sqrt((1e-6 + 5 * 1e-8) / 6)
    assert tolerances["w",][0, 0] == pytest.approx(16e-3, rel=1e-3)
    assert tolerances["w",][1, 2] == pytest.approx(16 * rms, rel=1e-3)
    allowed = {("w",): tolerances["w",]}
    near = {**twin, ("w",): leaf(WHOLE + 10 * rms)}
    assert compare_step(1, twin, on_rank(near), tolerances=allowed) == []
    assert compare_step(1, twin, on_rank(near)) != []
    far = {**twin, ("w",): leaf(WHOLE + 20 * rms)}
    assert [one.name for one in compare_step(1, twin, on_rank(far), tolerances=allowed)] == ["w"]
    moment = {**near, ("state", "w", "exp_avg"): leaf(WHOLE / 7 + 1e-6, "exp_avg")}
    assert [one.name for one in compare_step(1, twin, moment, tolerances=allowed)] == ["state.w.exp_avg"]
    control = perturbed_beyond(on_rank(twin), allowed)
    assert [one.name for one in compare_step(1, twin, control, tolerances=allowed)] == ["w"]


def test_irreproducible_step_tolerates_rounding() -> None:
    """In bfloat16, if the steps with other gradients happened to round equally."""
    coarse = {("w",): leaf(WHOLE.bfloat16())}
    tolerances = measured_tolerances(coarse, [coarse, coarse])

    def other(ulps: int) -> Leaves:
        bits = coarse["w",].local.view(torch.int16) + ulps
        return {("w",): leaf(bits.view(torch.bfloat16))}

    assert compare_step(1, coarse, other(1), tolerances=tolerances) == []
    assert compare_step(1, coarse, other(-1), tolerances=tolerances) == []
    assert compare_step(1, coarse, other(3), tolerances=tolerances) != []
    assert compare_step(1, coarse, other(1)) != []
    control = perturbed_beyond(coarse, tolerances)
    assert compare_step(1, coarse, control, tolerances=tolerances) != []


def test_loss_has_a_smaller_tolerance() -> None:
    assert batch_loss_tolerance([torch.float32]) == 32 * EPS
    assert (
        batch_loss_tolerance([torch.float32, torch.bfloat16])
        == batch_loss_tolerance([torch.bfloat16, torch.float32])
        == 2**-10
    )
    assert batch_loss_tolerance([torch.float64]) == batch_loss_tolerance([]) == 32 * EPS
