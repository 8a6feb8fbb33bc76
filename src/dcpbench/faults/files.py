"""Defects of the files on disk, once a checkpoint is complete. Planted by rank 0."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path


def truncated(folder: Path, first: Path | None) -> None:
    """The largest file has lost its last third."""
    path = _largest(folder)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def missing(folder: Path, first: Path | None) -> None:
    """The largest file is gone."""
    _largest(folder).unlink()


def zeroed(folder: Path, first: Path | None) -> None:
    """The largest file has its length, and zeros in its second half: a write that was never flushed."""
    path = _largest(folder)
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(len(content) - half))


def byte_flipped(folder: Path, first: Path | None) -> None:
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


def exchanged(folder: Path, first: Path | None) -> None:
    """Two files have each other's names; with one file there is nothing to exchange, and it goes."""
    files = sorted(folder.glob("*.distcp"))
    if len(files) < 2:
        files[0].unlink()
        return
    one, other = files[0].read_bytes(), files[-1].read_bytes()
    files[0].write_bytes(other)
    files[-1].write_bytes(one)


def of_first_save(folder: Path, first: Path | None) -> None:
    """The largest file is that of the cell's first checkpoint."""
    if first is not None and first != folder:
        shutil.copy(first / _largest(folder).name, _largest(folder))


def metadata_missing(folder: Path, first: Path | None) -> None:
    """There is no `.metadata`."""
    (folder / ".metadata").unlink()


def metadata_truncated(folder: Path, first: Path | None) -> None:
    """`.metadata` was cut short."""
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes()[:100])


def metadata_names_other_places(folder: Path, first: Path | None) -> None:
    """`.metadata` of another save, by which two moments of one size have each other's place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - this cell wrote it a moment ago
    places = metadata.storage_data
    for index in list(places):
        if index.fqn.endswith(".exp_avg"):
            other = replace(index, fqn=f"{index.fqn}_sq")
            places[index], places[other] = places[other], places[index]
    path.write_bytes(pickle.dumps(metadata))


def everything_of_first_save(folder: Path, first: Path | None) -> None:
    """The checkpoint is the cell's first one, whole: a save that went nowhere."""
    if first is not None and first != folder:
        shutil.rmtree(folder)
        shutil.copytree(first, folder)


def _largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
