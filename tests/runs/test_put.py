"""Values are put into a run as a snapshot has read them, and what cannot be set is returned."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dcpbench.compare.leaves import ABSENT_LEAF, same_leaves
from dcpbench.config.groups import WorkloadConfig
from dcpbench.core.state import Name, StatePart, text_of
from dcpbench.runs.build_run import build, build_twin
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.put import change_again, copy_state, perturb_run, put, put_saved
from dcpbench.state.snapshot import State, TensorLeaf, digested
from dcpbench.workloads.workload import Workload, batches_of
from support.alone import config, trained, world
from support.ordinary_optimizers import LowStateAdam
from support.ordinary_workloads import inputs, net, reversed_loss

CASE = "support.ordinary_workloads.made"


def without_flags(state: State) -> State:
    return {part: leaves for part, leaves in state.items() if part is not StatePart.flags}


def differing(state: State, run: OwnRun) -> set[Name]:
    now = run.live_state()
    return {name for part, leaves in state.items() for name in leaves.keys() - same_leaves(leaves, now[part])}


@pytest.mark.parametrize("optimizer", ["adam", "adam_and_sgd", "adam_tensor_lr", "muon"])
def test_snapshot_is_put_into_another_run(optimizer: str) -> None:
    state = without_flags(trained(2, optimizer=optimizer, scheduler="step").retained_state())
    for steps in (0, 1):  # without entries in the optimizer, and with others
        other = trained(steps, optimizer=optimizer, scheduler="step")
        assert differing(state, other)
        assert not any(put(other, state).values())
        assert differing(state, other) == set()


def test_absent_values_are_removed() -> None:
    run, moment, option = trained(1), ("state", "net1.weight", "exp_avg"), ("param_groups", 0, "eps")
    left = put(run, {StatePart.optimizer: {moment: ABSENT_LEAF, option: ABSENT_LEAF}})
    assert left == {StatePart.optimizer: {option: ABSENT_LEAF}}, "a group has all of its options"
    assert {moment, option} & run.live_state()[StatePart.optimizer].keys() == {option}


@pytest.mark.parametrize("read", [None, torch.zeros_like, torch.clone])
def test_digest_needs_the_content_of_which_it_is(read: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    run, other, name = trained(2), trained(1), ("net1.weight",)
    saved = {name: run.live_state()[StatePart.model][name]}

    def read_saved(part: StatePart, of: Name) -> torch.Tensor | None:
        assert (part, of) == (StatePart.model, name)
        return read(saved[name].local) if read else None

    left = put(other, {StatePart.model: digested(saved)}, read_saved)[StatePart.model]
    is_set = torch.equal(other.live_state()[StatePart.model][name].local, saved[name].local)
    assert (is_set, left.keys()) == ((True, set()) if read is torch.clone else (False, {name}))


class Refusing(nn.Module):
    """Its extra state has a number that it sets, and one that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1
        self.layer = nn.Linear(2, 2)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.layer(samples)

    def get_extra_state(self) -> Any:
        return {"number": self.number, "version": 2}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"]


def built(monkeypatch: pytest.MonkeyPatch, **made: Any) -> OwnRun:
    def workload() -> Workload:
        return Workload(**{"model": net(), "batch": inputs, "loss": reversed_loss, **made})

    monkeypatch.setattr(CASE, workload, raising=False)
    return build(config(workload=WorkloadConfig(CASE)), world(), 0)


def test_extra_state_that_stays_the_same_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    number, version = ("_extra_state", "number"), ("_extra_state", "version")
    run = built(monkeypatch, model=Refusing())
    assert perturb_run(run, 1)[StatePart.model] == {version}
    left = put(run, {StatePart.model: {number: 5, version: 6}})
    assert (left, run.model.number) == ({StatePart.model: {version: 6}}, 5)
    with mock.patch.object(Refusing, "set_extra_state", side_effect=[ValueError, None]):
        assert perturb_run(run, 1)[StatePart.model] == {number, version}
    run = built(monkeypatch, model=Refusing(), not_saved=["_extra_state", "layer.bias"])
    assert perturb_run(run, 1)[StatePart.model] == {number, version, ("layer.bias",)}


