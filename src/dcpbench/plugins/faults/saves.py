"""Faults of a save: of the staged state, of the live state right after it, and of the files of the complete
checkpoint, which rank 0 damages."""

import itertools
import mmap
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, InjectedAt, Only
from dcpbench.formats.dcp_metadata import DATA_SUFFIX, METADATA
from dcpbench.plugins.faults.registry import fault, staged, written
from dcpbench.plugins.faults.values import A_BIAS, A_WEIGHT

if TYPE_CHECKING:
    from dcpbench.formats.files import FileDigests
    from dcpbench.plugins.faults.targets import Target

_OF_DCP = {"checkpointer": Only(["dcp"], "it damages files as DCP lays them out")}
_ALL_DATA = (DATA_SUFFIX, ".safetensors")
_DEEP = {"verify": Only(["deep"], "only a new process can detect it")}
_UNEQUAL = tuple(
    Expect(check) for check in ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal")
)

_file = partial(written, Expect(phases=["load", "verify"]), Expect("checkpoint_whole", rank=0), only=_OF_DCP)
_after_success = partial(written, Expect("files_unchanged", r".*\.distcp", 0), only=_OF_DCP)


@staged(Expect("model_equal", r"[\w.]+"), saves=2)
def stale_stage(target: "Target") -> None:
    """Write the buffers of the first save again, like a stager that no longer copies."""
    target.state.update(target.kept.setdefault("first", target.state))


@staged(Expect("checkpoint_whole", rf"model\.{A_WEIGHT}", 0), Expect("model_equal", A_WEIGHT))
def weight_staged_as_bf16(target: "Target") -> None:
    """Stage one weight in a narrower dtype; the load converts it back."""
    weights = target.state["model"]
    wide = (
        name for name, weight in weights.items() if name.endswith(".weight") and weight.dtype.itemsize > 2
    )
    name = target.one_of(wide)
    weights[name] = weights[name].bfloat16()


@staged(Expect("optim_equal", r"param_groups\.0\.lr"))
def restored_run_saved_wrong(target: "Target") -> None:
    """Change the learning rate in checkpoints of a restored run."""
    optimizer = target.state["optimizer"]
    for group in optimizer.get("param_groups", [optimizer]):  # flattened, it has no groups
        for key in group:
            if target.folder.name.startswith("again-") and key.rpartition(".")[2] == "lr":
                group[key] *= 2


@staged(
    Expect("checkpoint_whole", rf"model\.{A_BIAS}", 0),
    Expect("model_equal", A_BIAS),
    Expect(phases=["load"], error="RuntimeError", message=rf"model\.{A_BIAS}"),
)
def key_dropped(target: "Target") -> None:
    """Leave the last bias out of the save."""
    model = target.state["model"]
    del model[target.one_of(name for name in reversed([*model]) if name.endswith(".bias"))]


@staged(Expect("checkpoint_whole", r"model\.net9\.weight", 0))
def key_added(target: "Target") -> None:
    """Save a tensor that is not part of the state."""
    target.state["model"]["net9.weight"] = target.state["tensor_object"]["data"].new_ones(2, device="cpu")


@staged(Expect("model_equal", A_WEIGHT))
def keys_exchanged(target: "Target") -> None:
    """Exchange the names of two parameters in a save."""
    model = target.state["model"]
    first, second = target.one_of(
        (first_key.removeprefix("model."), second_key.removeprefix("model."))
        for (first_key, its), (second_key, others) in itertools.combinations(
            target.parts("model.*.weight").items(), 2
        )
        if its.extent.shape == others.extent.shape and its.local.data_ptr() != others.local.data_ptr()
    )
    model[first], model[second] = model[second], model[first]


def _largest(target: "Target", suffixes: Sequence[str] = (DATA_SUFFIX,)) -> Path:
    """Return the largest file of data."""
    files = [path for path in target.folder.iterdir() if path.suffix in suffixes]
    return target.one_of(sorted(files, key=lambda path: path.stat().st_size, reverse=True))


@_file()
def file_missing(target: "Target") -> None:
    """Delete the largest file."""
    _largest(target, _ALL_DATA).unlink()


@_file(Expect(phases=["save"]))
def metadata_missing(target: "Target") -> None:
    """Delete `.metadata`."""
    target.one_of(target.folder.glob(METADATA)).unlink()


