"""Load a part of a checkpoint: the model alone into a model, and single keys into plain dictionaries."""

from collections.abc import Iterable
from dataclasses import replace

# Private to torch, and its only way to read all that is below a key without a template for it.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.records.findings import Finding
from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, State, live_state, retained_state
from dcpbench.verify.compare import compare
from dcpbench.verify.perturb import controllable
from dcpbench.verify.snapshot import Leaves, snapshot_nested
from dcpbench.workloads.training_run import TrainingRun

MODEL, OPTIMIZER_STATE = "model", "optimizer.state"


def partial_load(cell: Cell) -> None:
    """What was asked for is there and equal; what was not is untouched and absent."""
    oracle = steps.build(cell)
    checkpoint = steps.train_and_save(cell, oracle)[-1]
    checks.verify_twin(cell, oracle)

    asked_for = replace(checkpoint, state={"model_equal": checkpoint.state["model_equal"]})
    target = checks.unrestored_target(cell, asked_for)
    before = retained_state(target)
    steps.load(cell, target, checkpoint, state={MODEL: target.state()[MODEL]})
    checks.verify_restored(cell, target, asked_for)
    _verify_untouched(cell, target, before, checkpoint)

    _verify_below(cell, MODEL, "model_equal", checkpoint.state["model_equal"], checkpoint)
    moments = {
        name.removeprefix("state."): leaf
        for name, leaf in checkpoint.state["optim_equal"].items()
        if name.startswith("state.")
    }
    _verify_below(cell, OPTIMIZER_STATE, "optim_equal", moments, checkpoint)


def _verify_untouched(cell: Cell, target: TrainingRun, before: State, saved: Checkpoint) -> None:
    """All of a target but its model must be what it was before the load, and not what was saved."""
    with cell.phase("verify", "equality"):
        now, then, loaded = (
            {**state["optim_equal"], **state["extra_equal"]}
            for state in (live_state(target), before, saved.state)
        )
        where = f"not loaded {saved}"
        checks.verify_contract(cell, compare(then, now), compare(then, loaded), controllable(then), where)


def _verify_below(cell: Cell, key: str, check: str, expected: Leaves, saved: Checkpoint) -> None:
    """All that is below a key comes whole, on the CPU of every rank, and nothing beside it."""
    checkpointer = saved.checkpointer
    assert isinstance(checkpointer, DcpCheckpointer)
    where = f"read by the key {key} {saved}"
    with cell.phase("load"):
        nested = _load_state_dict_from_keys(
            key,
            storage_reader=checkpointer.reader(saved.checkpoint_id),
            process_group=cell.world.checkpoint_group,
        )
    loaded = snapshot_nested(nested)
    below = {name.removeprefix(f"{key}."): leaf for name, leaf in loaded.items() if name.startswith(key)}
    checks.verify_content(cell, check, expected, below, where)

    def beside(names: Iterable[str]) -> list[Finding]:
        strangers = [name for name in names if not name.startswith(f"{key}.")]
        return [checks.breach(key, f"{strangers[0]} came with it")] if strangers else []

    checks.verify_contract(cell, beside(loaded), beside([*loaded, "optimizer.param_groups"]), [key], where)
