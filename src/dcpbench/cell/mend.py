"""Give a run the saved values of what known defects of torch made wrong in a load. A resume then differs from
the uninterrupted run only because of something else."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
    has_extra_state,
    local_part,
    named_parts,
    parts_of_each,
    plain_fqn,
)
from dcpbench.workloads.optimizers import each_of
from dcpbench.workloads.run_state import CHANGING, FLAGS, RANDOM, live_state
from dcpbench.workloads.training_run import TrainingRun

Put = Callable[[Any], object]
"""Puts changed values back to where they came from."""


def explained_names(cell: Cell, check: str, checkpoint: Checkpoint | None = None) -> dict[str, str]:
    """Return the names that known defects alone made wrong on this rank, each with the defect, in a load of a
    checkpoint or in any load."""
    report = cell.report.checks.get(check)
    every = [*report.distinct.values()] if report else []
    mismatches = [one for one in every if checkpoint is None or one.where == str(checkpoint)]
    unexplained = {one.name for one in mismatches if not one.by}
    return {one.name: one.by for one in mismatches if one.by and one.name not in unexplained}


def mend(cell: Cell, target: TrainingRun, checkpoint: Checkpoint) -> str | None:
    """Give a run that has loaded a checkpoint the saved values of exactly what known defects made wrong.
    Return why that is not possible, if it is not; collective."""
    checks = [check for check in checkpoint.state if check not in (FLAGS, CHANGING)]
    wrong = {check: explained_names(cell, check, checkpoint) for check in checks}
    if not any(cell.world.gathered(any(wrong.values()))):
        return None
    with torch.no_grad():
        for check, names in wrong.items():
            if names:
                saved = {name: _of(leaf) for name, leaf in checkpoint.state[check].items()}
                _Mending(target, checkpoint, check, names, saved).mend()
    live, left = live_state(target), []
    for check in (check for check in checks if check in live):
        mismatches = checkpoint.compare(check, live[check], cell.world.group, closely=False)
        left += [(one.name, wrong[check][one.name]) for one in mismatches if one.name in wrong[check]]
    first = next((of_rank[0] for of_rank in cell.world.gathered(left) if of_rank), None)
    return first and f"{first[0]} was not restored ({first[1]}), and its saved value cannot be set"


def _of(leaf: Leaf) -> Leaf:
    return leaf.leaf if isinstance(leaf, Idle) else leaf


@dataclass(frozen=True)
class _Mending:
    """Sets wrong names of a check to their saved values in a run, as far as these are known. A name that was
    not saved is removed."""

    target: TrainingRun
    checkpoint: Checkpoint
    check: str
    names: Mapping[str, str]
    saved: Leaves

    def mend(self) -> None:
        """Copy tensors in place; replace other values, and what is missing, in their containers."""
        for name, leaf in live_state(self.target).get(self.check, {}).items():
            if name in self.names and isinstance(part := _of(leaf), TensorLeaf):
                value = self._value(name, part.extent)
                if value is not None and value.dtype == part.dtype:
                    part.local.copy_(value.reshape(part.local.shape))
        for prefix, values, put, of in self._containers():
            names = {name for name in self.names if f"{name}.".startswith(prefix)}
            if names:
                mended = self._mended(values, prefix, of)
                for name in names & self.saved.keys() - {path for *_, path in slots(values, prefix)}:
                    mended[name.removeprefix(prefix)] = self._as_saved(name, None, of)
                put(mended)

    def _containers(self) -> Iterator[tuple[str, Any, Put, ParameterPart | None]]:
        """Yield the prefix of names, nested values, a function that puts them back, and the parameter that
        tensors are made like, if there is one."""
        model, optimizer = self.target.model, self.target.optimizer
        if self.check == "optim_equal":
            parts = parts_of_each(named_parts(model))
            for one in each_of(optimizer):
                for parameter in (value for group in one.param_groups for value in group["params"]):
                    for fqn, part in parts.get(id(parameter), {}).items():
                        put = partial(one.state.__setitem__, parameter)
                        yield f"state.{fqn}.", one.state.get(parameter, {}), put, part
            for number, group in enumerate(optimizer.param_groups):
                values = {key: value for key, value in group.items() if key != "params"}
                yield f"param_groups.{number}.", values, group.update, None
        for name, state, load in self._objects():
            yield f"{name}.", state, load, None

    def _objects(self) -> Iterator[tuple[str, Any, Put]]:
        """Yield the objects of the check: name, state, and a function that loads another state."""
        target = self.target
        if self.check == "model_equal":
            for prefix, module in target.model.named_modules():
                if has_extra_state(module):
                    name = plain_fqn(target.model, f"{prefix}._extra_state".lstrip("."))
                    yield name, module.get_extra_state(), module.set_extra_state
        elif self.check == RANDOM:
            yield "random", target.random.state_dict(), target.random.load_state_dict
        elif self.check == "extra_equal":
            objects = {**target.component.saved.others, **target.saved.others, "noise": target.noise}
            if target.has_scheduler:
                objects["scheduler"] = target.scheduler
            for name, each in objects.items():
                yield name, each.state_dict(), each.load_state_dict
            yield "train_state", vars(target.train_state), vars(target.train_state).update

    def _mended(self, values: Any, prefix: str, of: ParameterPart | None) -> Any:
        """Return a copy of nested values with the saved ones under the wrong names."""
        if not is_gone_into(values):  # the extra state of a module
            return self._as_saved(prefix[:-1], values, of)
        mended = copy.copy(values)
        for key, value, path in reversed([*items(values, prefix)]):  # of a list the last items go first
            if is_gone_into(value):
                mended[key] = self._mended(value, f"{path}.", of)
                is_removed = bool(value) and not mended[key]
            else:
                is_removed = path in self.names and path not in self.saved
                if path in self.names and not is_removed:
                    mended[key] = self._as_saved(path, value, of)
            if is_removed:
                del mended[key]
        return mended

    def _as_saved(self, name: str, current: Any, of: ParameterPart | None) -> Any:
        """Return a saved value, in the `current` tensor if that is possible."""
        leaf = self.saved[name]
        if not isinstance(leaf, TensorLeaf | DigestedLeaf):
            return copy.deepcopy(leaf)
        extent = leaf.extent
        if of and extent.shape and extent.shape == of.extent.shape:
            extent = of.extent
            if getattr(current, "dtype", None) != leaf.dtype:
                current = torch.zeros_like(of.parameter, dtype=leaf.dtype)
        value = self._value(name, extent)
        if value is None:
            return current
        if getattr(current, "dtype", None) != leaf.dtype:
            return value.clone()
        local = local_part(current)
        local = of.of(local) if of and extent is of.extent else local
        local.copy_(value.reshape(local.shape))
        return current

    def _value(self, name: str, extent: Extent) -> torch.Tensor | None:
        """Return the part of a saved tensor that has this extent; if only its digest was kept, that of the
        checkpoint, which `mend` compares with it."""
        leaf = self.saved.get(name)
        if isinstance(leaf, TensorLeaf) and leaf.extent == extent:
            return leaf.local
        if not isinstance(leaf, TensorLeaf | DigestedLeaf):
            return None
        full = self.checkpoint.recall_of(self.check)(name)
        return extent.take(full) if full is not None and tuple(full.shape) == leaf.extent.shape else None
