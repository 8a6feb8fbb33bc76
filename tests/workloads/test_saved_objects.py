"""Objects that a workload saves in addition to its model, and what it leaves out on purpose."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpbench.config.groups import WorkloadConfig
from dcpbench.core.state import StatePart
from dcpbench.runs.build_run import build, build_twin
from dcpbench.runs.put import copy_state, perturb_run
from dcpbench.state.snapshot import retained
from dcpbench.workloads.generators import generators_of, reseed, set_generator, state_of_generator
from dcpbench.workloads.stateful import SavedObjects
from dcpbench.workloads.workload import Workload, workload_of
from support.alone import config, run_alone, world
from support.ordinary_workloads import inputs, net, reversed_loss

CASES = "support.ordinary_state."


class Strict:
    """Refuses every state but its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "strict", "counts": np.arange(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["kind"] != "strict":
            raise ValueError(state["kind"])


def test_objects_differ_before_a_load_and_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, strict = nn.BatchNorm1d(3), Strict()

    def workload() -> Workload:
        return Workload(net(), inputs, reversed_loss, state={"average": model, "strict": strict})

    monkeypatch.setattr(f"{CASES}net_with_state", workload, raising=False)
    run = build(config(workload=WorkloadConfig(f"{CASES}net_with_state")), world(), 0)
    objects = run.saved
    other = SavedObjects({"average": nn.BatchNorm1d(3), "strict": Strict()}, lambda _: True)
    before = retained(objects.leaves())
    of_average = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert before.keys() == {
        *(("average", name) for name in of_average),
        *(("strict", name) for name in ("kind", "counts")),
    }
    assert objects.state(StateDictOptions(ignore_frozen_params=True)).keys() == {"average", "strict"}
    other.copy_from(objects)
    unchanged = perturb_run(run, seed=1)
    assert {("strict", "kind"), ("strict", "counts")} <= {*unchanged[StatePart.extra]}, "it refuses others"
    assert not torch.equal(before["average", "weight"].local, model.weight)
    objects.copy_from(other)
    assert torch.equal(before["average", "weight"].local, model.weight)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"model": Strict()}, "'model' is no free name"),
        ({"a.b": Strict()}, "'a.b' is no free name"),
        ({"sampler": object()}, "'sampler' is a object without state_dict"),
        (lambda model: [], "state returned a list; return a dictionary"),
        ([Strict()], "state is a list; pass a dictionary"),
    ],
)
def test_state_that_cannot_be_saved_is_refused(state: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def workload() -> Workload:
        return Workload(net(), inputs, reversed_loss, state=state)

    monkeypatch.setattr(f"{CASES}net_with_state", workload, raising=False)
    with pytest.raises((TypeError, ValueError), match=f"target={CASES}net_with_state: state.*") as raised:
        build_twin(config(workload=WorkloadConfig(f"{CASES}net_with_state")), world(), 0)
    assert why in str(raised.value)


def test_patterns_that_are_a_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def workload() -> Workload:
        return Workload(net(), inputs, reversed_loss, not_saved="0.*")

    monkeypatch.setattr(f"{CASES}with_patterns", workload, raising=False)
    with pytest.raises(TypeError, match=r"not_saved='0\.\*'; pass a list of names or patterns"):
        workload_of(config(workload=WorkloadConfig(f"{CASES}with_patterns")))


def test_left_out_parts_are_in_no_state_dict() -> None:
    run = build(config(workload=WorkloadConfig(f"{CASES}base_not_saved")), world(), 0)
    names = run.state()["model"].state_dict().keys()
    assert names == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    run = build(config(workload=WorkloadConfig(f"{CASES}forgets_python_random")), world(), 0)
    assert run.state()["random"].state_dict()["rank0"].keys() == {"cpu", "numpy"}
    run = build(config(workload=WorkloadConfig(f"{CASES}forgets_the_sampler")), world(), 0)
    assert {"average", "sampler"} & run.state().keys() == {"average"}


def test_a_copy_of_a_run_has_its_objects_and_generators() -> None:
    for name in ("saves_average_and_sampler", "saves_its_generator"):
        given = config(workload=WorkloadConfig(f"{CASES}{name}"))
        run, copied = build(given, world(), 1), build_twin(given, world(), 2)
        perturb_run(run, 3)
        copy_state(run, copied)
        assert str(copied.saved.leaves()) == str(run.saved.leaves())
        assert list(map(state_of_generator, generators_of(copied.model).values())) == list(
            map(state_of_generator, generators_of(run.model).values())
        )


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda one: float(torch.rand(1, generator=one))),
        (random.Random(0), lambda one: one.gauss(0, 1)),
        (np.random.default_rng(0), lambda one: one.normal()),
        (np.random.Generator(np.random.MT19937(0)), lambda one: one.normal()),
        (np.random.RandomState(0), lambda one: one.normal()),
    ],
)
def test_generators_of_a_model_are_seeded_and_set(generator: Any, draw: Any) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].drawing = generator
    assert generators_of(model) == {"0.drawing": generator}
    reseed(generator, 5)
    state = state_of_generator(generator)
    expected = draw(generator)
    assert draw(generator) != expected
    set_generator(generator, state)
    assert draw(generator) == expected
    reseed(generator, 5)
    assert draw(generator) == expected


@pytest.mark.cell
def test_object_with_the_name_of_a_component_is_skipped() -> None:
    """One of the two would be saved, and both compared."""
    ran = run_alone(workload=WorkloadConfig("support.ordinary_state.other_average"), component="ema")
    assert ran.verdict.status == "skip", ran.verdict.reason
    assert "'ema' is also a name of the component" in str(ran.verdict.reason)