@_file()
def file_truncated(target: "Target") -> None:
    """Cut off the last third of the largest file."""
    path = _largest(target, _ALL_DATA)
    os.truncate(path, path.stat().st_size * 2 // 3)


# A tensor with two names has two places in the files, and a load may read the other one.
@_file(*_UNEQUAL, Expect("files_equal"))
def file_bit(target: "Target") -> None:
    """Flip one bit of the data of one tensor in the largest file."""
    path = _largest(target, _ALL_DATA)
    content = bytearray(path.read_bytes())
    if path.suffix == DATA_SUFFIX:
        # Tensors are zip archives: data follows the name of its record, aligned to 64 bytes.
        at = content.index(b"data/0") + len(b"data/0")
        at += -at % 64
        while content[at : at + 4] == b"\0\0\0\0" or content[at] in b"FBZ":
            at += 4
    else:  # of safetensors: after the header's length and the header
        at = 8 + int.from_bytes(content[:8], "little")
    content[at] ^= 1
    path.write_bytes(bytes(content))


@written(Expect("checkpoint_whole", r"__9_9\.distcp", 0))
def file_stray(target: "Target") -> None:
    """Add a file to the checkpoint's folder that no entry names."""
    (target.folder / "__9_9.distcp").write_bytes(b"stray")


@staged(Expect("checkpoint_whole", rank=0, problem="not_synced"))
def fsync_left_out(target: "Target") -> None:
    """Disable `os.fsync` until the end of the cell, which restores it."""
    vars(os)["fsync"] = lambda file: None


@fault(Expect("files_equal", r"model\..*"), at=InjectedAt.both, only=_OF_DCP)
def values_negated_twice(target: "Target") -> None:
    """Negate the model's tensors when they are saved, and again when they are loaded."""
    for leaf in target.parts("model.*").values():
        if leaf.local.is_floating_point():
            leaf.local.neg_()


@_after_success(name="bytes_after_success", mapped=False)
@_after_success(name="file_overwritten_later", mapped=True)
def changed_after_success(target: "Target", mapped: bool) -> None:
    """Change a byte of the largest file that no load reads, when the save has reported success, by a write or
    a shared mapping."""
    name, checkpointer = _largest(target).name, target.checkpointer
    digests = checkpointer.digests

    def digest_and_change(checkpoint_id: str) -> "FileDigests":
        then = digests(checkpoint_id)
        vars(checkpointer)["digests"] = digests
        with checkpointer.files(checkpoint_id) as folder:
            with (folder / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
                at = mapping.find(b"ZZZZ")  # records of a zip archive are aligned with Zs
                if mapped:
                    mapping[at] ^= 1
                else:
                    os.pwrite(file.fileno(), b"Y", at)
            if checkpointer.objects:
                checkpointer.objects.put_back(checkpoint_id, folder)
        return then

    vars(checkpointer)["digests"] = digest_and_change


@written(Expect("model_equal", r"[\w.]+"), saves=2)
def checkpoint_of_first_save(target: "Target") -> None:
    """Replace the checkpoint by the cell's first one, as if the save had written nothing."""
    if target.first != target.folder:
        shutil.rmtree(target.folder)
        shutil.copytree(target.first, target.folder)


@written(*_UNEQUAL, only=_DEEP | _OF_DCP)
def right_in_page_cache_alone(target: "Target") -> None:
    """Flip a bit of the largest file on disk; its cached pages are correct until they are dropped."""
    advise = os.posix_fadvise

    def drop(*arguments: int) -> None:
        vars(os)["posix_fadvise"] = advise
        if target.folder.exists():
            file_bit(target)
        advise(*arguments)

    vars(os)["posix_fadvise"] = drop


@fault(Expect("extra_equal", r"scheduler\.last_epoch", 0), at=InjectedAt.both, only=_DEEP)
def value_served_from_memory(target: "Target") -> None:
    """Write another epoch to the file, and load the correct one from the memory of the process."""
    scheduler = target.state["scheduler"]
    if isinstance(scheduler, dict):
        target.kept[target.folder.name] = scheduler["last_epoch"]
        scheduler["last_epoch"] += 1
    else:
        scheduler.last_epoch = target.kept.get(target.folder.name, scheduler.last_epoch)
