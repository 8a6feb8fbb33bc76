"""Files of torch's converters are read, and wrong ones are reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcpbench.scenarios.dcp_api import formats
from support.alone import ONCE, alone, group_of_one, world
from support.looked_at import passing

pytestmark = pytest.mark.cell

READ, BROADCAST, BACK = ", converted for torch.load", ", broadcast", ", converted and back"


def in_file(change: Callable[[Any], None]) -> Callable[[str, str], None]:
    """Return a conversion that changes the file."""
    honest = formats.dcp_to_torch_save

    def convert(folder: str, file: str) -> None:
        honest(folder, file)
        held = torch.load(file, weights_only=False)
        change(held)
        torch.save(held, file)

    return convert


def flip_a_bit(held: Any) -> None:
    weight = held["model"]["net1.weight"]
    weight.view(torch.int32)[0, 0] += 1


def double_the_lr(held: Any) -> None:
    held["optimizer"]["param_groups"][0]["lr"] *= 2


def count_on(held: Any) -> None:
    held["scheduler"]["last_epoch"] += 1


DEFECTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a bit": (flip_a_bit, "model_equal"),
    "a learning rate": (double_the_lr, "optim_equal"),
    "a count": (count_on, "extra_equal"),
}


def test_converted_file_and_checkpoint_are_equal() -> None:
    with group_of_one() as group:
        ran = passing(scenario="formats", saves=1, seen_by=world(group=group))
    compared = {str(where) for check in ran.reports[0].checks.values() for where in check.compared}
    assert {f"in the checkpoint of step 1{how}" for how in (READ, BROADCAST, BACK)} <= compared


@pytest.mark.parametrize("defect", DEFECTS)
def test_wrong_conversion_is_reported_both_ways(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, check = DEFECTS[defect]
    monkeypatch.setattr(formats, "dcp_to_torch_save", in_file(change))
    verdict, _ = alone(**ONCE, scenario="formats")
    assert verdict.status == "fail"
    seen = {one.check: {str(each.where) for each in one.mismatches} for one in verdict.failed}
    assert seen[check] == {f"in the checkpoint of step 1{how}" for how in (READ, BACK)}
