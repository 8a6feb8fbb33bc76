"""Defects of the files on disk, once a checkpoint is complete. Planted by rank 0."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dcpbench.config.groups import Expect, Only, Place
from dcpbench.faults.optimizer import WITH_MOMENTS
from dcpbench.faults.registry import Plant, fault

_OF_DCP = {"checkpointer": Only(["dcp"], "it damages files as DCP lays them out")}
_REFUSED = Expect(phases=["load", "verify"])
_SEEN_IN_FILES = Expect("checkpoint_whole", rank=0)
_UNEQUAL = tuple(
    Expect(check) for check in ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal")
)


def _file_fault(*expects: Expect) -> Callable[[Plant], Plant]:
    return fault(_REFUSED, _SEEN_IN_FILES, *expects, at=Place.written, only=_OF_DCP)


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


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
