"""Defects that no value shows when it is restored: of how training goes on from there, of flags, and of what
a save or a load does beside."""

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dcpbench.config.groups import Expect, Only, Place
from dcpbench.plugins.faults.registry import fault, on_one_rank
from dcpbench.plugins.faults.values import A_BIAS, A_WEIGHT, SCHEDULED, WITH_MOMENTS

if TYPE_CHECKING:
    from dcpbench.plugins.faults.targets import Target


def _flag(name: str) -> Expect:
    return Expect("flags_equal", name, 0, "value")


@on_one_rank(Expect("state_resume_equal", A_WEIGHT, -2), after=2, by=0.001)
@on_one_rank(
    Expect("state_resume_equal", A_WEIGHT, -2),
    name="resumed_twice_wrong",
    only={"scenario": Only(["chain"], "no other one goes on from what a resumed run has saved")},
    after=2,
    by=0.001,
    from_first=False,
)
def second_step_wrong(target: "Target", after: int, by: float, from_first: bool = True) -> None:
    """The optimizer's second step after the load goes a little further with one weight; or only where it is
    not the first checkpoint of the cell that was loaded."""
    if target.folder == target.first and not from_first:
        return
    optimizer = target.state["optimizer"].optimizer
    honest, taken = optimizer.step, 0

    def step(*arguments: Any, **options: Any) -> Any:
        nonlocal taken
        taken += 1
        returned = honest(*arguments, **options)
        if taken == after:
            target.largest("model.*.weight")[:1].add_(by)
        return returned

    optimizer.step = step


@fault(Expect("state_resume_equal", rank=0), only=SCHEDULED)
def scheduler_stuck(target: "Target") -> None:
    """The scheduler no longer moves. Its attributes are its state, so that it gets another class."""
    scheduler = target.state["scheduler"]
    scheduler.__class__ = type("Stuck", (type(scheduler),), {"step": lambda self: None})


@fault(_flag("shared_memory"), only=WITH_MOMENTS)
def steps_shared(target: "Target") -> None:
    """All step counters are one tensor, which counts them all."""
    first, *others = target.state["optimizer"].optimizer.state.values()
    target.one_of(others)  # a single flat parameter has one counter anyway
    for entries in others:
        entries["step"] = first["step"]


@fault(_flag("gradients"))
def gradients_left(target: "Target") -> None:
    """Parameters have gradients, if only zeros."""
    for parameter in target.state["model"].model.parameters():
        parameter.grad = parameter.detach().clone().zero_()


@on_one_rank(
    Expect("side_effect_free", rf"gradients\.{A_WEIGHT}", -2),
    only={"load_into": Only(["gradients"], "it needs gradients at the load")},
)
def gradients_touched(target: "Target") -> None:
    """A load doubles the gradients of weights."""
    for name, parameter in target.state["model"].model.named_parameters():
        if name.endswith(".weight") and parameter.grad is not None:
            parameter.grad.mul_(2)


@fault(_flag(rf"requires_grad\.{A_BIAS}"))
def requires_grad_lost(target: "Target") -> None:
    """A bias is frozen."""
    named = target.state["model"].model.named_parameters()
    target.one_of(value for name, value in reversed([*named]) if name.endswith(".bias")).requires_grad_(False)


@fault(_flag(r"training\.model"))
def training_mode_lost(target: "Target") -> None:
    """The model is in evaluation mode."""
    target.state["model"].model.eval()


@fault(_flag(r"defaults\.lr"))
def defaults_changed(target: "Target") -> None:
    """What a group that is added later would get is another learning rate."""
    target.state["optimizer"].optimizer.defaults["lr"] = 0.5


@on_one_rank(Expect("flags_equal", r"hooks\.optimizer", -2, "value"))
def hook_lost(target: "Target") -> None:
    """A hook on the optimizer is gone."""
    hooks = target.state["optimizer"].optimizer._optimizer_step_post_hooks
    if "hook" not in target.kept:  # a later load finds it gone already
        target.kept["hook"] = target.one_of(hooks)
    hooks.clear()


@fault(Expect("side_effect_free", r"generator\.cpu", 0), at=Place.live)
def save_draws_default(target: "Target") -> None:
    """A save draws from the default random generator."""
    target.state["noise"].generator.get_state().float().uniform_()


@on_one_rank(Expect("side_effect_free", A_WEIGHT, -2))
def load_changes_other_run(target: "Target") -> None:
    """A load changes the run that was saved."""
    replace(target, state=target.kept["saved"]).largest("model.*.weight")[:1].add_(0.01)


@fault(Expect("side_effect_free", r"process\.open_files", 0))
def load_leaves_file_open(target: "Target") -> None:
    """A load never closes a file of the checkpoint."""
    path = next(path for path in target.folder.iterdir() if path.is_file())
    target.kept.setdefault("open", []).append(path.open("rb"))


@fault(Expect("side_effect_free", r"process\.threads", 0), at=Place.live)
def save_leaves_thread(target: "Target") -> None:
    """Each save leaves a thread that waits for ever."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@fault(Expect("contract_held", "refusal"), only={"checkpointer": Only(["dcp"], "its planner is DCP's")})
def missing_keys_ignored(target: "Target") -> None:
    """From the first load on, a load leaves out what the checkpoint lacks, and says nothing."""
    import torch.distributed.checkpoint as dcp

    def load(state: dict[str, Any], checkpoint_id: str) -> None:
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        group = target.ranks.group_of(0)
        dcp.load(state, checkpoint_id=checkpoint_id, process_group=group, planner=planner)

    vars(target.checkpointer)["load"] = load
