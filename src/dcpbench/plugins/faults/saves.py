"""Defects of a save: of what is staged, of the live state right after it, and of the files on disk once the
checkpoint is complete, which rank 0 damages."""

import itertools
import mmap
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.checkpointers.dcp_metadata import DATA_SUFFIX, METADATA
from dcpbench.config.groups import Expect, Only, Place
from dcpbench.plugins.faults.registry import fault, staged, written
from dcpbench.plugins.faults.values import A_BIAS, A_WEIGHT, WITH_MOMENTS

if TYPE_CHECKING:
    from dcpbench.plugins.faults.targets import Target

_KEY = rf"model\.{A_BIAS}"
_OF_DCP = {"checkpointer": Only(["dcp"], "it damages files as DCP lays them out")}
_FILES_OF_DATA = f"*{DATA_SUFFIX}"
_DEEP = {"verify": Only(["deep"], "a fresh process alone can see it")}
_UNEQUAL = tuple(
    Expect(check) for check in ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal")
)

_lost = partial(
    staged,
    Expect("checkpoint_whole", _KEY, 0),
    Expect("model_equal", A_BIAS),
    Expect(phases=["load"], error="RuntimeError", message=_KEY),
)
_of_files = partial(written, Expect(phases=["load", "verify"]), Expect("checkpoint_whole", rank=0))
_file = partial(_of_files, only=_OF_DCP)
_metadata = partial(_file, Expect(phases=["save"]))
_safetensors = partial(
    _of_files,
    only={"storage": Only(["hf", "hf_sharded", "hf_consolidated"], "it damages files of safetensors")},
    files="*.safetensors",
)


@staged(Expect("model_equal", r"[\w.]+"), saves=2)
def stale_stage(target: "Target") -> None:
    """The buffers of the first save are written again: a stager that copies nothing any more."""
    target.state.update(target.kept.setdefault("first", target.state))


@staged(Expect("checkpoint_whole", rf"model\.{A_WEIGHT}", 0), Expect("model_equal", A_WEIGHT))
def weight_staged_as_bf16(target: "Target") -> None:
    """One weight is staged in a narrower dtype, and comes back as if nothing had happened."""
    weights = target.state["model"]
    wide = (name for name, value in weights.items() if name.endswith(".weight") and value.dtype.itemsize > 2)
    name = target.one_of(wide)
    weights[name] = weights[name].bfloat16()


@staged(Expect("optim_equal", r"param_groups\.0\.lr"))
def restored_run_saved_wrong(target: "Target") -> None:
    """What a restored run saves has another learning rate."""
    optimizer = target.state["optimizer"]
    for group in optimizer.get("param_groups", [optimizer]):  # flattened, it has no groups
        for key in group:
            if target.folder.name.endswith("-again") and key.rpartition(".")[2] == "lr":
                group[key] *= 2


def _bias(target: "Target") -> str:
    """The name of the last bias."""
    names: list[str] = [*target.state["model"]]
    return target.one_of(name for name in reversed(names) if name.endswith(".bias"))


@_lost()
def key_dropped(target: "Target") -> None:
    """A parameter is not saved at all."""
    del target.state["model"][_bias(target)]


@_lost()
def key_renamed(target: "Target") -> None:
    """A parameter is saved under another name."""
    model = target.state["model"]
    name = _bias(target)
    model[f"{name}_renamed"] = model.pop(name)


@staged(Expect("checkpoint_whole", r"model\.net9\.weight", 0))
def key_added(target: "Target") -> None:
    """The checkpoint has a tensor that nobody asked for."""
    target.state["model"]["net9.weight"] = target.state["tensor_object"]["data"].new_ones(2, device="cpu")


@staged(Expect("model_equal", A_WEIGHT))
def keys_exchanged(target: "Target") -> None:
    """Two parameters are saved under each other's names."""
    model = target.state["model"]
    one, other = target.one_of(
        (one.removeprefix("model."), other.removeprefix("model."))
        for (one, its), (other, others) in itertools.combinations(target.parts("model.*.weight").items(), 2)
        if its.extent.shape == others.extent.shape and its.local.data_ptr() != others.local.data_ptr()
    )
    model[one], model[other] = model[other], model[one]


