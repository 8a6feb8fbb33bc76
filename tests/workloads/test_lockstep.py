"""Comparison of a run with its twin step by step, on one rank in this process."""

from typing import Any

import pytest
import torch

from dcpbench.verify import compare_layouts
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.build_run import build, build_twin
from dcpbench.workloads.lockstep import Lockstep
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.twin import Inexact, inexact_steps
from dcpbench.workloads.workload import batches_of
from support.alone import config, world

ONCE: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}


def lockstep(steps: int) -> Lockstep:
    """Train a run and compare each step with its twin."""
    given, here = config(**ONCE), world()
    run, twin, data = build(given, here, 0), build_twin(given, here, 0), batches_of(given, here.device)
    compared = Lockstep(given, here, run, twin, None)
    for step in range(1, steps + 1):
        with run.recording() as gradients:
            run.train(data, step)
        compared.follow(data, gradients)
    return compared


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_of_zeros_prove_nothing(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainingRun.loss_of
    if zero:
        monkeypatch.setattr(TrainingRun, "loss_of", lambda run, samples: 0 * honest(run, samples) + 1)
    gradients = lockstep(2).results()["gradient_close"]
    assert gradients.found == []
    assert {*gradients.fired.values()} == {not zero}


def test_replicas_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second rank has another bit in the last bias."""

    def gathered(mine: Leaves, group: object) -> list[Leaves]:
        theirs = dict(mine)
        theirs["net2.bias"] = changed if len(calls) == 0 else theirs["net2.bias"]
        calls.append(1)
        return [mine, theirs]

    calls: list[int] = []
    compared = lockstep(1)
    leaves = compared._leaves
    changed = compare_layouts.digested({"net2.bias": compare_layouts.all_different(leaves)["net2.bias"]})[
        "net2.bias"
    ]
    monkeypatch.setattr(compare_layouts, "gathered", gathered)
    replicas = compared.results()["replicas_equal"]
    assert [one.name for one in replicas.found] == ["net2.bias"]
    assert replicas.fired["net1.weight"]


def test_steps_on_another_device_are_rounded() -> None:
    given, here = config(**ONCE), world()
    run, twin = build(given, here, 0), build_twin(given, here, 0)
    assert inexact_steps(run, twin, split=False) == Inexact()
    run.model.to(torch.device("meta"))
    names = frozenset(f"net{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias"))
    assert inexact_steps(run, twin, split=False) == Inexact(rounded=names, other_kernels=True)
