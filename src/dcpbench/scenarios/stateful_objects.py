"""Objects that carry their own state, and plain dictionaries, beside a model and an optimizer."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import checks, contract, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.snapshot import Leaves, retained, snapshot_nested
from dcpbench.workloads.stateful import TensorObject
from dcpbench.workloads.world import World


def object_scenario(
    cell: Cell,
    saved: dict[str, Any],
    fresh: dict[str, Any],
    extra: Callable[[Checkpoint, dict[str, Any]], None] = lambda checkpoint, given: None,
    order: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Save objects in addition to a training run, load them into others, and compare these by type and value.

    Args:
        saved: the objects and plain dictionaries that are saved.
        fresh: those that are loaded; none if that is not what the scenario is about.
        extra: called with the checkpoint and the state dict that was loaded into.
        order: puts the keys of a state dict into another order.
    """
    reference = steps.build(cell)
    expected = _leaves(saved)
    promised = snapshot_nested({name: _state_of(one) for name, one in saved.items()})

    def saved_state() -> dict[str, Any]:
        state = {**reference.trained.state(), **saved}
        if order is None:
            return state
        # dcp.save asks for state dicts in the order of each rank's keys, and only dcp.load sorts them:
        # what meets its peers in `state_dict` (FSDP1's optimizer and model do) must keep its order.
        last = state.pop("optimizer")
        return {**order(state), "optimizer": last}

    checkpoint = steps.train_and_save(cell, reference, state=saved_state, beside=retained(promised))[-1]
    checks.verify_training(cell, reference)

    target = steps.build_anew(cell)
    unrestored = checks.make_different(cell, target, checkpoint)
    before = _leaves(fresh)
    state = {**target.state(), **fresh}
    given = Recording(order(state) if order else state)
    steps.load(cell, target, checkpoint, state=given)
    checks.verify_restored(cell, target, checkpoint, unrestored)
    if fresh:
        loaded = {name: given[name] if isinstance(one, dict) else one for name, one in fresh.items()}
        with cell.phase("verify", "equality"):
            cell.record("extra_equal", compare_controlled(expected, _leaves(loaded), before), str(checkpoint))
    extra(checkpoint, given)
    checks.resume(cell, target, checkpoint, reference.losses)


def _state_of(one: Any) -> dict[str, Any]:
    state: dict[str, Any] = one if isinstance(one, dict) else one.state_dict()
    return state


def _leaves(objects: dict[str, Any]) -> Leaves:
    """The contents of objects, and the numbers that those which gather have gathered."""
    seen = {name: {"seen": one.seen} for name, one in objects.items() if isinstance(one, Gathering)}
    state = {name: {**_state_of(one), **seen.get(name, {})} for name, one in objects.items()}
    return retained(snapshot_nested(state))


class Recording(dict[str, Any]):
    """A state dict that knows which of its keys were set."""

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
        """A collective: what the ranks tell each other."""
        mine = torch.tensor([self.world.rank], device=self.world.device)
        theirs = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(theirs, mine)
        return [int(number) for number in theirs]


class Summing(Gathering):
    """Loads with an all-reduce of the ranks' numbers."""

    def meet(self) -> list[int]:
        total = torch.tensor([self.world.rank + 100], device=self.world.device)
        dist.all_reduce(total)
        return [int(total)]


def key_order(cell: Cell) -> None:
    """Ranks name their stateful objects in different orders, and the objects meet their peers while they are
    loaded: were the ranks to load in their own orders, they would wait for each other for ever. Loading
    comes to an end, and every object got its own state."""
    saved = _objects(cell.world, 1)
    for each in saved.values():
        each.seen = each.meet()
    object_scenario(cell, saved, _objects(cell.world, 5), order=partial(_turned, cell))


def _objects(world: World, seed: int) -> dict[str, Gathering]:
    return {"gathering": Gathering(world, seed), "summing": Summing(world, seed + 1)}


def _turned(cell: Cell, state: dict[str, Any]) -> dict[str, Any]:
    """The same state with its keys in an order that begins elsewhere on each rank."""
    names = sorted(state)
    first = cell.world.rank % len(names)
    return {name: state[name] for name in names[first:] + names[:first]}


