"""A resumed run after a load with known defects, which a second load of the checkpoint repeats."""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Resumed
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.plugins.defects._loads import explained, load_again, resumes_exactly
from dcpbench.plugins.defects._other_run import as_resumed
from dcpbench.verify.compare import ABSENT
from dcpbench.verify.nested import is_gone_into, slots
from dcpbench.verify.snapshot import Leaves, TensorLeaf, has_extra_state, plain_fqn
from dcpbench.workloads.run_state import State, live_state
from dcpbench.workloads.training_run import TrainingRun

_CHECKS = ("model_equal", "optim_equal", "extra_equal")


def resumed(cell: Cell, reference: Resumed, by: str) -> Iterator[State]:
    """Train on from a second load, if the first was wrong by this defect on any rank. A run must be exact
    once all that known defects made wrong has its saved value, so that nothing else is wrong; collective."""
    wrong = _wrong(cell, reference)
    if not any(cell.world.gathered(any(one.by == by for _, one in wrong))):
        return
    exact = load_again(cell, reference)
    repaired = [_repair(exact, check, one, reference.checkpoint.state[check]) for check, one in wrong]
    _change_objects(exact, wrong, lambda key, state: with_loaded(state, state))
    if not all(cell.world.gathered(all(repaired))) or not resumes_exactly(cell, exact, reference):
        return
    as_loaded, kept = load_again(cell, reference), _kept(wrong)
    _change_objects(as_loaded, wrong, lambda key, state: _with_kept(key, state, kept))
    for name, value in kept.items():
        _set_hyperparameter(as_loaded, name, value)
    as_loaded.train(reference.data, reference.until)
    state = live_state(as_loaded)
    for check, one in wrong:
        if one.problem is Problem.missing:
            state[check].setdefault(one.name, ABSENT)
    yield as_resumed(cell, reference, state)


def _wrong(cell: Cell, reference: Resumed) -> list[tuple[str, Mismatch]]:
    """Return what the load made wrong by known defects, with its checks."""
    return [(check, one) for check in _CHECKS for one in explained(cell, check, reference.checkpoint)]


def _repair(run: TrainingRun, check: str, one: Mismatch, saved: Leaves) -> bool:
    """Set a tensor or hyperparameter to its saved value; return False if that is not possible."""
    if one.by == "integer_keys":  # of an object, which `with_loaded` repairs
        return True
    leaf, live = saved.get(one.name), live_state(run)[check].get(one.name)
    if isinstance(leaf, TensorLeaf) and isinstance(live, TensorLeaf):
        with torch.no_grad():
            live.local.copy_(leaf.local)
        return True
    return _set_hyperparameter(run, one.name, leaf)


def _set_hyperparameter(run: TrainingRun, name: str, value: Any) -> bool:
    """Set a hyperparameter of a group; return False for another name."""
    if not name.startswith("param_groups."):
        return False
    _, number, key = name.split(".", 2)
    run.optimizer.param_groups[int(number)][key] = copy.deepcopy(value)
    return True


def _change_objects(
    run: TrainingRun, wrong: list[tuple[str, Mismatch]], change: Callable[[str, Any], Any]
) -> None:
    """Load the changed state of each object that has integer keys. `change` gets its name, too."""
    objects = {"scheduler": run.scheduler} if run.has_scheduler else {}
    loads: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        name: (one.state_dict(), one.load_state_dict) for name, one in {**objects, **run.saved.others}.items()
    }
    for prefix, module in run.model.named_modules():
        if has_extra_state(module):
            name = plain_fqn(run.model, f"{prefix}._extra_state".lstrip("."))
            loads[name] = module.get_extra_state(), module.set_extra_state
    names = [one.name for _, one in wrong if one.by == "integer_keys"]
    for name, (state, load) in loads.items():
        if any(each.startswith(f"{name}.") for each in names):
            load(change(name, state))


def with_loaded(old: Any, loaded: Any) -> Any:
    """Return a state dict with the values that `loaded` has under the same keys or, if it has those, under
    their texts."""
    if isinstance(old, list) and is_gone_into(old):
        return [*map(with_loaded, old, loaded)]
    if not isinstance(old, Mapping):
        return loaded
    texts = {str(key) for key in old if not isinstance(key, str)}
    made: Any = copy.copy(old)
    for key, value in old.items():
        if key in texts:
            del made[key]
        else:
            made[key] = with_loaded(value, loaded[str(key) if str(key) in loaded else key])
    return made


def _kept(wrong: list[tuple[str, Mismatch]]) -> dict[str, Any]:
    """Return by name the values that the load has left, as they are reported."""
    kept: dict[str, Any] = {}
    for _, one in wrong:
        with suppress(ValueError, SyntaxError, KeyError):
            if one.by in ("integer_keys", "empty_group") and one.problem is Problem.value:
                kept[one.name] = ast.literal_eval(one.facts["actual"])
    return kept


def _with_kept(name: str, state: Any, kept: Mapping[str, Any]) -> Any:
    for holder, key, path in slots({name: state}):
        if path in kept:
            holder[key] = kept[path]
    return state
