"""The audit of a real checkpoint: a complete one has no mismatch, and every kind of damage is reported."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcpbench.core.mismatch import Problem
from dcpbench.core.sentences import describe
from dcpbench.formats.audit import Chunk, Entry, Manifest, audit, controls, damaged_copies
from dcpbench.formats.dcp_metadata import manifest_of
from dcpbench.state.layout import whole
from dcpbench.state.snapshot import EmptyShard, TensorLeaf, expected_entries


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Manifest, dict[str, Entry]]:
    tensors = {"weight": torch.rand(4, 6), "count": torch.tensor(3)}
    dcp.save({"model": dict(tensors), "epoch": 7}, checkpoint_id=tmp_path, no_dist=True)
    leaves = {f"model.{name}": TensorLeaf(value, whole(value), None) for name, value in tensors.items()}
    metadata = FileSystemReader(tmp_path).read_metadata()
    lengths = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    return manifest_of(metadata, lengths), expected_entries({**leaves, "epoch": 7})


def test_empty_file_of_an_idle_thread_is_not_stray(tmp_path: Path) -> None:
    state = {"weight": torch.rand(4)}
    writer = FileSystemWriter(tmp_path, thread_count=3)
    dcp.save(state, storage_writer=writer, no_dist=True)
    lengths = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sorted(lengths.values())[:2] == [0, 0]
    metadata = FileSystemReader(tmp_path).read_metadata()
    expected = expected_entries({"weight": TensorLeaf(state["weight"], whole(state["weight"]), None)})
    assert audit(manifest_of(metadata, lengths), expected) == []
    named = next(name for name in lengths if lengths[name] and name != ".metadata")
    emptied = audit(manifest_of(metadata, {**lengths, named: 0, "empty.txt": 0}), expected)
    assert {one.name for one in emptied} == {named, "empty.txt"}


def test_every_damage_is_reported(checkpoint: tuple) -> None:
    manifest, expected = checkpoint
    damages = damaged_copies(manifest, "model.weight")
    assert len(damages) == 15
    shared = audit(damages["bytes of two entries"], expected)
    assert [(one.problem, one.facts["other"]) for one in shared] == [("ranges", "sentinel")]
    assert [damage for damage, copy in damages.items() if not audit(copy, expected)] == []


WEIGHT = Entry(
    (4, 6),
    "torch.float32",
    tuple(Chunk((top, left), (2, 3), f"{top}.distcp") for top in (0, 2) for left in (0, 3)),
)
IN_CHUNKS = Manifest(
    {"epoch": Entry(), "w": WEIGHT, "lr": Entry()},
    named={"0.distcp": 48, "2.distcp": 48, "4.distcp": 8},
    found={"2.distcp": 48, "0.distcp": 48, "4.distcp": 8},
)


def test_damaged_copy_has_one_damage() -> None:
    """A weaker audit would still report a control with more damage."""
    told = {
        damage: [
            (found.name, found.problem, *found.facts.values()) for found in audit(copy, IN_CHUNKS.entries)
        ]
        for damage, copy in damaged_copies(IN_CHUNKS, "w").items()
    }
    assert told == {
        "a tensor that is stored as bytes": [("w", "dtype", "torch.float32", "no tensor")],
        "a value that is stored as a tensor": [("a value", "not_asked_for")],
        "a key that is missing": [("w", "not_stored")],
        "a key too many": [("sentinel", "not_asked_for")],
        "another shape": [("w", "shape", (4, 6), (5, 6)), ("w", "uncovered", 24, 30)],
        "another dtype": [("w", "dtype", "torch.float32", "torch.complex128")],
        "a chunk that is there twice": [("w", "chunks", (0, 0), (0, 0))],
        "a chunk that is missing": [("w", "uncovered", 18, 24)],
        "a chunk beyond its tensor": [("w", "chunks", (4, 6), (2, 3), (4, 6))],
        "a chunk that is stored nowhere": [("w", "chunks", (0, 0))],
        "a file that is too short": [("0.distcp", "files", 48, 47)],
        "an entry that has no key": [("sentinel", "unclaimed")],
        "a file that no entry names": [("sentinel", "stray", 1)],
        "a file that is missing": [("0.distcp", "files", 48, "no such file")],
    }


def test_folder_without_metadata_has_no_entries() -> None:
    found = audit(Manifest({}, {}, {"__0_0.distcp": 8}), {"model.w": Entry((2,), "torch.float32")})
    assert {(one.name, one.problem) for one in found} == {
        ("model.w", Problem.not_stored),
        ("__0_0.distcp", Problem.stray),
    }
    assert controls(Manifest({}, {}, {"__0_0.distcp": 8}), {}) == {}, "there is nothing to damage"


def test_control_damages_a_chunk_with_elements() -> None:
    """The last rank has none if a tensor has fewer elements than there are ranks."""
    held, empty = Chunk((0,), (3,), "0.distcp"), Chunk((3,), (0,), "2.distcp")
    for chunks in ((held, empty), (empty, held)):
        entries = {"bias": Entry((3,), "torch.float32", chunks), "epoch": Entry()}
        manifest = Manifest(entries, named={"0.distcp": 12}, found={"0.distcp": 12})
        assert audit(manifest, entries) == []
        told = controls(manifest, entries)
        assert [damage for damage, reported in told.items() if not reported] == []


def boxes(shape: list[int], ways: list[list[int]]) -> Iterator[Chunk]:
    """Return a tensor cut at these indices of each dimension; chunks can be empty."""
    borders = (
        [0, *sorted(cut % (size + 1) for cut in cuts), size] for size, cuts in zip(shape, ways, strict=True)
    )
    for ranges in itertools.product(*map(pairwise, borders)):
        yield Chunk(tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges), "0")


@settings(deadline=None, max_examples=200)
@given(
    ways=st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.integers(0, 9), max_size=2)), min_size=1, max_size=3
    ),
    data=st.data(),
)
def test_chunks_have_to_tile_a_tensor(ways: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    """Compare with the number of times that each element is stored."""
    shape = [size for size, _ in ways]
    chunks = [*boxes(shape, [cuts for _, cuts in ways])]
    if data.draw(st.booleans()):
        one = data.draw(st.sampled_from([n for n, chunk in enumerate(chunks) if math.prod(chunk.sizes)]))
        chunks[one] = replace(chunks[one], offsets=tuple(data.draw(st.integers(0, size)) for size in shape))
    times = torch.zeros([2 * size for size in shape], dtype=torch.int64)
    for chunk in chunks:
        times[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    inside = times[tuple(slice(size) for size in shape)]
    tiled = bool((inside == 1).all()) and int(times.sum()) == math.prod(shape)
    entry = Entry(tuple(shape), "torch.int8", tuple(chunks))
    assert (audit(Manifest({"w": entry}, {}, {}), {"w": entry}) == []) is tiled


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk((0,), (4,), "0")],
        [Chunk((0, 0), (4,), "0")],
        [Chunk((0, 0, 0), (4, 6, 1), "0")],
        [Chunk((0,), (24,), "0"), Chunk((0, 0), (4, 6), "0")],
    ],
)
def test_chunk_with_other_dimensions_is_an_error(chunks: list[Chunk]) -> None:
    entry = replace(WEIGHT, chunks=tuple(chunks))
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        audit(Manifest({"w": entry}, {}, {}), {"w": entry})


def test_controls_do_not_change_the_manifest(checkpoint: tuple) -> None:
    assert controls(*checkpoint) == dict.fromkeys(damaged_copies(checkpoint[0], "model.weight"), True)
    assert audit(*checkpoint) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.weight": Entry((6, 4), "torch.float32")}, "global shape: to be saved (6, 4), stored (4, 6)"),
        ({"model.weight": Entry((4, 6), "torch.bfloat16")}, "dtype: to be saved torch.bfloat16"),
        ({"epoch": Entry((), "torch.int64")}, "dtype: to be saved torch.int64, stored no tensor"),
        ({"model.weight": Entry()}, "dtype: to be saved a value, stored torch.float32"),
        ({"model.bias": Entry()}, "to be saved, but not in the checkpoint"),
    ],
)
def test_unexpected_properties_are_reported(checkpoint: tuple, change: dict, told: str) -> None:
    manifest, expected = checkpoint
    found = audit(manifest, {**expected, **change})
    assert [told in describe(finding) for finding in found] == [True]


def test_idle_entries_are_not_expected() -> None:
    assert expected_entries({"state.w.step": EmptyShard(1.0), "lr": 0.1}) == {"lr": Entry()}
