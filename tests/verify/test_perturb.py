"""The perturbation must reach everything, or a control would have nothing to report."""

import pytest
import torch
from torch import nn

from dcpbench.verify.compare import bits, compare, same_value
from dcpbench.verify.perturb import (
    controllable,
    perturb_model,
    perturb_optimizer,
    perturbed,
    with_other_names,
    without_constants,
)
from dcpbench.verify.snapshot import below, persistent_tensors, retained, snapshot_model, snapshot_optimizer
from dcpbench.verify.tolerances import compare_close
from dcpbench.workloads.models import Mlp
from support.models import Adversarial


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp([4, 8, 3]), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.rand(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_every_name_is_reported_after_a_perturbation() -> None:
    model, optimizer = trained()
    before = retained(snapshot_model(model)), retained(snapshot_optimizer(model, optimizer))
    perturb_model(model, seed=1)
    perturb_optimizer(optimizer, seed=1)
    after = snapshot_model(model), snapshot_optimizer(model, optimizer)
    for saved, changed in zip(before, after, strict=True):
        reported = {found.name for found in compare(saved, with_other_names(changed))}
        assert set(controllable(saved)) <= reported
    assert "1.running_var" in before[0]
    assert "state.0.net1.weight.step" in before[1]
    assert "param_groups.0.params" in controllable(before[1])
    assert {"param_groups.0.lr", "param_groups.0.betas", "param_groups.0.amsgrad"} <= set(before[1])


def test_what_is_retained_stays_as_it_was() -> None:
    model, optimizer = trained()
    saved = retained(snapshot_model(model)), retained(snapshot_optimizer(model, optimizer))
    model(torch.rand(6, 4)).square().sum().backward()
    optimizer.step()
    assert compare(saved[0], snapshot_model(model))
    assert compare(saved[1], snapshot_optimizer(model, optimizer))


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 0.5, 1, 0.9, True, False, None, "mean", (0.5, 0), [1e-3]])
def test_a_changed_value_is_another_and_turns_nothing_on(value: object) -> None:
    changed = perturbed(value)
    assert not same_value(value, changed)
    assert not same_value(changed, perturbed(changed)), "every load meets a target that was changed again"
    if not isinstance(value, tuple | list):
        assert bool(changed) <= bool(value)


def test_every_element_of_every_dtype_becomes_another_one_again_and_again() -> None:
    model = Adversarial([4, 8, 3])
    for _ in range(3):
        before = {name: value.clone() for name, value in persistent_tensors(model).items()}
        perturb_model(model, seed=1)
        for name, value in persistent_tensors(model).items():
            changed = bits(value) != bits(before[name])
            assert changed.reshape(value.numel(), -1).any(dim=1).all(), name


def test_what_no_seed_changes_has_a_control_of_its_own() -> None:
    one, other = (snapshot_model(Adversarial([4, 8, 3])) for _ in range(2))
    assert not compare_close(below(one, "causal"), below(other, "causal"), 1e-4)
    reported = {found.name for found in compare_close(one, without_constants(one, other), 1e-4)}
    assert reported == set(one)
    stranger = without_constants(one, other)
    assert stranger["net1.weight"] is other["net1.weight"], "it is told from another seed's as it is"
