"""Parts of tensors are assembled from stored chunks; of large ones, one block."""

import io
import itertools
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from dcpbench.compare import stored as stored_module
from dcpbench.compare.leaves import SMALL_BYTES
from dcpbench.compare.stored import StoredChunk, compare_stored, read_whole, stored_in
from dcpbench.core.mismatch import Problem
from dcpbench.state import snapshot
from dcpbench.state.layout import Extent, whole
from dcpbench.state.process_state import open_descriptors
from dcpbench.state.snapshot import TensorLeaf, digested

CPU = torch.device("cpu")
SMALL = torch.arange(60.0).reshape(6, 10)


def _chunks(tensor: torch.Tensor, rows: int, read: list[int] | None = None) -> list[StoredChunk]:
    """Return chunks of this number of rows; the numbers of chunks that are read are added to `read`."""

    def part_of(number: int, part: torch.Tensor) -> torch.Tensor:
        if read is not None:
            read.append(number)
        return part.clone()

    return [
        StoredChunk((number * rows, 0), tuple(part.shape), partial(part_of, number, part))
        for number, part in enumerate(tensor.split(rows))
    ]


@pytest.mark.parametrize(
    "extent",
    [
        whole(SMALL),
        Extent((6, 10), (2, 0), (2, 10), 0, 20),  # a DTensor's shard
        Extent((6, 10), (0, 5), (6, 5), 0, 30),  # of columns
        Extent((6, 10), (0, 0), (6, 10), 13, 29),  # FSDP1 cuts anywhere
        Extent((6, 10), (0, 0), (6, 10), 13, 29, (1, 0)),  # in memory order
        Extent((6, 10), (0, 0), (6, 10), 13, 29, (0, 1)),
    ],
)
def test_part_is_assembled_and_compared(extent: Extent) -> None:
    leaves = {"w": TensorLeaf(extent.take(SMALL).clone(), extent, None)}
    read = compare_stored(leaves, {"w": _chunks(SMALL, 4)}, CPU).compared
    assert (read.found, read.detected) == ([], {"w": True})
    leaves["w"].local[-1] += 1
    (finding,) = compare_stored(leaves, {"w": _chunks(SMALL, 4)}, CPU).compared.found
    assert finding.problem is Problem.differs


def test_one_block_of_a_large_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (snapshot, stored_module):
        monkeypatch.setattr(module, "BLOCK", 10)
    large = torch.arange(100.0).reshape(-1, 2)
    leaves = digested({"w": TensorLeaf(large, whole(large), None)})
    rows: list[int] = []
    read = compare_stored(leaves, {"w": _chunks(large, 1, rows)}, CPU).compared
    assert (read.found, read.detected) == ([], {"w": True})
    assert rows == list(range(rows[0], rows[0] + 5))
    (finding,) = compare_stored(leaves, {"w": _chunks(-large, 1)}, CPU).compared.found
    assert finding.problem is Problem.digests_differ


@pytest.mark.parametrize("last", ["a", "b", "c"])
def test_only_the_smallest_large_tensor_is_read(last: str) -> None:
    """In any order."""
    sizes = {"a": 2, "b": 6, "c": 4}
    tensors = {name: torch.ones(rows, 3) for name, rows in sizes.items()}
    stored = {name: _chunks(tensor, 2) for name, tensor in tensors.items()}
    leaves = {name: TensorLeaf(tensor, whole(tensor), None) for name, tensor in tensors.items()}
    large = digested({name: leaves[name] for name in sorted(sizes, key=last.__eq__)})
    assert compare_stored(large, stored, CPU).compared.detected == {"a": True}
    assert compare_stored(leaves, stored, CPU).compared.detected == dict.fromkeys(sizes, True)
    assert compare_stored({**leaves, "a": 0.1}, stored, CPU).compared.detected.keys() == {"b", "c"}


def test_only_overlapping_chunks_are_read() -> None:
    """Chunks can be cut in both dimensions."""
    for extent, expected in (
        (Extent((6, 10), (0, 0), (6, 10), 13, 20), [(1, 0), (1, 5), (2, 0), (2, 5), (3, 0), (3, 5)]),
        (Extent((6, 10), (2, 6), (2, 4), 0, 8), [(2, 5), (3, 5)]),
        (Extent((6, 10), (4, 0), (2, 5), 0, 10), [(4, 0), (5, 0)]),
    ):
        seen: list[tuple[int, int]] = []

        def read(row: int, column: int, seen: list[tuple[int, int]] = seen) -> torch.Tensor:
            seen.append((row, column))
            return SMALL[row : row + 1, column : column + 5]

        chunks = [StoredChunk((a, b), (1, 5), partial(read, a, b)) for a in range(6) for b in (0, 5)]
        leaves = {"w": TensorLeaf(extent.take(SMALL), extent, None)}
        assert compare_stored(leaves, {"w": chunks}, CPU).compared.found == []
        assert seen == expected


