"""Ranks name their stateful objects in different orders, and the objects meet their peers while they are
loaded: were the ranks to load in their own orders, they would wait for each other for ever."""

from typing import Any

import torch
import torch.distributed as dist

from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.verify.snapshot import Leaves, retained, snapshot_nested
from dcpbench.workloads.world import World


class Gathering:
    """Loads with an all-gather of the ranks' numbers."""

    def __init__(self, world: World, value: float) -> None:
        self.world = world
        self.data = torch.full((10,), value, device=world.device)
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data = state_dict["data"]
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


Objects = dict[str, Gathering]


def key_order(cell: Cell) -> None:
    """Loading comes to an end, and every object got its own state."""
    oracle = steps.build(cell)
    saved = _objects(cell.world, 1.0)
    for each in saved.values():
        each.seen = each.meet()
    expected = _leaves(saved)

    def saved_state() -> dict[str, Any]:
        # dcp.save asks for state dicts in the order of each rank's keys, and only dcp.load sorts them:
        # what meets its peers in `state_dict` (FSDP1's optimizer does) must keep its place.
        state = {**oracle.trained.state(), **saved}
        last = {name: state.pop(name) for name in ("model", "optimizer")}
        return {**_turned(cell, state), **last}

    beside = {name: leaf for name, leaf in expected.items() if name.endswith(".data")}
    checkpoint = steps.train_and_save(cell, oracle, state=saved_state, beside=beside)[-1]
    checks.verify_twin(cell, oracle)

    target = steps.build_anew(cell)
    steps.make_different(cell, target, 0)
    checks.prove_power(cell, target, checkpoint)
    objects = _objects(cell.world, 5.0)
    before = _leaves(objects)
    state = _turned(cell, {**target.state(), **objects})
    steps.load(cell, target, checkpoint, state=state)
    checks.verify_restored(cell, target, checkpoint)
    checks.verify_equal(cell, "extra_equal", expected, _leaves(objects), str(checkpoint), before)


def _objects(world: World, value: float) -> Objects:
    return {"gathering": Gathering(world, value), "summing": Summing(world, value + 1)}


def _leaves(objects: Objects) -> Leaves:
    state = {name: {"data": each.data, "seen": each.seen} for name, each in objects.items()}
    return retained(snapshot_nested(state))


def _turned(cell: Cell, state: dict[str, Any]) -> dict[str, Any]:
    """The same state with its keys in an order that begins elsewhere on each rank."""
    names = sorted(state)
    first = cell.world.rank % len(names)
    return {name: state[name] for name in names[first:] + names[:first]}
