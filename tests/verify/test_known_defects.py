"""How far what is known to be wrong may be off: against what of a tensor."""

import pytest
import torch

from dcpbench.records.findings import Finding
from dcpbench.verify import known_defects
from dcpbench.verify.compare import compare
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import Leaves, TensorLeaf

PEERS = 8.0
"""The largest magnitude in the other rank's part."""


def part(*values: float) -> Leaves:
    """One rank's half of a tensor of four elements, and what is no tensor."""
    return {"moment": TensorLeaf(torch.tensor(values), Extent((4,), (0,), (2,), 0, 2), None), "lr": values[0]}


def scaled(monkeypatch: pytest.MonkeyPatch, restored: Leaves) -> dict[str, Finding]:
    """What is found of a part of which a peer has the rest, by name."""
    monkeypatch.setattr(known_defects, "gathered", lambda mine, group: [mine, {"moment": PEERS}])
    found = compare(part(1.0, 2.0), restored)
    return {one.name: one for one in known_defects.against_whole(found, part(1.0, 2.0), None)}


def test_a_distance_is_a_share_of_the_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scaled(monkeypatch, part(1.0, 2.0)) == {}
    found = scaled(monkeypatch, part(5.0, 2.0))
    assert found["moment"].facts["share"] == 4.0 / PEERS
    assert found["lr"] == compare({"lr": 1.0}, {"lr": 5.0})[0], "what is no tensor stays as it is"


def test_what_is_not_a_number_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scaled(monkeypatch, part(float("nan"), 2.0))
    assert "share" not in found["moment"].facts
