"""Pre-train and save; fine-tune a model that contains the pre-trained one frozen, and save its trained
part; restart from both checkpoints."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from dcpbench.cell import checks, contract, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import record_restored
from dcpbench.compare.controls import compare_controlled, perturbed_where
from dcpbench.compare.leaves import Comparison
from dcpbench.core.mismatch import Mismatch, Place
from dcpbench.core.rank_report import Compared, Skip
from dcpbench.core.state import StatePart
from dcpbench.runs.run import Run
from dcpbench.state.snapshot import Leaves, named_parameters, retained, snapshot_model
from dcpbench.torch_private import ORIGINAL_MODULE

FROZEN = "pretrain."
"""The FQN prefix of the pre-trained model in the fine-tuned one."""


def fine_tune(cell: Cell, layers: int, submodules: bool) -> None:
    """The frozen part stays the pre-trained model bit for bit, the trained part resumes exactly, and the
    checkpoints of the fine-tuning contain nothing frozen.

    Args:
        layers: the number of linear layers that are trained on top of the pre-trained model.
        submodules: load the pre-trained part by `submodules=`, which torch has deprecated.

    Raises:
        Skip: this torch has no `submodules=`, or the model does not come from the group `model`.
    """
    if submodules and "submodules" not in inspect.signature(get_model_state_dict).parameters:
        raise Skip("this torch no longer has submodules=")
    if cell.config.workload.target:
        raise Skip("it puts a model of the group model into another one: workload.target has its own")
    before = cell.vary(folder="pre_training", saves=1, save_at=None, overlap_saves=False)
    (saved,) = uninterrupted.train_and_save_reference(before).checkpoints
    tuning = _tuning(cell, layers)

    def load_pretrained(run: Run) -> None:
        before.checkpointer.load(_part(tuning, run, submodules), saved.checkpoint_id)

    tuning, unsaved = uninterrupted.train_unsaved(tuning, prepare=load_pretrained)
    reference = steps.build_reference(tuning, unsaved)
    verify_frozen = partial(_verify_frozen, tuning, replace(saved, by_content=True))
    unrestored = retained(_frozen(reference.live_run))
    steps.load(before, reference.live_run, saved, state=_part(tuning, reference.live_run, submodules))
    verify_frozen(reference.live_run, Place("before the fine-tuning"), unrestored)
    checks.verify_absent_key(before, saved)
    checkpoints = steps.train_and_save(tuning, reference)
    verify_frozen(reference.live_run, Place("tuned"))
    uninterrupted.compare_final_states(tuning, unsaved, reference)

    target = steps.build_target(tuning, reference)
    for number, checkpoint in enumerate(reversed(checkpoints)):
        controls = checks.perturb_target(tuning, target, checkpoint, number)
        steps.load(before, target, saved, state=_part(tuning, target, submodules))
        steps.load(tuning, target, checkpoint)
        checks.verify_restored(tuning, target, checkpoint, controls)
        checks.resume(tuning, target, checkpoint, reference)
        verify_frozen(target, checkpoint.at("restarted"))
        keys = set(tuning.checkpointer.manifest(checkpoint.checkpoint_id).entries)
        _verify_keys(tuning, target, keys, checkpoint.place)


def _tuning(cell: Cell, layers: int) -> Cell:
    """Return the cell with its model frozen inside another one, not saved, and sharded as before."""
    model, parallel = cell.config.model, cell.config.parallel
    inner = {"target": model.target, "options": model.options}
    tuned = "dcpbench.workloads.models.FineTuned"
    return cell.vary(
        folder="fine_tuning",
        model=replace(model, target=tuned, options={"pretrain": inner, "layers": layers}),
        parallel=replace(
            parallel, tp_plan={f"{FROZEN}{name}": style for name, style in parallel.tp_plan.items()}
        ),
        state_dict=replace(cell.config.state_dict, ignore_frozen_params=True),
    )


def _frozen(run: Run) -> Leaves:
    """Return the frozen part under the FQNs of the pre-trained model."""
    leaves = ((str(name[0]), leaf) for name, leaf in snapshot_model(run.model).items())
    return {(fqn.removeprefix(FROZEN),): leaf for fqn, leaf in leaves if fqn.startswith(FROZEN)}


def _verify_frozen(
    cell: Cell, pretrained: Checkpoint, run: Run, where: Place, control: Leaves | None = None
) -> None:
    """Compare the frozen part with the pre-trained model, by content. The control is `other`, by default a
    changed copy."""
    part = StatePart.model
    with cell.phase("verify", "equality"):
        expected, actual = pretrained.state[part], _frozen(run)
        read_saved = pretrained.reader_of(part, cell.checkpointer)
        how = partial(pretrained.compare, group=cell.world.group, read_saved=read_saved)
        control = control or perturbed_where(expected, actual, actual)
        compared = compare_controlled(expected, actual, control, how=how)
        record_restored(cell, pretrained, {part: Comparison(expected, actual, compared)}, where)


class _PartState:
    """A part of a model, saved under the names of a separate model: the filtered state dict of the full
    model, as torch advises since `submodules=` is deprecated."""

    def __init__(self, model: nn.Module, prefix: str, options: StateDictOptions) -> None:
        self.model = model
        self.prefix = prefix
        self.options = replace(options, ignore_frozen_params=False, strict=False)

    def state_dict(self) -> dict[str, Any]:
        everything = get_model_state_dict(self.model, options=self.options)
        part = {name: value for name, value in everything.items() if name.startswith(self.prefix)}
        return {name.removeprefix(self.prefix): value for name, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        named = {f"{self.prefix}{name}": value for name, value in state_dict.items()}
        set_model_state_dict(self.model, named, options=self.options)


class _SubmoduleState:
    """A part of a model saved by `submodules=`, which torch has deprecated and older trainers still use."""

    def __init__(self, model: nn.Module, name: str, options: StateDictOptions) -> None:
        self.model = model
        self.options = replace(
            options, ignore_frozen_params=False, strict=False, keep_submodule_prefixes=False
        )
        inner = getattr(model, ORIGINAL_MODULE.name, model)
        self.submodule = getattr(inner, "module", inner).get_submodule(name)

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model, submodules={self.submodule}, options=self.options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Keyed by the module: torch adds the prefix.
        keyed: Any = {self.submodule: state_dict}
        set_model_state_dict(self.model, keyed, options=self.options)


def _part(cell: Cell, run: Run, submodules: bool) -> dict[str, _PartState | _SubmoduleState]:
    options = StateDictOptions(**cell.config.state_dict.options())
    if submodules:
        return {"model": _SubmoduleState(run.model, "pretrain", options)}
    return {"model": _PartState(run.model, FROZEN, options)}


def _verify_keys(cell: Cell, run: Run, keys: set[str], where: Place) -> None:
    """Check that a checkpoint of the fine-tuning has each trained parameter and no frozen one."""
    names = sorted(named_parameters(run.model))
    frozen = [name for name in names if name.startswith(FROZEN)]
    trained = [name for name in names if name not in frozen]

    def wrong(found: set[str]) -> Iterator[Mismatch]:
        # A flattened optimizer has hyperparameters for every parameter in its groups.
        held = [key for key in found if not key.startswith("optimizer.param_groups.")]
        for name in frozen:
            if any(f".{name}" in key for key in held):
                yield contract.violation(name, "frozen, but in the checkpoint")
        for name in trained:
            if f"model.{name}" not in found:
                yield contract.violation(name, "trained, but not in the checkpoint")

    broken = wrong({f"model.{name}" for name in frozen})
    cell.record("contract_held", Compared.of(wrong(keys), broken, names), where)
