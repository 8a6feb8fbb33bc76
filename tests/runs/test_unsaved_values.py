"""Values that training depends on and no state dict has are named as the likely cause."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from conftest import Finished, run, selected
from dcpbench.analysis.causes import causes_of
from dcpbench.cell.checks import differing_texts
from dcpbench.report.page.data import why_null
from dcpbench.runs.unsaved_values import UnsavedValues
from support import forgotten
from support.notes import noted

PLACES = {
    "global": "support.forgotten._calls: 8, resumed 2",
    "entry": "support.forgotten.ENTRIES.calls: 8, resumed 2",
    "class": "support.forgotten.Block.total: 8, resumed 2",
    "count": "support.forgotten.NUMBERS: count(8), resumed count(2)",
    "attribute": "model.0.calls: 8, resumed 2",
}
"""What is named, by where a workload counts."""
STEPS = ["saves=1", "train_steps=6", "resume_steps=2"]
HERE = ["parallel=none", "world_size=1", "device=cpu", "retry=0"]


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    places = ",".join(selected(request, "place"))
    words = ["workload.target=support.forgotten.build", f"+workload.options.where={places}"]
    return run(tmp_path_factory.mktemp("unsaved") / "sweep", *HERE, *STEPS, *words)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_unsaved_value_is_the_first_cause(sweep: Finished, place: str) -> None:
    (row,) = [one for one in sweep.rows if f"where={place}" in one["overrides"]]
    assert row["status"] == "fail", row["reason"]
    first, *others = causes_of(row)
    assert first == f"{PLACES[place]}; in no state dict"
    shared = place != "attribute"
    assert (row["save_harmless"], row["gradient_close"]) == (not shared, not shared)
    assert [one.partition(",")[0] for one in others] == ["The save changes the run"] * shared
    assert f"likely: {first}" in " ".join(sweep.out.split())
    named = noted(row["details"]["ranks"][0], "in_no_state_dict")
    assert not any("_at" in name.lower() for name in named), "a time that no step changes is no cause"


@pytest.mark.slow
def test_lost_position_is_a_cause_behind_another(tmp_path: Path) -> None:
    words = ["checkpointer=trainer", "workload.target=support.forgotten.LosesItsPosition"]
    (row,) = run(tmp_path / "s", *HERE, *STEPS, *words).rows
    assert (row["status"], row["random_equal"], row["loss_resume_equal"]) == ("fail", None, False)
    first, *_, last = causes_of(row)
    assert first.startswith("Random generators were not restored")
    position = "The load may have lost a position that cannot be read: loader (DataLoader), position (_Sing"
    assert last.startswith(position)
    assert ["extra_equal of loader", "a DataLoader has no state that can be read"] in why_null(row)


def test_plain_values_are_read_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(forgotten.Block("attribute"), nn.BatchNorm1d(8))
    block = model[0]
    block.register_buffer("mask", torch.ones(2), persistent=False)
    block.seen = {"b", "a"}
    block.nested = {"list": [1, {"two": np.float32(2)}], "weights": [*block.parameters()]}
    block.order = np.random.default_rng(1)
    block.noise = torch.Generator()
    block.data = DataLoader([1])
    block.gathered = torch.ones(2)
    block.gathered.untyped_storage().resize_(0)  # as FSDP frees it; to read it is a segmentation fault
    block.long = "x" * 1000
    monkeypatch.setattr(forgotten, "_calls", 7)
    monkeypatch.setattr(forgotten, "NUMBERS", itertools.count(3))
    values = UnsavedValues({"model": model})
    expected = {
        "model.0.calls": "0",
        "model.0.mask": "[1.0, 1.0]",
        "model.0.seen": "set[\"'a'\", \"'b'\"]",
        "model.0.nested.list.0": "1",
        "model.0.nested.list.1.two": "2.0",
        "model.1.momentum": "0.1",
        "support.forgotten._calls": "7",
        "support.forgotten.NUMBERS": "count(3)",
        "support.forgotten.Block.total": "0",
    }
    assert {name: values.texts.get(name) for name in expected} == expected
    assert len(values.texts["model.0.long"]) < 100
    assert "model.0.gathered" not in values.texts
    assert values.unreadable["model.0.data"] == "DataLoader"
    others = {name.partition(".")[0] for name in values.texts}
    assert others.isdisjoint({"torch", "numpy", "dcpbench", "pytest"})
    texts = of_model(model)
    assert not any(part in name for name in texts for part in ("weights", ".weight", "training"))
    elsewhere = [block.noise.get_state() for _ in range(10)]  # so that the next state has another address
    assert differing_texts(texts, of_model(model), "resumed") == {}, elsewhere
    block.order.random()
    block.long += "y"
    torch.rand(1, generator=block.noise)
    changed = [*differing_texts(texts, of_model(model), "resumed")]
    assert changed == ["model.0.order", "model.0.noise", "model.0.long"]
    assert {name.partition(".")[0] for name in values.texts}.isdisjoint(
        {"torch", "numpy", "dcpbench", "pytest"}
    )


def of_model(model: nn.Module) -> dict[str, str]:
    """Return what is read of a model; other tests import modules with globals too."""
    texts = UnsavedValues({"model": model}).texts
    return {name: text for name, text in texts.items() if name.startswith("model.")}


def test_whole_numbers_are_named_first() -> None:
    before = {"loss": "0.5", "calls": "4", "same": "1", "made": "2"}
    texts = differing_texts(before, {"same": "1", "calls": "2", "new": "1"}, "then")
    assert texts == {"calls": "4, then 2", "made": "2, then absent", "loss": "0.5, then absent"}
    assert [*texts] == ["calls", "made", "loss"]