def _largest(target: "Target", files: str = _FILES_OF_DATA) -> Path:
    found = sorted(target.folder.glob(files), key=lambda path: path.stat().st_size)
    return target.one_of(reversed(found))


@_file(name="file_missing", files=_FILES_OF_DATA)
@_metadata(name="metadata_missing", files=METADATA)
@_safetensors(name="safetensors_missing")
def missing(target: "Target", files: str) -> None:
    """The largest file is gone."""
    _largest(target, files).unlink()


@_file(name="file_truncated", files=_FILES_OF_DATA)
@_metadata(name="metadata_truncated", files=METADATA)
@_safetensors(name="safetensors_truncated")
def truncated(target: "Target", files: str) -> None:
    """The largest file has lost its last third."""
    path = _largest(target, files)
    os.truncate(path, path.stat().st_size * 2 // 3)


@_file()
def file_zeroed(target: "Target") -> None:
    """The largest file has its length, and zeros in its second half: a write that was never flushed."""
    path = _largest(target)
    length = path.stat().st_size
    os.truncate(path, length // 2)
    os.truncate(path, length)


# Of a tensor with two names, and so two places in the files, a load may take the other one.
@_file(*_UNEQUAL, Expect("files_equal"))
def file_bit(target: "Target") -> None:
    """One bit of one tensor's data in the largest file."""
    path = _largest(target)
    content = bytearray(path.read_bytes())
    # Tensors are zip archives: data follows the name of its record, aligned to 64 bytes.
    at = content.index(b"data/0") + len(b"data/0")
    at += -at % 64
    while content[at : at + 4] == b"\0\0\0\0" or content[at] in b"FBZ":
        at += 4
    content[at] ^= 1
    path.write_bytes(bytes(content))


@_safetensors(*_UNEQUAL, Expect("files_equal"))
def safetensors_bit(target: "Target", files: str) -> None:
    """One bit of the first tensor's data in the largest file."""
    path = _largest(target, files)
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # after the header's length and the header
    path.write_bytes(bytes(content))


@_file(*_UNEQUAL)
def files_exchanged(target: "Target") -> None:
    """Two files have each other's names; with one file there is nothing to exchange, and it goes."""
    files = sorted(target.folder.glob(_FILES_OF_DATA))
    if len(files) < 2:
        target.one_of(files).unlink()
        return
    one, other = files[0].read_bytes(), files[-1].read_bytes()
    files[0].write_bytes(other)
    files[-1].write_bytes(one)


@_file(*_UNEQUAL, saves=2)
def file_of_first_save(target: "Target") -> None:
    """The largest file is that of the cell's first checkpoint."""
    if target.first != target.folder:
        shutil.copy(target.first / _largest(target).name, _largest(target))


@written(Expect("optim_equal", r"state\.[\w.]+"), only=WITH_MOMENTS | _OF_DCP)
def metadata_names_other_places(target: "Target") -> None:
    """`.metadata` of another save, by which two moments of one size have each other's place."""
    path = target.folder / METADATA
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this cell wrote it a moment ago
    places = metadata.storage_data
    for index in list(places):
        if index.fqn.endswith(".exp_avg"):
            other = replace(index, fqn=f"{index.fqn}_sq")
            places[index], places[other] = places[other], places[index]
    path.write_bytes(pickle.dumps(metadata))


@written(Expect("checkpoint_whole", r"__9_9\.distcp", 0))
def file_stray(target: "Target") -> None:
    """The checkpoint's folder has a file that no entry names."""
    (target.folder / "__9_9.distcp").write_bytes(b"stray")


@written(Expect("checkpoint_whole", r"model\.net9\.weight .*", 0), only=_OF_DCP)
def entry_without_key(target: "Target") -> None:
    """`.metadata` has a place for a tensor that has no key."""
    path = target.folder / METADATA
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this cell wrote it a moment ago
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[replace(index, fqn="model.net9.weight")] = place
    path.write_bytes(pickle.dumps(metadata))


@staged(Expect("checkpoint_whole", r"tensor_object\.data", 0), Expect(phases=["load"]))
def tensor_stored_as_bytes(target: "Target") -> None:
    """A tensor is staged as a list of its elements."""
    held = target.state["tensor_object"]
    held["data"] = held["data"].tolist()


@staged(Expect("checkpoint_whole", rank=0, problem="not_synced"))
def fsync_left_out(target: "Target") -> None:
    """Nothing is synced any more; when the cell ends, `os.fsync` is put back."""
    vars(os)["fsync"] = lambda file: None


@fault(Expect("files_equal", r"model\..*"), at=Place.both, only=_OF_DCP)
def values_negated_twice(target: "Target") -> None:
    """What the model's tensors are saved as is negated, and what is loaded is negated again."""
    for part in target.parts("model.*").values():
        if part.local.is_floating_point():
            part.local.neg_()


@fault(
    Expect("files_equal", r"model\..*"),
    at=Place.both,
    only=_OF_DCP
    | {"parallel": Only(["none", "ddp", "fsdp2", "hsdp2", "fsdp2_tp"], "its parts are saved as they lie")},
)
def load_served_from_memory(target: "Target") -> None:
    """The files hold zeros, and a load takes the model from where the save has kept it in memory."""
    parts = {key: part.local for key, part in target.parts("model.*").items()}
    if isinstance(target.state["model"], dict):
        target.kept[target.folder.name] = {key: local.clone() for key, local in parts.items()}
        for local in parts.values():
            local.zero_()
    else:
        for key, local in parts.items():
            local.copy_(target.kept[target.folder.name][key])


@written(
    Expect("files_unchanged", r".*\.distcp", 0),
    Expect(phases=["load"], error="UnpicklingError"),  # of what is loaded before it has its bytes
    only=_OF_DCP,
)
def bytes_after_success(target: "Target") -> None:
    """The largest file is all zeros when the save reports success, and gets its bytes 80 ms later."""
    path = _largest(target)
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))

    def write() -> None:
        with path.open("r+b") as file:
            file.write(content)

    _later(write)


