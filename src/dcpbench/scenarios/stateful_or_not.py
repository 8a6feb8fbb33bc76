"""What carries its own state is restored by its own `load_state_dict` and stays the object it is; what is
a plain dictionary is filled and put back into the state dict that was given."""

from typing import Any

import torch

from dcpbench.records.findings import Finding
from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.verify.snapshot import retained, snapshot_nested


class Counting:
    """A stateful object that counts how often it was loaded."""

    def __init__(self, value: float, device: torch.device) -> None:
        self.data = torch.full((3, 4), value, device=device)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data = state_dict["data"]
        self.loads += 1


class Recording(dict[str, Any]):
    """A state dict that knows which of its keys were set."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.was_set: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.was_set.append(key)
        super().__setitem__(key, value)


def stateful_or_not(cell: Cell) -> None:
    """Both kinds come back with type and value, each in its own way, beside a model and an optimizer."""
    device = cell.world.device
    oracle = steps.build(cell)
    plain, stateful = plain_values(device, 1), Counting(1.0, device)

    def state() -> dict[str, Any]:
        return {**oracle.trained.state(), "plain": plain, "stateful": stateful}

    expected = retained(snapshot_nested({"plain": plain, "stateful": stateful.state_dict()}))
    checkpoint = steps.train_and_save(cell, oracle, state=state, beside=expected)[-1]
    checks.verify_twin(cell, oracle)

    target = steps.build_anew(cell)
    steps.make_different(cell, target, 0)
    checks.prove_power(cell, target, checkpoint)
    fresh = Counting(2.0, device)
    given = Recording({**target.state(), "plain": plain_values(device, 2), "stateful": fresh})
    before = retained(snapshot_nested({"plain": given["plain"], "stateful": fresh.state_dict()}))
    steps.load(cell, target, checkpoint, state=given)
    checks.verify_restored(cell, target, checkpoint)
    loaded = snapshot_nested({"plain": given["plain"], "stateful": fresh.state_dict()})
    checks.verify_equal(cell, "extra_equal", expected, loaded, str(checkpoint), before)

    swapped = Recording({"plain": None, "stateful": None})
    swapped["stateful"] = Counting(0.0, device)
    held, broken = _wrong(given, fresh), _wrong(swapped, fresh)
    checks.verify_contract(cell, held, broken, ["plain", "stateful"], str(checkpoint))


def plain_values(device: torch.device, which: int) -> dict[str, Any]:
    """Nested values of every kind that a state dict may hold; each `which` has others."""
    return {
        "int": which,
        "float": 0.1 * which,
        "bool": which == 1,
        "string": f"epoch {which}",
        "bytes": bytes([0, 255, which]),
        "none": None if which == 1 else which,
        "list": [which, [0.5 * which, f"{which}"], None],
        "scalar": torch.tensor(1.5 * which, device=device),
        "empty": torch.empty(0, 3, device=device),
        "half": torch.full((2, 2), which, dtype=torch.bfloat16, device=device),
        "nested": {
            "count": torch.tensor([which], dtype=torch.int64, device=device),
            "deep": {"name": str(which)},
        },
    }


def _wrong(given: Recording, stateful: Counting) -> list[Finding]:
    found: list[Finding] = []
    if given["stateful"] is not stateful or "stateful" in given.was_set:
        found.append(checks.breach("stateful", "it was replaced by another object"))
    elif stateful.loads != 1:
        found.append(checks.breach("stateful", f"its load_state_dict was called {stateful.loads} times"))
    if "plain" not in given.was_set:
        found.append(checks.breach("plain", "the loaded dictionary was not put back"))
    return found
