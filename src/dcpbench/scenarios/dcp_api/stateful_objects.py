"""Objects with state of their own, and plain dictionaries, in addition to a model and an optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.cell import checks, contract, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.compare.controls import compare_controlled
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.runs.run import Run
from dcpbench.state.snapshot import Leaves, retained, snapshot_nested
from dcpbench.workloads.stateful import TensorObject
from dcpbench.workloads.world import World


def object_scenario(
    cell: Cell,
    saved: dict[str, Any],
    fresh: dict[str, Any],
    order: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> tuple[Checkpoint, "Recording"]:
    """Save objects in addition to a training run, load them into others, and compare types and values. Return
    the checkpoint, and the state dict that was loaded into.

    Args:
        saved: the objects and plain dictionaries that are saved.
        fresh: those that are loaded into.
        order: reorders the keys of a state dict.
    """
    expected = _leaves(saved)
    promised = snapshot_nested({name: _state_of(stateful) for name, stateful in saved.items()})

    def saved_state(run: Run) -> dict[str, Any]:
        state = {**run.state(), **saved}
        if order is None:
            return state
        # dcp.save calls `state_dict` in each rank's order of keys; only dcp.load sorts them. State dicts
        # with collectives (FSDP1's optimizer and model) must keep their order.
        last = state.pop("optimizer")
        return {**order(state), "optimizer": last}

    reference = uninterrupted.train_and_save_reference(cell, state=saved_state, extra=retained(promised))
    checkpoint = reference.checkpoints[-1]
    target = steps.build_target(cell, reference)
    controls = checks.perturb_target(cell, target, checkpoint)
    before = _leaves(fresh)
    state = {**target.state(), **fresh}
    given = Recording(order(state) if order else state)
    steps.load(cell, target, checkpoint, state=given)
    checks.verify_restored(cell, target, checkpoint, controls)
    loaded = {
        name: given[name] if isinstance(fresh_object, dict) else fresh_object
        for name, fresh_object in fresh.items()
    }
    with cell.phase("verify", "equality"):
        cell.record("extra_equal", compare_controlled(expected, _leaves(loaded), before), checkpoint.place)
    checks.resume(cell, target, checkpoint, reference)
    return checkpoint, given


def _state_of(stateful: Any) -> dict[str, Any]:
    state: dict[str, Any] = stateful if isinstance(stateful, dict) else stateful.state_dict()
    return state


def _leaves(objects: dict[str, Any]) -> Leaves:
    """Return the contents of objects, with the numbers that gathering ones have gathered."""
    seen = {
        name: {"seen": gathering.seen}
        for name, gathering in objects.items()
        if isinstance(gathering, Gathering)
    }
    state = {name: {**_state_of(stateful), **seen.get(name, {})} for name, stateful in objects.items()}
    return retained(snapshot_nested(state))


class Recording(dict[str, Any]):
    """A state dict that records which of its keys are set."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.was_set: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.was_set.append(key)
        super().__setitem__(key, value)


class Gathering(TensorObject):
    """Loads with an all-gather of the ranks' numbers."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(seed, world.device)
        self.world = world
        self.seen: list[int] = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.seen = self.meet()

    def meet(self) -> list[int]:
        """Exchange the ranks' numbers; collective."""
        rank = torch.tensor([self.world.rank], device=self.world.device)
        theirs = [torch.empty_like(rank) for _ in range(self.world.size)]
        dist.all_gather(theirs, rank)
        return [int(number) for number in theirs]


class Summing(Gathering):
    """Loads with an all-reduce of the ranks' numbers."""

    def meet(self) -> list[int]:
        total = torch.tensor([self.world.rank + 100], device=self.world.device)
        dist.all_reduce(total)
        return [int(total)]


def key_order(cell: Cell) -> None:
    """Ranks list their stateful objects in different orders, and loading them is collective: if ranks loaded
    in their own orders they would deadlock. The load ends, and every object gets its own state."""
    saved = _objects(cell.world, 1)
    for gathering in saved.values():
        gathering.seen = gathering.meet()
    object_scenario(cell, saved, _objects(cell.world, 5), partial(_turned, cell))


def _objects(world: World, seed: int) -> dict[str, Gathering]:
    return {"gathering": Gathering(world, seed), "summing": Summing(world, seed + 1)}


def _turned(cell: Cell, state: dict[str, Any]) -> dict[str, Any]:
    """Return the same state with its keys in an order that starts at another key on each rank."""
    names = sorted(state)
    first = cell.world.rank % len(names)
    return {name: state[name] for name in names[first:] + names[:first]}


class Counting(TensorObject):
    """A stateful object that counts its loads."""

    loads = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.loads += 1


def stateful_or_not(cell: Cell) -> None:
    """A stateful object is restored by its `load_state_dict` and stays the same object; a plain dictionary is
    filled and put back into the given state dict. Types and values of both are restored."""
    device = cell.world.device
    saved = {"plain": plain_values(device, 1), "stateful": Counting(1, device)}
    fresh = Counting(2, device)
    checkpoint, given = object_scenario(cell, saved, {"plain": plain_values(device, 2), "stateful": fresh})
    swapped = Recording({"plain": None, "stateful": None})
    swapped["stateful"] = Counting(0, device)
    compared = Compared.of(_wrong(given, fresh), _wrong(swapped, fresh), ["plain", "stateful"])
    cell.record("contract_held", compared, checkpoint.place)


def plain_values(device: torch.device, which: int) -> dict[str, Any]:
    """Return nested values of every kind that a state dict can contain; each `which` has other values."""
    return {
        "int": which,
        "float": which / 10,
        "bool": bool(which % 2),
        "string": f"epoch {which}",
        "bytes": bytes([0, 255, which]),
        "none": None if which == 1 else which,
        "list": [which, [which / 2, f"{which}"], None],
        "scalar": torch.tensor(which / 3, device=device),
        "empty": torch.empty(0, 3, device=device),
        "half": torch.full((2, 2), which, dtype=torch.bfloat16, device=device),
        "nested": {
            "count": torch.tensor([which], dtype=torch.int64, device=device),
            "deep": {"name": str(which)},
        },
    }


def _wrong(given: Recording, stateful: Counting) -> list[Mismatch]:
    mismatches: list[Mismatch] = []
    if given["stateful"] is not stateful or "stateful" in given.was_set:
        mismatches.append(contract.violation("stateful", "it was replaced by another object"))
    elif stateful.loads != 1:
        mismatches.append(
            contract.violation("stateful", f"its load_state_dict was called {stateful.loads} times")
        )
    if "plain" not in given.was_set:
        mismatches.append(contract.violation("plain", "the loaded dictionary was not put back"))
    return mismatches
