"""Faults that leave all restored values correct: wrong training after the load, wrong flags, and side effects
of a save or a load."""

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dcpbench.config.groups import Expect, InjectedAt, Only
from dcpbench.plugins.faults.registry import fault, on_one_rank
from dcpbench.plugins.faults.values import A_BIAS, A_WEIGHT, WITH_MOMENTS
from dcpbench.torch_private import HOOKS_AFTER_STEPS

if TYPE_CHECKING:
    from dcpbench.plugins.faults.targets import Target


def _flag(name: str) -> Expect:
    return Expect("flags_equal", name, 0, "value")


@on_one_rank(Expect("state_resume_equal", A_WEIGHT, -2), after=2, by=0.001)
@on_one_rank(
    Expect("state_resume_equal", A_WEIGHT, -2),
    name="resumed_twice_wrong",
    only={"scenario": Only(["chain"], "no other scenario continues from a checkpoint of a resumed run")},
    after=2,
    by=0.001,
    from_first=False,
)
def second_step_wrong(target: "Target", after: int, by: float, from_first: bool = True) -> None:
    """Add a little to one weight in the optimizer's second step after a load; with `from_first=False`, not
    after a load of the cell's first checkpoint."""
    if target.folder == target.first and not from_first:
        return
    optimizer = target.state["optimizer"].optimizer
    original, taken = optimizer.step, 0

    def step(*arguments: Any, **options: Any) -> Any:
        nonlocal taken
        taken += 1
        returned = original(*arguments, **options)
        if taken == after:
            target.largest("model.*.weight")[:1].add_(by)
        return returned

    optimizer.step = step


@fault(Expect("state_resume_equal", rank=0))
def scheduler_stuck(target: "Target") -> None:
    """Stop the scheduler. Its attributes are its state, so its class is replaced instead."""
    scheduler = target.state["scheduler"]
    scheduler.__class__ = type("Stuck", (type(scheduler),), {"step": lambda self: None})


@fault(_flag("shared_memory"), only=WITH_MOMENTS)
def steps_shared(target: "Target") -> None:
    """Make all step counters the same tensor."""
    first, *others = target.state["optimizer"].optimizer.state.values()
    target.one_of(others)  # a single flat parameter has one counter anyway
    for entries in others:
        entries["step"] = first["step"]


@on_one_rank(
    Expect("side_effect_free", rf"gradients\.{A_WEIGHT}", -2),
    only={"load_into": Only(["gradients"], "it needs gradients at the load")},
)
def gradients_touched(target: "Target") -> None:
    """Double the gradients of weights in a load."""
    for name, parameter in target.state["model"].model.named_parameters():
        if name.endswith(".weight") and parameter.grad is not None:
            parameter.grad.mul_(2)


@fault(_flag(rf"requires_grad\.{A_BIAS}"))
def requires_grad_lost(target: "Target") -> None:
    """Freeze a bias."""
    named = target.state["model"].model.named_parameters()
    target.one_of(
        parameter for name, parameter in reversed([*named]) if name.endswith(".bias")
    ).requires_grad_(False)


@fault(_flag(r"training\.model"))
def training_mode_lost(target: "Target") -> None:
    """Switch the model to evaluation mode."""
    target.state["model"].model.eval()


@on_one_rank(Expect("flags_equal", r"hooks\.optimizer", -2, "value"))
def hook_lost(target: "Target") -> None:
    """Remove a hook from the optimizer."""
    hooks = HOOKS_AFTER_STEPS.of(target.state["optimizer"].optimizer)
    if "hook" not in target.kept:  # a later load finds it removed
        target.kept["hook"] = target.one_of(hooks)
    hooks.clear()


@on_one_rank(Expect("side_effect_free", A_WEIGHT, -2))
def load_changes_other_run(target: "Target") -> None:
    """Change the saved run in a load."""
    replace(target, state=target.kept["saved"]).largest("model.*.weight")[:1].add_(0.01)


@fault(Expect("side_effect_free", r"process\.open_files", 0))
def load_leaves_file_open(target: "Target") -> None:
    """Leave a file of the checkpoint open after a load."""
    path = next(path for path in target.folder.iterdir() if path.is_file())
    target.kept.setdefault("open", []).append(path.open("rb"))


@fault(Expect("side_effect_free", r"process\.threads", 0), at=InjectedAt.live)
def save_leaves_thread(target: "Target") -> None:
    """Start a thread in each save that never ends."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@fault(Expect("contract_held", "refusal"), only={"checkpointer": Only(["dcp"], "its planner is DCP's")})
def missing_keys_ignored(target: "Target") -> None:
    """Make every load after the first skip keys that the checkpoint lacks, without an error."""
    import torch.distributed.checkpoint as dcp

    def load(state: dict[str, Any], checkpoint_id: str) -> None:
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        group = target.ranks.group_of(0)
        dcp.load(state, checkpoint_id=checkpoint_id, process_group=group, planner=planner)

    vars(target.checkpointer)["load"] = load