@written(Expect("files_unchanged", r".*\.distcp", 0), only=_OF_DCP)
def file_overwritten_later(target: "Target") -> None:
    """80 ms after success a shared mapping of the largest file changes a byte that no load looks at."""
    path = _largest(target)

    def overwrite() -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            # Records of a zip archive are aligned with Zs.
            mapped[mapped.find(b"ZZZZ")] ^= 1

    _later(overwrite)


def _later(do: Callable[[], object]) -> None:
    """Call it 80 ms from now, in a thread."""
    timer = threading.Timer(0.08, do)
    timer.daemon = True
    timer.start()


@written(Expect("model_equal", r"[\w.]+"), saves=2)
def checkpoint_of_first_save(target: "Target") -> None:
    """The checkpoint is the cell's first one, whole: a save that went nowhere."""
    if target.first != target.folder:
        shutil.rmtree(target.folder)
        shutil.copytree(target.first, target.folder)


@written(*_UNEQUAL, only=_DEEP | _OF_DCP)
def right_in_page_cache_alone(target: "Target") -> None:
    """A bit of the largest file is wrong on the disk, and right in its cached pages until these go."""
    advise = os.posix_fadvise

    def drop(*arguments: int) -> None:
        vars(os)["posix_fadvise"] = advise
        if target.folder.exists():
            file_bit(target)
        advise(*arguments)

    vars(os)["posix_fadvise"] = drop


@fault(Expect("extra_equal", r"scheduler\.last_epoch", 0), at=Place.both, only=_DEEP)
def value_served_from_memory(target: "Target") -> None:
    """The file holds another epoch than was saved, and a load takes it from the memory of the process."""
    scheduler = target.state["scheduler"]
    if isinstance(scheduler, dict):
        target.kept[target.folder.name] = scheduler["last_epoch"]
        scheduler["last_epoch"] += 1
    else:
        scheduler.last_epoch = target.kept[target.folder.name]
