"""Objects that a workload saves in addition to its model: averages of weights, counters, samplers."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpbench.verify.perturb import perturb_model, perturbed
from dcpbench.verify.snapshot import Leaves, snapshot_model, snapshot_nested
from dcpbench.workloads.stateful import ModelState

State = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]]
"""Objects by name, or a function of the wrapped model that returns them."""
TAKEN = ("model", "optimizer", "scheduler", "noise", "tensor_object", "train_state", "random")
"""The other top-level keys of a checkpoint."""


class SavedObjects:
    """The objects of a run, by name: modules, which are saved under their FQNs, and others with `state_dict`
    and `load_state_dict`.

    Args:
        is_not_saved: whether a name is left out of checkpoints.
    """

    def __init__(
        self, objects: Mapping[str, Any], is_not_saved: Callable[[str], bool] = lambda name: False
    ) -> None:
        self._every = [*objects.values()]
        saved = {name: one for name, one in objects.items() if not is_not_saved(name)}
        self.modules = {name: one for name, one in saved.items() if isinstance(one, nn.Module)}
        self.others = {name: one for name, one in saved.items() if name not in self.modules}
        for name, module in self.modules.items():
            if not snapshot_model(module):
                what = f"{name!r} is a {type(module).__name__} with an empty state dict"
                raise ValueError(f"state of the Workload: {what}; leave it out")

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        """Return what a checkpoint contains: a `Stateful` for each."""
        options = replace(options, ignore_frozen_params=False)
        return {name: ModelState(one, options) for name, one in self.modules.items()} | self.others

    def leaves(self) -> Leaves:
        """Return the state of all for comparison."""
        return self.module_leaves() | snapshot_nested(
            {name: one.state_dict() for name, one in self.others.items()}
        )

    def module_leaves(self) -> Leaves:
        """Return the state of the modules, which a twin has too."""
        return {
            f"{name}.{key}": leaf
            for name, module in self.modules.items()
            for key, leaf in snapshot_model(module).items()
        }

    def forget(self, seed: int) -> None:
        """Change all values. An object that refuses other values keeps its own."""
        for module in self.modules.values():
            perturb_model(module, seed)
        for one in self.others.values():
            before = copy.deepcopy(one.state_dict())
            try:
                one.load_state_dict(perturbed(before))
            except Exception:  # noqa: BLE001 - a user's object may refuse it in any way
                with suppress(Exception):
                    one.load_state_dict(before)

    def copy_from(self, other: "SavedObjects") -> None:
        """Bring all into the state of the same objects of another run, also those that are not saved."""
        for mine, theirs in zip(self._every, other._every, strict=True):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
