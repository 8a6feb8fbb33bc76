"""Defects of a save: of what is staged, of the live state right after it, and of the files on disk once the
checkpoint is complete, which rank 0 damages."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Only, Place
from dcpbench.faults.optimizer import WITH_MOMENTS
from dcpbench.faults.registry import Plant, fault

if TYPE_CHECKING:
    from dcpbench.faults.targets import StagedState, Target

_KEY = r"model\.net3\.bias"
_LOST = (
    Expect("checkpoint_whole", _KEY, 0),
    Expect("model_equal", r"net3\.bias"),
    Expect(phases=["load"], error="RuntimeError", message=_KEY),
)
_HARMED = Expect("save_harmless")
_OF_DCP = {"checkpointer": Only(["dcp"], "it damages files as DCP lays them out")}
_REFUSED = Expect(phases=["load", "verify"])
_SEEN_IN_FILES = Expect("checkpoint_whole", rank=0)
_UNEQUAL = tuple(
    Expect(check) for check in ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal")
)


@fault(Expect("model_equal", r"net\d\..*"), at=Place.staged)
def stale_stage(staged: "StagedState") -> None:
    """The buffers of the first save are written again: a stager that copies nothing any more."""
    staged.state.update(staged.first)


@fault(Expect("model_equal", r"net2\.weight"), at=Place.staged)
def weight_changed_while_staged(staged: "StagedState") -> None:
    """One weight is another one by the time it is copied, on every rank that has a part of it."""
    part = staged.part("model", "net2.weight")
    if part.numel():
        part.view(-1)[0] += 0.001


@fault(
    Expect("checkpoint_whole", r"model\.net2\.weight", 0),
    Expect("model_equal", r"net2\.weight"),
    at=Place.staged,
)
def weight_staged_as_bf16(staged: "StagedState") -> None:
    """One weight is staged in a narrower dtype, and comes back as if nothing had happened."""
    weights = staged.state["model"]
    weights["net2.weight"] = weights["net2.weight"].bfloat16()


@fault(Expect("optim_equal", r"state\.net2\.weight\.exp_avg"), at=Place.staged, only=WITH_MOMENTS)
def moment_staged_as_zeros(staged: "StagedState") -> None:
    """A moment is staged as zeros."""
    staged.part("optimizer", "state", "net2.weight", "exp_avg").zero_()


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
    weights = staged.state["model"]
    weights["net9.weight"] = staged.part("model", next(iter(weights))).new_ones(2, device="cpu")


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


@fault(_HARMED, at=Place.live)
def save_nudges_weight(target: "Target") -> None:
    """The save leaves one weight larger than it was, on one rank."""
    if target.victim:
        target.largest_parameter().view(-1)[0].add_(0.01)


@fault(_HARMED, at=Place.live)
def save_takes_step(target: "Target") -> None:
    """The save counts as a step of the optimizer."""
    for step in target.moments("step").values():
        step.add_(1)


@fault(_HARMED, at=Place.live)
def save_draws_noise(target: "Target") -> None:
    """The save draws from the training's random generator."""
    target.state["noise"].like(target.state["tensor_object"].data)


@fault(_HARMED, at=Place.live)
def save_resets_lr(target: "Target") -> None:
    """The save leaves another learning rate."""
    target.param_groups[0]["lr"] = 0.05


def _file_fault(*expects: Expect) -> Callable[[Plant], Plant]:
    return fault(_REFUSED, _SEEN_IN_FILES, *expects, at=Place.written, only=_OF_DCP)


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


@_file_fault()
def file_truncated(folder: Path, first: Path) -> None:
    """The largest file has lost its last third."""
    path = _largest(folder)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


@_file_fault()
def file_missing(folder: Path, first: Path) -> None:
    """The largest file is gone."""
    _largest(folder).unlink()


@_file_fault()
def file_zeroed(folder: Path, first: Path) -> None:
    """The largest file has its length, and zeros in its second half: a write that was never flushed."""
    path = _largest(folder)
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(len(content) - half))


@_file_fault(*_UNEQUAL)
def file_bit(folder: Path, first: Path) -> None:
    """One bit of one tensor's data in the largest file."""
    path = _largest(folder)
    content = bytearray(path.read_bytes())
    # Tensors are zip archives: data follows the name of its record, aligned to 64 bytes.
    at = content.index(b"data/0") + len(b"data/0")
    at += -at % 64
    while content[at : at + 4] == b"\0\0\0\0" or content[at] in b"FBZ":
        at += 4
    content[at] ^= 1
    path.write_bytes(bytes(content))


@_file_fault(*_UNEQUAL)
def files_exchanged(folder: Path, first: Path) -> None:
    """Two files have each other's names; with one file there is nothing to exchange, and it goes."""
    files = sorted(folder.glob("*.distcp"))
    if len(files) < 2:
        files[0].unlink()
        return
    one, other = files[0].read_bytes(), files[-1].read_bytes()
    files[0].write_bytes(other)
    files[-1].write_bytes(one)


@_file_fault(*_UNEQUAL)
def file_of_first_save(folder: Path, first: Path) -> None:
    """The largest file is that of the cell's first checkpoint."""
    if first != folder:
        shutil.copy(first / _largest(folder).name, _largest(folder))


@_file_fault(Expect(phases=["save"]))
def metadata_missing(folder: Path, first: Path) -> None:
    """There is no `.metadata`."""
    (folder / ".metadata").unlink()


@_file_fault(Expect(phases=["save"]))
def metadata_truncated(folder: Path, first: Path) -> None:
    """`.metadata` was cut short."""
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:100])


@fault(Expect("optim_equal", r"state\.net.*"), at=Place.written, only=WITH_MOMENTS | _OF_DCP)
def metadata_names_other_places(folder: Path, first: Path) -> None:
    """`.metadata` of another save, by which two moments of one size have each other's place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this cell wrote it a moment ago
    places = metadata.storage_data
    for index in list(places):
        if index.fqn.endswith(".exp_avg"):
            other = replace(index, fqn=f"{index.fqn}_sq")
            places[index], places[other] = places[other], places[index]
    path.write_bytes(pickle.dumps(metadata))


@fault(Expect("model_equal", r"net\d\..*"), at=Place.written)
def checkpoint_of_first_save(folder: Path, first: Path) -> None:
    """The checkpoint is the cell's first one, whole: a save that went nowhere."""
    if first != folder:
        shutil.rmtree(folder)
        shutil.copytree(first, folder)
