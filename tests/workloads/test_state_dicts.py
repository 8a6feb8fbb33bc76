"""The forms of torch's state-dict functions: each has the keys that it should have, on any rank, and is
restored."""

import pytest
from torch.distributed.checkpoint.state_dict import StateDictOptions

from conftest import SMALL, Finished, blocks, run, selected
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.state import StatePart
from dcpbench.runs.build_run import build
from dcpbench.state.snapshot import by_parameter
from support.alone import ONCE, alone, config, world

FORMS = ("flattened", "cpu_offload", "full", "full_broadcast", "full_flattened")


def test_hyperparameters_have_the_names_of_parameters() -> None:
    groups = {
        ("state", "a", "step"): 1,
        ("param_groups", 0, "lr"): 0.1,
        ("param_groups", 0, "params"): ["a", "b.c"],
        ("param_groups", 1, "lr"): 0.2,
        ("param_groups", 1, "params"): [],
    }
    state, groups_of = {("state", "a", "step"): 1}, ("a", "b.c")
    expected = state | {("param_groups", fqn, "lr"): 0.1 for fqn in groups_of}
    assert by_parameter(groups) == expected


@pytest.mark.parametrize("flattened", [False, True])
def test_save_promises_the_keys_of_torch(flattened: bool) -> None:
    run = build(config(**ONCE, optimizer="adamw_groups"), world(), 0)
    run.fill_optimizer()
    run.options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    held = run.state()["optimizer"].state_dict()
    saved = Checkpoint(1, "", {}, run.as_saved(run.live_state()))
    promised = {key for key in saved.expected_entries() if key.startswith("optimizer.")}
    if flattened:
        assert promised == {f"optimizer.{key}" for key in held}
        assert "optimizer.param_groups.net1.bias.betas" in promised
    else:
        assert {f"optimizer.param_groups.1.{key}" for key in held["param_groups"][1]} <= promised


@pytest.mark.parametrize("asked", ["sharded", "flattened"])
def test_state_is_saved_under_the_requested_names(asked: str) -> None:
    run = build(config(**ONCE, optimizer="adamw_groups", state_dict=asked), world(), 0)
    saved = run.as_saved(run.live_state())[StatePart.optimizer]
    assert (("param_groups", "net1.bias", "lr") in saved) is (asked == "flattened")


@pytest.mark.cell
@pytest.mark.parametrize(
    ("scenario", "key", "value"),
    [
        ("model_only", "state_dict", "flattened"),
        ("model_only", "state_dict", "full_flattened"),
        ("fine_tune", "state_dict", "flattened"),
    ],
)
def test_model_alone_has_no_optimizer_to_rename(scenario: str, key: str, value: str) -> None:
    verdict, report = alone(**ONCE, scenario=scenario, **{key: value})
    assert verdict.status == "pass", verdict.reason
    assert report.checks["files_equal"].compared


@pytest.fixture(scope="module")
def forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = [
        {"state_dict": ",".join(selected(request, name)), "optimizer": optimizer}
        for name, optimizer in (("form", "sgd"), ("empty", "adamw_empty_group"))
        if selected(request, name)
    ]
    words = ("parallel=fsdp2", "device=cpu", "world_size=2", "saves=1", *SMALL)
    return run(tmp_path_factory.mktemp("forms") / "sweep", *blocks(cells), *words)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_state_dict_is_restored(forms: Finished, form: str) -> None:
    row = forms.row(state_dict=form, optimizer="sgd")
    assert row["status"] == ("xfail" if form == "full_flattened" else "pass"), row["reason"]
    assert row["cell"].startswith(f"state_dict={form},")
    assert row["checkpoint_whole"] is (None if form == "full_flattened" else True)


EMPTY = {
    "flattened": ("empty-param-group", "IndexError"),
    "cpu_offload": ("empty-param-group", "the saved values of an empty group to the last group"),
    "full": ("empty-param-group", "param_groups.0.betas"),
    "full_broadcast": ("empty-param-group", "param_groups.0.betas"),
    "full_flattened": ("empty-param-group", "IndexError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("empty", EMPTY)
def test_empty_group_is_a_bug_of_torch(forms: Finished, empty: str) -> None:
    row = forms.row(state_dict=empty, optimizer="adamw_empty_group")
    known, seen = EMPTY[empty]
    assert row["status"] == "xfail", row["reason"]
    assert known in row["reason"]
    assert seen in row["reason"]
