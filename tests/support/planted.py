"""Defects of the loader, injected into a scenario that must report them; undone when its cell ends."""

import copy
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch.distributed.checkpoint import state_dict_loader

from dcpbench.cell import steps
from dcpbench.cell.cell import Cell
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.config.schema import conf_folder

State = dict[str, Any]
Load = Callable[[State], None]


def planted(cell: Cell, scenario: str, defect: str) -> None:
    """Run a scenario with one of the defects below."""
    with DEFECTS[defect]():
        declared = OmegaConf.load(conf_folder() / "scenario" / f"{scenario}.yaml")
        pkgutil.resolve_name(declared.target)(cell)


@contextmanager
def _loading(changed: Callable[[Load, State], None]) -> Iterator[None]:
    honest = DcpCheckpointer.load

    def load(self: DcpCheckpointer, state: State, checkpoint_id: str) -> None:
        changed(lambda given: honest(self, given, checkpoint_id), state)

    with mock.patch.object(DcpCheckpointer, "load", load):
        yield


def _into_copies(load: Load, state: State) -> None:
    """The loaded values are in new tensors: equal, but not in place."""
    elsewhere = copy.deepcopy(state)
    load(elsewhere)
    for name, nested in elsewhere.items():
        state[name].update(nested)


def _replacing_the_stateful(load: Load, state: State) -> None:
    """The stateful object gives way to another one with the right values."""
    load(state)
    state["stateful"] = copy.deepcopy(state["stateful"])


def _list_to_tuple(load: Load, state: State) -> None:
    """A list comes back as a tuple of the same values."""
    load(state)
    state["plain"]["list"] = tuple(state["plain"]["list"])


@contextmanager
def _touching_the_optimizer() -> Iterator[None]:
    """A load that asked for the model alone sets a learning rate too."""
    targets: list[Any] = []
    build_target = steps.build_target

    def remember(*args: Any) -> Any:
        targets.append(build_target(*args))
        return targets[-1]

    def touch(load: Load, state: State) -> None:
        load(state)
        targets[-1].optimizer.param_groups[0]["lr"] = 0.5

    with mock.patch.object(steps, "build_target", remember), _loading(touch):
        yield


@contextmanager
def _accepting() -> Iterator[None]:
    """A save that must be refused goes through: it meets its peers in the default group."""
    honest = dcp.async_save

    def async_save(*arguments: Any, **options: Any) -> Any:
        return honest(*arguments, **{**options, "process_group": None})

    with mock.patch.object(dcp, "async_save", async_save):
        yield


def _swapped(load: Load, state: State) -> None:
    """Two objects got each other's state."""
    load(state)
    one, other = state["gathering"], state["summing"]
    one.data, other.data = other.data, one.data


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "into_copies": lambda: _loading(_into_copies),
    "replacing_the_stateful": lambda: _loading(_replacing_the_stateful),
    "list_to_tuple": lambda: _loading(_list_to_tuple),
    "touching_the_optimizer": _touching_the_optimizer,
    "swapped": lambda: _loading(_swapped),
    "accepting": _accepting,
    # dcp.load sorts its keys, so that ranks meet in one order: the name shadows the builtin.
    "unsorted": lambda: mock.patch.object(state_dict_loader, "sorted", list, create=True),
}
