"""Everything that a healthy cell compares in scenarios that save twice and load once, or fine-tune, on one
rank in this process."""

from pathlib import Path

import pytest

from dcpbench.compare.controls import names_of_control
from dcpbench.scenarios import fine_tune
from dcpbench.scenarios.dcp_api import in_place
from dcpbench.scenarios.dcp_api.stateful_objects import plain_values
from dcpbench.state.snapshot import snapshot_nested
from support.alone import TWICE, bare_cell, config, group_of_one, world
from support.looked_at import SHORT, Looked, absent_key, once, passing, places_of, trained

pytestmark = pytest.mark.cell


def test_partial_load() -> None:
    where = "in the checkpoint of step 2"
    ran = passing(scenario="partial_load")
    assert places_of(ran.reports[0]) == {
        **once(2),
        **SHORT.loaded(2, again=True),
        ("model_equal", f"read by the key model {where}"): SHORT.names["model_equal"],
        ("optim_equal", f"read by the key optimizer.state {where}"): {
            name.removeprefix("state.") for name in SHORT.state
        },
        ("contract_held", f"read by the key model {where}"): {"model"},
        ("contract_held", f"read by the key optimizer.state {where}"): {"optimizer.state"},
        ("contract_held", f"not loaded {where}"): SHORT.restored - SHORT.names["model_equal"],
    }


def test_model_only() -> None:
    """Each checkpoint is loaded by every way that reads it; no other state is compared."""
    ran = passing(scenario="model_only", storage="hf_consolidated")
    places = places_of(ran.reports[0])
    tensors, where = SHORT.names["model_equal"], "in the checkpoint of step"
    compared = {place: names for place, names in places.items() if place[0] == "model_equal"}
    assert compared == {
        ("model_equal", f"{where} {step}{how}"): tensors
        for step in (1, 2)
        for how in ("", ", by each rank's files")
    }
    assert not places.keys() & {(check, f"{where} 2") for check in ("optim_equal", "extra_equal")}
    assert places["files_equal", f"{where} 2"] == {f"model.{name}" for name in tensors}


def test_in_place() -> None:
    target = trained(config(**TWICE))
    paths = set(in_place._places({name: each.state_dict() for name, each in target.state().items()}))
    ran = passing(scenario="in_place")
    where = "after the load in the checkpoint of step 2"
    assert places_of(ran.reports[0]) == once(2) | {("contract_held", where): paths}


def test_overwrite() -> None:
    ran = passing(scenario="overwrite")
    # What was in the one place is gone, and what was elsewhere was the control.
    expected = once(2) | SHORT.saved(3, first=False) | {("contract_held", "of the save"): {"refusal"}}
    del expected["files_unchanged", "in the checkpoint of step 1"]
    assert places_of(ran.reports[0]) == expected


def test_stateful_or_not() -> None:
    where = "in the checkpoint of step 2"
    ran = passing(scenario="stateful_or_not")
    plain = names_of_control(snapshot_nested(plain_values(world().device, 1)))
    beside = {f"plain.{name}" for name in plain} | {"stateful.data"}
    expected = once(2) | {("contract_held", where): {"plain", "stateful"}}
    expected["extra_equal", where] = SHORT.names["extra_equal"] | beside
    assert places_of(ran.reports[0]) == expected


def test_key_order() -> None:
    where = "in the checkpoint of step 2"
    with group_of_one() as group:
        ran = passing(scenario="key_order", seen_by=world(group=group))
    beside = {f"{each}.{name}" for each in ("gathering", "summing") for name in ("data", "seen")}
    expected = once(2)
    expected["extra_equal", where] = SHORT.names["extra_equal"] | beside
    assert places_of(ran.reports[0]) == expected


@pytest.mark.parametrize("scenario", ["fine_tune", "fine_tune_submodules"])
def test_fine_tune(scenario: str, tmp_path: Path) -> None:
    given = config(**TWICE, scenario=scenario)
    tuning = Looked(fine_tune._tuning(bare_cell(tmp_path, given), 3).config)
    parameters, pretrained = tuning.names["model_equal"], SHORT.names["model_equal"]
    expected = SHORT.saved(1) | tuning.saved(1, 2, first=False) | tuning.twin() | tuning.restart(2, 1)
    for step in (1, 2):
        expected[("contract_held", f"in the checkpoint of step {step}")] = parameters
        expected[("model_equal", f"after the restart from step {step}")] = pretrained
    del expected["contract_held", "of a load of an absent key in the checkpoint of step 2"]
    expected |= absent_key(1) | tuning.loaded(2, 1, again=True)
    # What both runs have looked at under one name.
    both = ("side_effect_free", "files_equal", "save_harmless", "gradient_close", "step_equal")
    own = SHORT.saved(1) | SHORT.twin()
    expected |= {place: names | expected[place] for place, names in own.items() if place[0] in both}
    expected[("side_effect_free", "after the load of step 1")] |= SHORT.all
    for where in ("before the fine-tuning", "after the fine-tuning"):
        expected[("model_equal", where)] = pretrained
    ran = passing(scenario=scenario)
    assert places_of(ran.reports[0]) == expected
