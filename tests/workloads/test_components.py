"""Components of runs: they are restored, and training continues with them."""

import pytest
import torch

from dcpbench.runs.build_run import build
from support.alone import config, run_alone, trained, world

pytestmark = pytest.mark.cell

pytest.importorskip("torchdata")

STEPS = {"model": "short", "saves": 2, "train_steps": 2, "resume_steps": 2}
NAMES = {
    "ema": {"ema.module.net1.weight", "ema.n_averaged"},
    "grad_scaler": {"grad_scaler.scale", "grad_scaler._growth_tracker"},
    "data_loader": {
        "data_loader._num_yielded",
        "data_loader._sampler_iter_state.generator",
    },
}


@pytest.mark.parametrize("component", NAMES)
def test_component_is_restored(component: str) -> None:
    ran = run_alone(**STEPS, component=component, scenario="chain", verify="deep")
    assert ran.verdict.status == "pass", ran.verdict.reason
    control = ran.verdict.details["checks"]["extra_equal"]["control"]
    assert {name.split()[0] for name in control} >= NAMES[component]


@pytest.mark.parametrize(
    ("component", "fault"),
    [("ema", "ema_lowest_bit"), ("grad_scaler", "grad_scale_doubled"), ("data_loader", "sample_skipped")],
)
def test_unrestored_component_is_reported(component: str, fault: str) -> None:
    ran = run_alone(fault, **{**STEPS, "saves": 1}, component=component)
    assert ran.verdict.fault_seen is True, ran.verdict.reason
    restored = {one.check for one in ran.verdict.failed if one.check.endswith("_equal")}
    assert "extra_equal" in restored
    assert not restored & {"model_equal", "optim_equal"}


def test_average_follows_the_weights() -> None:
    first, second, third = (trained(steps).model.get_parameter("net1.weight").detach() for steps in (1, 2, 3))
    average = trained(3, component="ema").saved.leaves()["ema", "module.net1.weight"].local
    torch.testing.assert_close(average, 0.9 * (0.9 * first + 0.1 * second) + 0.1 * third)
    assert not torch.equal(average, third)


def test_loss_scale_grows_and_changes_no_step() -> None:
    run, plain = trained(4, component="grad_scaler"), trained(4)
    assert run.saved.leaves()["grad_scaler", "scale"] == 4 * 1024.0, "doubled after every second step"
    assert run.train_state.losses == plain.train_state.losses, "a power of two changes no bit of a gradient"


def test_loader_shuffles_each_epoch() -> None:
    loading = build(config(model="short", component="data_loader"), world(), 0).component
    epochs = [[loading.number_of_batch(step) for step in range(3)] for _ in range(5)]
    assert all(sorted(epoch) == [1, 2, 3] for epoch in epochs)
    assert epochs != 5 * epochs[:1]
