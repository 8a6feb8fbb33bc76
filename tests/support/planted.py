"""Defects of the loader, planted under a scenario that must see them; undone when its cell ends."""

import copy
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from torch.distributed.checkpoint import state_dict_loader

from dcpbench.scenarios import steps
from dcpbench.scenarios.cell import Cell

Read = Callable[..., None]


def planted(cell: Cell, scenario: str, defect: str) -> None:
    """Run a scenario with one of the defects below."""
    with DEFECTS[defect]():
        pkgutil.resolve_name(f"dcpbench.scenarios.{scenario}.{scenario}")(cell)


@contextmanager
def _read(changed: Callable[[Read, Cell, dict[str, Any], tuple[Any, ...]], None]) -> Iterator[None]:
    honest = steps.read

    def read(cell: Cell, state: dict[str, Any], *rest: Any) -> None:
        changed(honest, cell, state, rest)

    with mock.patch.object(steps, "read", read):
        yield


def _into_copies(read: Read, cell: Cell, state: dict[str, Any], rest: tuple[Any, ...]) -> None:
    """What is loaded lies in tensors of its own: equal, but not in place."""
    elsewhere = copy.deepcopy(state)
    read(cell, elsewhere, *rest)
    for name, nested in elsewhere.items():
        state[name].update(nested)


def _replacing_the_stateful(read: Read, cell: Cell, state: dict[str, Any], rest: tuple[Any, ...]) -> None:
    """The stateful object gives way to another one with the right values."""
    read(cell, state, *rest)
    state["stateful"] = copy.deepcopy(state["stateful"])


def _list_to_tuple(read: Read, cell: Cell, state: dict[str, Any], rest: tuple[Any, ...]) -> None:
    """A list comes back as a tuple of the same values."""
    read(cell, state, *rest)
    state["plain"]["list"] = tuple(state["plain"]["list"])


@contextmanager
def _touching_the_optimizer() -> Iterator[None]:
    """A load that asked for the model alone sets a learning rate too."""
    targets: list[Any] = []
    build_anew = steps.build_anew

    def remember(cell: Cell) -> Any:
        targets.append(build_anew(cell))
        return targets[-1]

    def touch(read: Read, cell: Cell, state: dict[str, Any], rest: tuple[Any, ...]) -> None:
        read(cell, state, *rest)
        targets[-1].optimizer.param_groups[0]["lr"] = 0.5

    with mock.patch.object(steps, "build_anew", remember), _read(touch):
        yield


@contextmanager
def _accepting() -> Iterator[None]:
    """A save that must be refused goes through."""
    honest = steps.write

    def write(cell: Cell, state: dict[str, Any], checkpoint_id: str, storage: Any, _: Any) -> Any:
        return honest(cell, state, checkpoint_id, storage, cell.world.checkpoint_group)

    with mock.patch.object(steps, "write", write):
        yield


def _swapped(read: Read, cell: Cell, state: dict[str, Any], rest: tuple[Any, ...]) -> None:
    """Two objects got each other's state."""
    read(cell, state, *rest)
    one, other = state["gathering"], state["summing"]
    one.data, other.data = other.data, one.data


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "into_copies": lambda: _read(_into_copies),
    "replacing_the_stateful": lambda: _read(_replacing_the_stateful),
    "list_to_tuple": lambda: _read(_list_to_tuple),
    "touching_the_optimizer": _touching_the_optimizer,
    "swapped": lambda: _read(_swapped),
    "accepting": _accepting,
    # dcp.load sorts its keys, so that ranks meet in one order: the name shadows the builtin.
    "unsorted": lambda: mock.patch.object(state_dict_loader, "sorted", list, create=True),
}
