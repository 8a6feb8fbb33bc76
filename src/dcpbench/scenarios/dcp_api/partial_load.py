"""Load parts of a checkpoint: the model alone into a model, then the rest, and single keys into plain
dictionaries."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from dcpbench.cell import checks, contract, side_effects, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import record_restored
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.compare.across_layouts import compare_across
from dcpbench.compare.controls import compare_controlled, names_of_control, perturbed_leaves, perturbed_where
from dcpbench.compare.leaves import Comparison, same_leaves
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name, StatePart, text_of
from dcpbench.state.snapshot import Leaves, snapshot_nested, without_prefix
from dcpbench.torch_private import LOAD_KEYS


def partial_load(cell: Cell) -> None:
    """Requested keys are loaded and equal; others are neither loaded nor changed. Training continues from
    both parts."""
    reference = uninterrupted.train_and_save_reference(cell)
    checkpoint = reference.checkpoints[-1]

    model, optimizer = StatePart.model, StatePart.optimizer
    _verify_below(cell, ("model",), model, checkpoint.state[model], checkpoint)
    moments = without_prefix(checkpoint.state[optimizer], ("state",))
    _verify_below(cell, ("optimizer", "state"), optimizer, moments, checkpoint)

    model_only = replace(checkpoint, state={model: checkpoint.state[model]})
    target = steps.build_target(cell, reference)
    controls = checks.perturb_target(cell, target, checkpoint)
    before = target.retained_state()
    rest = target.state()
    steps.load(cell, target, checkpoint, state={"model": rest.pop("model")})
    checks.verify_restored(cell, target, model_only, controls)
    default = {("random", target.random.key, name) for name in target.random.states}
    with cell.phase("verify", "equality"):
        others = (optimizer, StatePart.scheduler, StatePart.extra)
        # All but the model, with its generators, is as before the load, and not as saved.
        now, then, saved = (
            {name: leaf for part in others for name, leaf in state.get(part, {}).items()}
            | {name: leaf for name, leaf in state.get(StatePart.random, {}).items() if name in default}
            for state in (target.live_state(), before, checkpoint.state)
        )
        compared = compare_controlled(then, now, perturbed_where(then, saved, same_leaves(saved, then)))
        cell.record(
            "contract_held",
            compared,
            checkpoint.at("not loaded in the checkpoint of step {step}"),
            side_effects.LOAD,
        )
    steps.load(cell, target, checkpoint, state=rest)
    checks.verify_restored(cell, target, checkpoint, controls)
    checks.resume(cell, target, checkpoint, reference)


def _verify_below(cell: Cell, prefix: Name, part: StatePart, expected: Leaves, saved: Checkpoint) -> None:
    """Check that a load of a key brings full tensors of everything below it to the CPU of every rank, and
    nothing else."""
    checkpointer = cell.checkpointer
    assert isinstance(checkpointer, DcpCheckpointer)
    key = text_of(prefix)
    where = saved.at(f"read by the key {key} in the checkpoint of step {{step}}")
    with cell.phase("load"):
        nested = LOAD_KEYS.value(
            key,
            storage_reader=checkpointer.reader(saved.checkpoint_id),
            process_group=cell.world.checkpoint_group,
        )
    loaded = snapshot_nested(nested)
    actual = without_prefix(loaded, prefix)
    changed = perturbed_leaves(actual)

    def read_saved(name: Name) -> torch.Tensor | None:
        return checkpointer.read_tensor(saved.checkpoint_id, text_of((*prefix, *name)))

    with cell.phase("verify", "equality"):
        mismatches = compare_across(expected, actual, cell.world.group, read_saved)
        control = compare_across(expected, changed, cell.world.group)
        compared = Compared.of(mismatches, control, names_of_control(expected))
        record_restored(cell, saved, {part: Comparison(expected, actual, compared)}, where)

    def unrequested(names: Iterable[Name]) -> list[Mismatch]:
        others = [text_of(name) for name in names if name[: len(prefix)] != prefix]
        return [contract.violation(key, f"{others[0]} came with it")] if others else []

    broken = unrequested([*loaded, ("optimizer", "param_groups")])
    cell.record("contract_held", Compared.of(unrequested(loaded), broken, [key]), where)