class Counting(TensorObject):
    """A stateful object that counts how often it was loaded."""

    loads = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.loads += 1


def stateful_or_not(cell: Cell) -> None:
    """What carries its own state is restored by its own `load_state_dict` and stays the object it is; what
    is a plain dictionary is filled and put back into the state dict that was given. Both come back with
    type and value."""
    device = cell.world.device
    fresh = Counting(2, device)

    def verify_contract(checkpoint: Checkpoint, given: dict[str, Any]) -> None:
        swapped = Recording({"plain": None, "stateful": None})
        swapped["stateful"] = Counting(0, device)
        assert isinstance(given, Recording)
        compared = Compared.of(_wrong(given, fresh), _wrong(swapped, fresh), ["plain", "stateful"])
        cell.record("contract_held", compared, str(checkpoint))

    saved = {"plain": plain_values(device, 1), "stateful": Counting(1, device)}
    object_scenario(cell, saved, {"plain": plain_values(device, 2), "stateful": fresh}, verify_contract)


def plain_values(device: torch.device, which: int) -> dict[str, Any]:
    """Nested values of every kind that a state dict may hold; each `which` has others."""
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
    found: list[Mismatch] = []
    if given["stateful"] is not stateful or "stateful" in given.was_set:
        found.append(contract.violation("stateful", "it was replaced by another object"))
    elif stateful.loads != 1:
        found.append(contract.violation("stateful", f"its load_state_dict was called {stateful.loads} times"))
    if "plain" not in given.was_set:
        found.append(contract.violation("plain", "the loaded dictionary was not put back"))
    return found


class Keyed:
    """A stateful object that holds a tensor and a number under each of its keys."""

    def __init__(self, keys: list[Any], first: int, device: torch.device) -> None:
        self.values = dict(zip(keys, itertools.count(first), strict=False))
        self.tensors = {key: torch.full((2,), value, device=device) for key, value in self.values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "tensors": self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values, self.tensors = state_dict["values"], state_dict["tensors"]


def other_keys(cell: Cell, saved: list[Any], loaded: list[Any]) -> None:
    """An object that may have other keys when it is loaded than when it was saved: all that was saved comes
    back, and what is asked for and was not saved is refused.

    Args:
        saved: its keys when it is saved.
        loaded: those that it has before it is loaded.
    """
    device = cell.world.device
    lacking = [key for key in loaded if key not in saved]

    def verify_refused(checkpoint: Checkpoint, _: dict[str, Any]) -> None:
        def asking_for(keys: list[Any]) -> Callable[[], None]:
            state = {"keyed": Keyed(keys, 5, device)}
            return lambda: checkpoint.checkpointer.load(state, checkpoint.checkpoint_id)

        calls = asking_for(loaded), asking_for(saved)
        where = f"of a load with more keys {checkpoint}"
        with cell.phase("verify", "refused"):
            for key in lacking:
                name = f"keyed.values.{key}"
                contract.verify_refused(cell, CheckpointException, name, *calls, where)

    fresh = Keyed([key for key in loaded if key not in lacking], 5, device)
    object_scenario(cell, {"keyed": Keyed(saved, 1, device)}, {"keyed": fresh}, verify_refused)


def other_dtype(cell: Cell, saved: str, loaded: str) -> None:
    """A tensor that is to be loaded into one of another dtype has to be refused: what comes of it is not what
    was saved.

    Args:
        saved: the name of torch's dtype of the tensor that is saved.
        loaded: that of the one that it is loaded into.
    """
    device = cell.world.device
    held = {"tensor": torch.arange(1, 9, device=device).to(getattr(torch, saved)) / 3}

    def verify_refused(checkpoint: Checkpoint, _: dict[str, Any]) -> None:
        def into(dtype: str) -> Callable[[], None]:
            state = {"typed": {"tensor": torch.zeros(8, dtype=getattr(torch, dtype), device=device)}}
            return lambda: checkpoint.checkpointer.load(state, checkpoint.checkpoint_id)

        where = f"of a load into {loaded} {checkpoint}"
        with cell.phase("verify", "refused"):
            contract.verify_refused(cell, CheckpointException, "dtype", into(loaded), into(saved), where)

    object_scenario(cell, {"typed": held}, {}, verify_refused)
