"""Every default generator is saved as a tensor, restored exactly, and seeded for each build."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dcpbench.config.groups import WorkloadConfig
from dcpbench.runs.build_run import build, build_twin
from dcpbench.workloads.generators import (
    ALL,
    RandomState,
    seed_generators,
    set_generators,
    states_of_generators,
)
from support.alone import config, world

CPU = torch.device("cpu")


def drawn() -> tuple[float, ...]:
    # A normally distributed number leaves another one in reserve.
    return (
        float(torch.rand(())),
        random.gauss(0, 1),
        random.random(),
        float(np.random.normal()),
        np.random.rand(),
    )


@pytest.mark.parametrize("before", range(3))
def test_restored_states_give_the_same_numbers(before: int) -> None:
    seed_generators(7, CPU)
    for _ in range(before):
        drawn()
    states = states_of_generators(CPU)
    assert states.keys() == {"cpu", "python", "numpy"}
    assert all(isinstance(state, torch.Tensor) for state in states.values())
    expected = drawn(), drawn()
    seed_generators(8, CPU)
    assert drawn() != expected[0]
    set_generators(states, CPU)
    assert (drawn(), drawn()) == expected


def test_every_build_is_seeded_in_all_generators() -> None:
    given = config(workload=WorkloadConfig("support.ordinary_state.python_random"))
    weights = []
    for make in (build, build_twin):
        drawn()
        weights.append(make(given, world(), 3).model.state_dict()["scale"])
    assert torch.equal(*weights)


def test_own_models_keep_their_keys() -> None:
    target = WorkloadConfig("support.ordinary_state.python_random")
    assert build_twin(config(workload=target), world(), 3).random.states.keys() == {"cpu", "python", "numpy"}
    assert build_twin(config(model="short"), world(), 3).random.states.keys() == {"cpu"}


def test_draws_of_a_step_that_raises_are_noted() -> None:
    run = RandomState(3, 0, CPU)

    def step() -> None:
        with run.noting_draws(), run.drawn_from():
            torch.rand(())
            raise ValueError("after a draw")

    with pytest.raises(ValueError, match="after a draw"):
        step()
    assert run.drawn == {"cpu"}


def test_batch_of_a_step_is_drawn_beside_the_run() -> None:
    run, other = (RandomState(seed, 0, CPU, ALL) for seed in (3, 4))
    before = dict(run.states)
    batches = []
    for state in (run, other, run):
        with state.noting_draws(), state.set_aside(7):
            (batch,) = DataLoader(range(3), 3, shuffle=True, num_workers=1)  # type: ignore[arg-type]
            batches.append((batch.tolist(), drawn()))
    assert batches[0] == batches[1] == batches[2]
    assert all(torch.equal(run.states[name], state) for name, state in before.items())
    assert run.drawn == set()