def test_stored_parts_and_controls_are_compared() -> None:
    """A step counter stays on the CPU when the model is elsewhere."""
    leaves = {"w": TensorLeaf(SMALL, whole(SMALL), None)}
    read = compare_stored(leaves, {"w": _chunks(SMALL, 6)}, torch.device("meta")).compared
    assert (read.found, read.detected) == ([], {"w": True})


UNREADABLE: dict[str, tuple[list[StoredChunk], str]] = {
    "raises": ([StoredChunk((0, 0), (6, 10), lambda: torch.ones(1)[2])], "IndexError: index 2 is out of"),
    "another shape": (
        [StoredChunk((0, 0), (6, 10), lambda: SMALL.reshape(10, 6))],
        "a chunk has shape (10, 6) instead of (6, 10)",
    ),
    "more rows": (
        [StoredChunk((0, 0), (6, 10), lambda: torch.cat([SMALL, SMALL]))],
        "a chunk has shape (12, 10) instead of (6, 10)",
    ),
    "other dimensions": ([StoredChunk((0,), (60,), lambda: SMALL.reshape(-1))], "ValueError"),
    "none": ([], "no chunk has any of it"),
    "elsewhere": ([StoredChunk((6, 0), (6, 10), lambda: SMALL)], "no chunk has any of it"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_chunk_is_a_mismatch(case: str) -> None:
    chunks, told = UNREADABLE[case]
    read = compare_stored({"w": TensorLeaf(SMALL, whole(SMALL), None)}, {"w": chunks}, CPU).compared
    assert [one.problem for one in read.found] == [Problem.unreadable]
    assert told in read.found[0].facts["error"]
    assert read.detected == {"w": True}


def test_control_of_an_unreadable_chunk_is_run() -> None:
    """A comparison that finds nothing proves nothing, whether or not the chunk can be read."""
    with mock.patch.object(stored_module, "compare", return_value=[]):
        read = compare_stored({"w": TensorLeaf(SMALL, whole(SMALL), None)}, {"w": []}, CPU).compared
    assert [one.problem for one in read.found] == [Problem.unreadable]
    assert read.detected == {"w": False}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_full_tensor_is_as_large_as_its_chunks(order: tuple[int, ...]) -> None:
    tensor = torch.arange(5.0 * 7).view(5, 7)
    boxes = itertools.product((slice(0, 3), slice(3, 5)), (slice(0, 4), slice(4, 7)))
    chunks = [
        StoredChunk((rows.start, columns.start), tuple(part.shape), part.clone)
        for rows, columns in boxes
        for part in [tensor[rows, columns]]
    ]
    assert torch.equal(read_whole([chunks[number] for number in order]), tensor)
    for alone in (torch.tensor(3.0), tensor):
        one = StoredChunk((0,) * alone.dim(), tuple(alone.shape), alone.clone)
        assert torch.equal(read_whole([one]), alone)


def _archive(nested: object) -> bytes:
    file = io.BytesIO()
    torch.save(nested, file)
    return file.getvalue()


def _as_if_large(archive: bytes) -> bytes:
    """Return an archive whose sizes and offsets are in extra fields, as those beyond 4 GiB are."""
    file = io.BytesIO()
    with (
        mock.patch.object(zipfile, "ZIP64_LIMIT", 0),
        zipfile.ZipFile(io.BytesIO(archive)) as before,
        zipfile.ZipFile(file, "w") as after,
    ):
        for record in before.infolist():
            after.writestr(record.filename, before.read(record))
    return file.getvalue()


@pytest.mark.parametrize("most", [SMALL_BYTES, 0])
@pytest.mark.parametrize("rewritten", [bytes, _as_if_large])
def test_archive_is_read_from_a_range(
    rewritten: Callable[[bytes], bytes], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a part of a larger storage, beyond the first page, and mapped."""
    monkeypatch.setattr(stored_module, "SMALL_BYTES", most)
    nested = {"w": SMALL[1:3, ::2], "half": torch.full((), 3.0).bfloat16(), "step": 4}
    archive, path = rewritten(_archive(nested)), tmp_path / "file"
    path.write_bytes(bytes(5001) + archive + b"more")
    before = open_descriptors()
    found = stored_in(path, 5001, len(archive))
    assert open_descriptors() == before
    assert torch.equal(found["w"].read(), SMALL[1:3, ::2])
    assert (found["half"].read().item(), found["half"].sizes, found["step"]) == (3.0, (), 4)


@pytest.mark.parametrize("damage", ["", "PK\6\7", "PK\6\6", "PK\1\2", "PK\3\4", "cut", "number", "empty"])
def test_damaged_archive_is_refused(damage: str, tmp_path: Path) -> None:
    """Each header has its signature, and the object its CRC."""
    archive, path = _archive({"w": 123}), tmp_path / "file"
    damaged = {
        "": archive,
        "cut": archive[:-1],
        "number": archive.replace(bytes([ord("K"), 123]), bytes([ord("K"), 124])),
        "empty": b"",
    }
    path.write_bytes(damaged.get(damage, archive.replace(damage.encode(), b"PKPK")))
    if not damage:
        assert stored_in(path) == {"w": 123}
        return
    with pytest.raises((ValueError, struct.error)):
        stored_in(path)
