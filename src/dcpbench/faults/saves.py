"""Defects of a save: of what is staged, of the live state right after it, and of the files on disk once the
checkpoint is complete, which rank 0 damages."""

import os
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Only
from dcpbench.faults.registry import staged, written
from dcpbench.faults.values import WITH_MOMENTS

if TYPE_CHECKING:
    from dcpbench.faults.targets import Target

_KEY = r"model\.net3\.bias"
_OF_DCP = {"checkpointer": Only(["dcp"], "it damages files as DCP lays them out")}
_UNEQUAL = tuple(
    Expect(check) for check in ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal")
)

_lost = partial(
    staged,
    Expect("checkpoint_whole", _KEY, 0),
    Expect("model_equal", r"net3\.bias"),
    Expect(phases=["load"], error="RuntimeError", message=_KEY),
)
_file = partial(written, Expect(phases=["load", "verify"]), Expect("checkpoint_whole", rank=0), only=_OF_DCP)
_metadata = partial(_file, Expect(phases=["save"]))


@staged(Expect("model_equal", r"net\d\..*"))
def stale_stage(target: "Target") -> None:
    """The buffers of the first save are written again: a stager that copies nothing any more."""
    target.state.update(target.kept.setdefault("first", target.state))


@staged(Expect("checkpoint_whole", r"model\.net2\.weight", 0), Expect("model_equal", r"net2\.weight"))
def weight_staged_as_bf16(target: "Target") -> None:
    """One weight is staged in a narrower dtype, and comes back as if nothing had happened."""
    weights = target.state["model"]
    weights["net2.weight"] = weights["net2.weight"].bfloat16()


@_lost()
def key_dropped(target: "Target") -> None:
    """A parameter is not saved at all."""
    del target.state["model"]["net3.bias"]


@_lost()
def key_renamed(target: "Target") -> None:
    """A parameter is saved under another name."""
    model = target.state["model"]
    model["net3.offset"] = model.pop("net3.bias")


@staged(Expect("checkpoint_whole", r"model\.net9\.weight", 0))
def key_added(target: "Target") -> None:
    """The checkpoint has a tensor that nobody asked for."""
    target.state["model"]["net9.weight"] = target.state["tensor_object"]["data"].new_ones(2, device="cpu")


@staged(
    Expect("model_equal", r"net[23]\.weight"),
    only={"model": Only(["buffered"], "it needs two tensors of one shape")},
)
def keys_exchanged(target: "Target") -> None:
    """Two parameters are saved under each other's names."""
    model = target.state["model"]
    model["net2.weight"], model["net3.weight"] = model["net3.weight"], model["net2.weight"]


def _largest(folder: Path, files: str = "*.distcp") -> Path:
    return max(folder.glob(files), key=lambda path: path.stat().st_size)


@_file(name="file_missing", files="*.distcp")
@_metadata(name="metadata_missing", files=".metadata")
def missing(target: "Target", files: str) -> None:
    """The largest file is gone."""
    _largest(target.folder, files).unlink()


@_file(name="file_truncated", files="*.distcp")
@_metadata(name="metadata_truncated", files=".metadata")
def truncated(target: "Target", files: str) -> None:
    """The largest file has lost its last third."""
    path = _largest(target.folder, files)
    os.truncate(path, path.stat().st_size * 2 // 3)


@_file()
def file_zeroed(target: "Target") -> None:
    """The largest file has its length, and zeros in its second half: a write that was never flushed."""
    path = _largest(target.folder)
    length = path.stat().st_size
    os.truncate(path, length // 2)
    os.truncate(path, length)


@_file(*_UNEQUAL)
def file_bit(target: "Target") -> None:
    """One bit of one tensor's data in the largest file."""
    path = _largest(target.folder)
    content = bytearray(path.read_bytes())
    # Tensors are zip archives: data follows the name of its record, aligned to 64 bytes.
    at = content.index(b"data/0") + len(b"data/0")
    at += -at % 64
    while content[at : at + 4] == b"\0\0\0\0" or content[at] in b"FBZ":
        at += 4
    content[at] ^= 1
    path.write_bytes(bytes(content))


@_file(*_UNEQUAL)
def files_exchanged(target: "Target") -> None:
    """Two files have each other's names; with one file there is nothing to exchange, and it goes."""
    files = sorted(target.folder.glob("*.distcp"))
    if len(files) < 2:
        files[0].unlink()
        return
    one, other = files[0].read_bytes(), files[-1].read_bytes()
    files[0].write_bytes(other)
    files[-1].write_bytes(one)


@_file(*_UNEQUAL)
def file_of_first_save(target: "Target") -> None:
    """The largest file is that of the cell's first checkpoint."""
    if target.first != target.folder:
        shutil.copy(target.first / _largest(target.folder).name, _largest(target.folder))


@written(Expect("optim_equal", r"state\.net.*"), only=WITH_MOMENTS | _OF_DCP)
def metadata_names_other_places(target: "Target") -> None:
    """`.metadata` of another save, by which two moments of one size have each other's place."""
    path = target.folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this cell wrote it a moment ago
    places = metadata.storage_data
    for index in list(places):
        if index.fqn.endswith(".exp_avg"):
            other = replace(index, fqn=f"{index.fqn}_sq")
            places[index], places[other] = places[other], places[index]
    path.write_bytes(pickle.dumps(metadata))


@written(Expect("model_equal", r"net\d\..*"))
def checkpoint_of_first_save(target: "Target") -> None:
    """The checkpoint is the cell's first one, whole: a save that went nowhere."""
    if target.first != target.folder:
        shutil.rmtree(target.folder)
        shutil.copytree(target.first, target.folder)
