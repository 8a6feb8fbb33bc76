"""Give a run the saved values of what known defects of torch made wrong in a load. What it trains from then on
can differ from the uninterrupted run only because of something else."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.verify.layout import Extent, ParameterPart
from dcpbench.verify.nested import is_gone_into, items, slots
from dcpbench.verify.snapshot import (
    DigestedLeaf,
    Idle,
    Leaf,
    Leaves,
    TensorLeaf,
    digest_of,
    has_extra_state,
    local_part,
    named_parts,
    parts_of_each,
    plain_fqn,
)
from dcpbench.workloads.optimizers import each_of
from dcpbench.workloads.run_state import CHANGING, FLAGS, RANDOM, live_state
from dcpbench.workloads.training_run import TrainingRun


def explained_names(cell: Cell, check: str, checkpoint: Checkpoint | None = None) -> dict[str, str]:
    """Return the names of which known defects explain all mismatches of this rank, with a defect, after a load
    of a checkpoint or of any."""
    report = cell.report.checks.get(check)
    every = [*report.distinct.values()] if report else []
    mismatches = [one for one in every if checkpoint is None or one.where == str(checkpoint)]
    unexplained = {one.name for one in mismatches if not one.by}
    return {one.name: one.by for one in mismatches if one.by and one.name not in unexplained}


def mend(cell: Cell, target: TrainingRun, checkpoint: Checkpoint) -> str | None:
    """Give a run that has loaded a checkpoint the saved values of exactly what known defects made wrong. Return
    why that is not possible, if it is not; collective."""
    checks = [check for check in checkpoint.state if check not in (FLAGS, CHANGING)]
    wrong = {check: explained_names(cell, check, checkpoint) for check in checks}
    if not any(cell.world.gathered(any(wrong.values()))):
        return None
    with torch.no_grad():
        for check, names in wrong.items():
            if names:
                _Mending(target, checkpoint, check, names).give()
    live, left = live_state(target), []
    for check in checks:
        if check in live:
            found = checkpoint.compare(check, live[check], cell.world.group, closely=False)
            left += [(one.name, wrong[check][one.name]) for one in found if one.name in wrong[check]]
    first = next((of_rank[0] for of_rank in cell.world.gathered(left) if of_rank), None)
    return first and f"{first[0]} was not restored ({first[1]}), and its saved value cannot be set"


class _Mending:
    """Sets the wrong `names` of a check in a run to their saved values. A name that was not saved is
    removed."""

    def __init__(
        self, target: TrainingRun, checkpoint: Checkpoint, check: str, names: Mapping[str, str]
    ) -> None:
        self._target, self._checkpoint, self._check, self._names = target, checkpoint, check, names
        self._saved: Leaves = checkpoint.state[check]

    def give(self) -> None:
        """Set all values."""
        for name, leaf in live_state(self._target).get(self._check, {}).items():
            leaf = leaf.leaf if isinstance(leaf, Idle) else leaf
            if name in self._names and isinstance(leaf, TensorLeaf):
                self._copy(name, leaf.local, leaf.extent)
        if self._check == "optim_equal":
            self._give_entries()
            for number, group in enumerate(self._target.optimizer.param_groups):
                group.update(self._group(group, f"param_groups.{number}."))
        for name, state, load in self._objects():
            if any(wrong.startswith(f"{name}.") or wrong == name for wrong in self._names):
                load(self._mended({name: state}, "")[name])

    def _give_entries(self) -> None:
        """Set entries of the optimizer's state, each made like its parameter if it is missing."""
        parts = parts_of_each(named_parts(self._target.model))
        for optimizer in each_of(self._target.optimizer):
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                for fqn, part in parts.get(id(parameter), {}).items():
                    prefix = f"state.{fqn}."
                    for name in (one for one in self._names if one.startswith(prefix)):
                        entries = optimizer.state[parameter]
                        places = {path: (holder, key) for holder, key, path in slots(entries, prefix)}
                        holder, key = places.get(name, (entries, name.removeprefix(prefix)))
                        if name in self._saved:
                            holder[key] = self._entry(name, part, holder.get(key))
                        else:
                            holder.pop(key, None)

    def _entry(self, name: str, part: ParameterPart, current: Any) -> Any:
        """Return an entry of a parameter with its saved value; `current` is the live one, if there is one."""
        leaf = self._saved_leaf(name)
        if not isinstance(leaf, TensorLeaf | DigestedLeaf):
            return copy.deepcopy(leaf)
        lies = bool(part.extent.shape) and leaf.extent.shape == part.extent.shape
        if not isinstance(current, torch.Tensor) or current.dtype != leaf.dtype:
            current = torch.zeros_like(part.parameter, dtype=leaf.dtype)
            if not lies:
                value = self._value(name, leaf.extent)
                return current if value is None else value.clone()
        local = local_part(current)
        self._copy(name, part.of(local) if lies else local, part.extent if lies else leaf.extent)
        return current

    def _group(self, group: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the hyperparameters of a group with their saved values."""
        options = self._mended({key: value for key, value in group.items() if key != "params"}, prefix)
        names = (name for name in self._names if name.startswith(prefix) and name in self._saved)
        missing = {name.removeprefix(prefix): copy.deepcopy(self._saved[name]) for name in names}
        return {**missing, **options}

    def _objects(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the objects of the check: name, state dict, and a function that loads one."""
        target = self._target
        if self._check == "model_equal":
            for prefix, module in target.model.named_modules():
                if has_extra_state(module):
                    name = plain_fqn(target.model, f"{prefix}._extra_state".lstrip("."))
                    yield name, module.get_extra_state(), module.set_extra_state
        if self._check == RANDOM:
            yield "random", target.random.state_dict(), target.random.load_state_dict
        if self._check == "extra_equal":
            objects = {**target.component.saved.others, **target.saved.others, "noise": target.noise}
            if target.has_scheduler:
                objects["scheduler"] = target.scheduler
            for name, each in objects.items():
                yield name, each.state_dict(), each.load_state_dict
            yield "train_state", vars(target.train_state), vars(target.train_state).update

    def _mended(self, state: Any, prefix: str) -> Any:
        """Return nested values with the saved ones under the wrong names; tensors are changed in place."""
        if isinstance(state, list):
            return [self._mended_item(value, key) for _, value, key in items(state, prefix)]
        mended = copy.copy(state)
        for name, value, key in items(state, prefix):
            if key in self._names and key not in self._saved:
                del mended[name]
                continue
            mended[name] = self._mended_item(value, key)
            if is_gone_into(value) and value and not mended[name]:
                del mended[name]
        return mended

    def _mended_item(self, value: Any, key: str) -> Any:
        if is_gone_into(value):
            return self._mended(value, f"{key}.")
        if key not in self._names:
            return value
        leaf = self._saved_leaf(key)
        if isinstance(value, torch.Tensor) and isinstance(leaf, TensorLeaf | DigestedLeaf):
            self._copy(key, local_part(value), leaf.extent)
            return value
        return leaf.local.clone() if isinstance(leaf, TensorLeaf) else copy.deepcopy(leaf)

    def _copy(self, name: str, local: torch.Tensor, extent: Extent) -> None:
        """Copy the saved value into a part with this extent, if it has the same dtype."""
        value = self._value(name, extent)
        if value is not None and value.dtype == local.dtype and value.numel() == local.numel():
            local.copy_(value.reshape(local.shape))

    def _value(self, name: str, extent: Extent) -> torch.Tensor | None:
        """Return the part of a saved tensor that has this extent. If only its digest was kept, the checkpoint
        has to contain what was saved."""
        leaf = self._saved_leaf(name)
        if isinstance(leaf, TensorLeaf) and leaf.extent == extent:
            return leaf.local
        if not isinstance(leaf, TensorLeaf | DigestedLeaf):
            return None
        full = self._checkpoint.recall_of(self._check)(name)
        if full is None or (tuple(full.shape), full.dtype) != (leaf.extent.shape, leaf.dtype):
            return None
        stored = TensorLeaf(leaf.extent.take(full), leaf.extent, None)
        return extent.take(full) if digest_of(stored) == digest_of(leaf) else None

    def _saved_leaf(self, name: str) -> Leaf:
        leaf = self._saved.get(name)
        return leaf.leaf if isinstance(leaf, Idle) else leaf