def test_twin_gets_entries_in_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would convert floats to the dtype of their parameters, and a snapshot has numbers as texts."""
    run = built(monkeypatch, optimizer=lambda model: LowStateAdam(model.parameters()))
    run.train(batches_of(config(workload=WorkloadConfig(CASE)), torch.device("cpu")), 1)
    first = run.trained_parameters[0]
    run.optimizer.state[first] |= {"lists": [[torch.ones(2, dtype=torch.bfloat16)]], "counts": {3: 4}}
    twin = build_twin(config(workload=WorkloadConfig(CASE)), world(), 1)
    copy_state(run, twin)
    held, copied = run.optimizer.state[first], twin.optimizer.state[twin.trained_parameters[0]]
    assert {copied["exp_avg"].dtype, copied["lists"][0][0].dtype} == {torch.bfloat16}
    assert torch.equal(copied["exp_avg"], held["exp_avg"])
    assert copied["exp_avg"] is not held["exp_avg"]
    assert copied["counts"] == {3: 4}


def same(state: State, run: OwnRun) -> dict[StatePart, set[Name]]:
    """Return the names whose leaves a run has, by part."""
    now = run.live_state()
    return {part: same_leaves(leaves, now[part]) for part, leaves in state.items()}


RESTORED = (StatePart.model, StatePart.optimizer, StatePart.scheduler, StatePart.extra)


@pytest.mark.parametrize(
    ("component", "kept"), [("none", set()), ("ema", set()), ("grad_scaler", {"grad_scaler._growth_tracker"})]
)
def test_everything_that_a_load_restores_is_changed(component: str, kept: set[str]) -> None:
    run = trained(2, scheduler="step", component=component)
    before = {part: leaves for part, leaves in run.retained_state().items() if part in RESTORED}
    unchanged = perturb_run(run, 7)
    assert same(before, run) == {part: {*unchanged[part]} for part in before}
    assert {text_of(name) for names in unchanged.values() for name in names} == kept | {
        "param_groups.0.params"
    }


def test_parameters_of_the_optimizer_alone_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a loss, which is no part of the model."""
    own = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))]
    run = built(monkeypatch, optimizer=lambda model: torch.optim.SGD([*model.parameters(), *own]))
    perturb_run(run, 1)
    assert not (own[0] == 1).any()
    assert not (own[1] == 0).any()


@pytest.mark.parametrize("optimizer", ["adam", "adam_and_sgd", "adam_tensor_lr", "muon"])
def test_twin_has_the_state_of_the_run(optimizer: str) -> None:
    run = trained(2, optimizer=optimizer, scheduler="step", component="ema")
    given = config(model="short", optimizer=optimizer, scheduler="step", component="ema")
    twin = build_twin(given, world(), 1)
    state = without_flags(run.live_state())
    assert differing(state, twin)
    copy_state(run, twin)
    assert differing(state, twin) == set()
    held, copied = (
        {leaf.local.data_ptr() for leaf in of.trained_state().values() if isinstance(leaf, TensorLeaf)}
        for of in (run, twin)
    )
    assert held.isdisjoint(copied), "the twin's steps would change the run"


def test_what_a_control_has_missed_is_changed_again() -> None:
    run, other = trained(2, scheduler="step"), trained(1, scheduler="step")
    saved, unchanged = run.retained_state(), perturb_run(other, 3)
    missed = {
        (StatePart.model, "net1.weight"),
        (StatePart.optimizer, "state.net1.bias.exp_avg"),
        (StatePart.scheduler, "scheduler._step_count"),
    }
    names = {(part, name) for part, text in missed for name in saved[part] if text_of(name) == text}
    assert len(names) == len(missed)
    equal: State = {part: {name: saved[part][name]} for part, name in names}
    assert not any(put(other, equal).values())
    kept = change_again(other, saved, unchanged, missed)
    assert not any(same(equal, other).values())
    assert kept == unchanged


def test_saved_leaves_are_put_by_the_texts_of_their_names() -> None:
    run, other = trained(2), trained(1)
    saved = run.retained_state()
    live = other.live_state()[StatePart.optimizer]
    gone = ("state", "net1.weight", "exp_avg")
    saved[StatePart.optimizer] = {
        name: leaf for name, leaf in saved[StatePart.optimizer].items() if name != gone
    }
    texts = {
        StatePart.model: {"net1.weight", "net1.bias"},
        StatePart.optimizer: {text_of(gone), "state.net1.bias.step"},
    }
    left = put_saved(other, saved, texts, lambda *_: None)
    assert not any(left.values())
    assert {text_of(name) for name in same(saved, other)[StatePart.model]} == texts[StatePart.model]
    now = other.live_state()[StatePart.optimizer]
    assert gone in live
    assert gone not in now
    assert same(saved, other)[StatePart.optimizer] >= {("state", "net1.bias", "step")}


def test_state_that_an_optimizer_has_for_no_parameter_is_put() -> None:
    run = trained(1)
    run.optimizer.state |= {"first": {"count": 1}, "last": {"count": 1}}
    counts = {("state", owner, "count"): 5 for owner in ("first", "last")}
    assert not any(put(run, {StatePart.optimizer: counts}).values())
    assert [run.optimizer.state[owner]["count"] for owner in ("first", "last")] == [5, 5]
