"""Defects of what is handed to the writer: the state as it is staged, not the live one."""

from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Only, Place
from dcpbench.faults.optimizer import WITH_MOMENTS
from dcpbench.faults.registry import fault

if TYPE_CHECKING:
    from dcpbench.faults.targets import StagedState

_KEY = r"model\.net3\.bias"
_LOST = (
    Expect("checkpoint_whole", _KEY, 0),
    Expect("model_equal", r"net3\.bias"),
    Expect(phases=["load"], error="RuntimeError", message=_KEY),
)


@fault(Expect("model_equal", r"net\d\..*"), at=Place.staged)
def stale_stage(staged: "StagedState") -> None:
    """The buffers of the first save are written again: a stager that copies nothing any more."""
    staged.state.update(staged.first)


@fault(Expect("model_equal", r"net2\.weight"), at=Place.staged)
def weight_changed_while_staged(staged: "StagedState") -> None:
    """One weight is another one by the time it is copied, on every rank that has a part of it."""
    part = staged.part("net2.weight")
    if part.numel():
        part.view(-1)[0] += 0.001


@fault(
    Expect("checkpoint_whole", r"model\.net2\.weight", 0),
    Expect("model_equal", r"net2\.weight"),
    at=Place.staged,
)
def weight_staged_as_bf16(staged: "StagedState") -> None:
    """One weight is staged in a narrower dtype, and comes back as if nothing had happened."""
    staged.narrow("net2.weight", "bfloat16")


@fault(Expect("optim_equal", r"state\.net2\.weight\.exp_avg"), at=Place.staged, only=WITH_MOMENTS)
def moment_staged_as_zeros(staged: "StagedState") -> None:
    """A moment is staged as zeros."""
    staged.moment("net2.weight", "exp_avg").zero_()


@fault(*_LOST, at=Place.staged)
def key_dropped(staged: "StagedState") -> None:
    """A parameter is not saved at all."""
    del staged.state["model"]["net3.bias"]


@fault(*_LOST, at=Place.staged)
def key_renamed(staged: "StagedState") -> None:
    """A parameter is saved under another name."""
    model = staged.state["model"]
    model["net3.offset"] = model.pop("net3.bias")


@fault(Expect("checkpoint_whole", r"model\.net9\.weight", 0), at=Place.staged)
def key_added(staged: "StagedState") -> None:
    """The checkpoint has a tensor that nobody asked for."""
    staged.add("net9.weight")


@fault(
    Expect("model_equal", r"net[23]\.weight"),
    at=Place.staged,
    only={"model": Only(["buffered"], "it needs two tensors of one shape")},
)
def keys_exchanged(staged: "StagedState") -> None:
    """Two parameters are saved under each other's names."""
    model = staged.state["model"]
    model["net2.weight"], model["net3.weight"] = model["net3.weight"], model["net2.weight"]


@fault(Expect("extra_equal", r"tensor_object\.data"), at=Place.staged)
def object_staged_changed(staged: "StagedState") -> None:
    """What is saved of an object is not what this rank has."""
    staged.state["tensor_object"]["data"].add_(1)
