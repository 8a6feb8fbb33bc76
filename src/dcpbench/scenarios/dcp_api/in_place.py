"""Load into existing state dicts: DCP fills their dictionaries and tensors and replaces none."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from dcpbench.cell import checks, contract, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name, text_of
from dcpbench.state.snapshot import entries_of, local_part


def in_place(cell: Cell) -> None:
    """The dictionaries are the same objects, their tensors have the same memory, and a run that is set from
    them has the saved values, including the learning rate."""
    reference = uninterrupted.train_and_save_reference(cell)
    checkpoint = reference.checkpoints[-1]

    target = steps.build_target(cell, reference)
    controls = checks.perturb_target(cell, target, checkpoint)
    stateful = target.state()
    given = {name: stateful_object.state_dict() for name, stateful_object in stateful.items()}
    filled = dict(given)
    before = _places(given)

    def verify_and_set() -> None:
        places = {**_places(filled), "state": before["state"]}
        held, broken = _moved(before, places), _moved(before, _places(copy.deepcopy(given)))
        cell.record(
            "contract_held",
            Compared.of(held, broken, [*before]),
            checkpoint.at("after the load in the checkpoint of step {step}"),
        )
        for name, stateful_object in stateful.items():
            stateful_object.load_state_dict(given[name])

    steps.load(cell, target, checkpoint, state=filled, install=verify_and_set)
    checks.verify_restored(cell, target, checkpoint, controls)
    checks.resume(cell, target, checkpoint, reference)


Places = dict[str, tuple[object, int]]


def _places(nested: Mapping[Any, Any], path: Name = ("state",)) -> Places:
    """Return every dictionary and tensor by its path, with the address of a tensor's elements. DCP replaces
    lists, so they are left out with what is in them."""
    places: Places = {text_of(path): (nested, 0)}
    for _, value, below in entries_of(nested, path):
        if isinstance(value, Mapping):
            places.update(_places(value, below))
        elif isinstance(value, torch.Tensor):
            places[text_of(below)] = (value, local_part(value).data_ptr())
    return places


def _moved(before: Places, after: Places) -> list[Mismatch]:
    """Find paths with another object, or with elements at another address."""
    return [
        contract.violation(path, "it is not the object that was given, or its elements lie elsewhere")
        for path, (given, address) in before.items()
        if path not in after or after[path][0] is not given or after[path][1] != address
    ]
