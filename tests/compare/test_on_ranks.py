"""The comparators against brute force, on real ranks: random meshes, placements, shapes, dtypes and damage.

Brute force uses no digests and extents: every rank's bytes are gathered, and where an element lies
is read off a tensor of the same shape, cut in the same way, that holds its own indices.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from compare.test_leaves import DTYPES
from dcpbench.compare.across_layouts import compare_across, digests_of_full
from dcpbench.compare.leaves import compare
from dcpbench.compare.stored import StoredChunk, compare_stored
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.state.layout import extent_of, whole
from dcpbench.state.snapshot import TensorLeaf
from support.gloo_ranks import Ask

MESHES = ((4,), (2, 2), (4, 1), (1, 4))


@dataclass(frozen=True)
class Case:
    """A tensor, two ways to lay it out, and a byte of one rank's part that is flipped, if there is one."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    other_mesh: tuple[int, ...]
    other_placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    victim: int
    byte: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    placement = st.sampled_from([Replicate(), *(Shard(dimension) for dimension in range(len(shape)))])
    meshes = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    one, other = (tuple(draw(placement) for _ in mesh) for mesh in meshes)
    dtype = draw(st.sampled_from(DTYPES))
    byte = draw(st.none() | st.integers(0, 10_000))
    return Case(
        meshes[0],
        one,
        meshes[1],
        other,
        shape,
        dtype,
        draw(st.integers(0, 99)),
        draw(st.integers(0, 3)),
        byte,
    )


@pytest.mark.slow
@pytest.mark.parametrize("examples", [30, 100])
def test_ranks_match_brute_force(ask: Ask, examples: int) -> None:
    @settings(deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases())
    def any_case(case: Case) -> None:
        ranks_match(ask, case)

    any_case()


@pytest.mark.slow
def test_every_part_of_a_checkpoint_is_read(ask: Ask) -> None:
    """By each rank that has it."""
    read = ask(read_parts)
    random = [f"random.rank{rank}" for rank in range(4)]
    assert Counter(name for names in read for name in names) == Counter(
        [*["full"] * 4, *random, *["shard"] * 4, "few", "two", "two"]
    )


def read_parts() -> set[str]:
    """Return the names of the parts of this rank that it compares with the files."""
    rank, tensor = dist.get_rank(), torch.arange(8.0).reshape(4, 2)
    row, one = torch.ones(1, 2), cut(tensor, (4,), (Shard(0),))
    leaves = {"full": TensorLeaf(tensor, whole(tensor), None)}
    leaves |= {"shard": leaf(one), "few": leaf(cut(row, (4,), (Shard(0),)))}
    leaves |= {f"random.rank{rank}": TensorLeaf(tensor, whole(tensor), None)}
    leaves |= {"two": TensorLeaf(tensor, whole(tensor), None)} if rank > 1 else {}
    leaves |= {"nothing": TensorLeaf(tensor[:0], whole(tensor[:0]), None)}
    stored = {name: [StoredChunk((0, 0), (4, 2), lambda: tensor)] for name in leaves}
    stored["few"] = [StoredChunk((0, 0), (1, 2), lambda: row)]
    compared = compare_stored(leaves, stored, torch.device("cpu")).compared
    assert compared.found == []
    return {*compared.detected}


def ranks_match(ask: Ask, case: Case) -> None:
    told = ask(look, case)
    damaged = [rank for rank, each in enumerate(told) if each["parts_differ"]]
    assert damaged == ([case.victim] if told[case.victim]["flipped"] else [])
    for each in told:
        # Part by part: on the rank that is damaged, at the index that brute force found.
        assert each["found"] == ([("w", each["at"], 1)] if each["parts_differ"] else [])
        # By content: on every rank, if any was; and against another layout of the same tensor.
        assert each["across"] == (["w"] if damaged else [])
        # With what was saved at hand, on the rank that is damaged, at the index that brute force found.
        assert each["across_with_place"] == ([("w", each["at"], 1)] if each["parts_differ"] else [])
        # Together: the same bytes as the tensor that was cut, and a drifted replica is reported.
        assert each["digest_of_whole"] is (not damaged or each["drifted"])
        assert each["complains"] is each["drifted"]
        assert each["put_together"] is True
    assert any(each["drifted"] for each in told) is all(each["drifted"] for each in told)


def look(case: Case) -> dict[str, Any]:
    """Compare, on a rank, the results of the comparators with those of gathering every byte."""
    width = case.dtype.itemsize
    numel = math.prod(case.shape)
    top = 2 if case.dtype is torch.bool else 256
    raw = torch.randint(0, top, (numel * width,), generator=torch.Generator().manual_seed(case.seed))
    tensor = raw.to(torch.uint8).view(case.dtype).reshape(case.shape)
    numbers = torch.arange(numel).reshape(case.shape)
    saved = leaf(cut(tensor, case.mesh, case.placements))
    places = cut(numbers, case.mesh, case.placements).to_local().reshape(-1)

    damaged = leaf(cut(tensor.clone(), case.mesh, case.placements))
    flipped = case.byte is not None and damaged.local.numel() > 0 and dist.get_rank() == case.victim
    at = None
    if flipped:
        assert case.byte is not None
        byte = case.byte % (damaged.local.numel() * width)
        damaged.local.view(-1).view(torch.uint8)[byte] ^= 1
        at = [int(i) for i in torch.unravel_index(places[byte // width], case.shape)]

    parts = everybody((places.tolist(), as_bytes(saved.local), as_bytes(damaged.local)))
    damaged_ranks = [rank for rank, (_, one, other) in enumerate(parts) if one != other]
    drifted = bool(damaged_ranks) and any(
        set(places) & set(parts[damaged_ranks[0]][0])
        and rank not in damaged_ranks
        and any_differs(parts[damaged_ranks[0]], each, width)
        for rank, each in enumerate(parts)
        for places in [each[0]]
    )

    group = dist.group.WORLD
    elsewhere = leaf(cut(tensor, case.other_mesh, case.other_placements))
    plain = {"w": TensorLeaf(tensor, whole(tensor), None)}
    together, complaints = digests_of_full({"w": damaged}, group)
    expected, _ = digests_of_full(plain, None)
    content, _ = digests_of_full({"w": saved}, group)
    return {
        "flipped": flipped,
        "at": at,
        "parts_differ": as_bytes(saved.local) != as_bytes(damaged.local),
        "drifted": drifted,
        "found": places_of(compare({"w": saved}, {"w": damaged})),
        "across": list(
            dict.fromkeys(found.name for found in compare_across({"w": elsewhere}, {"w": damaged}, group))
        ),
        "across_with_place": places_of(
            compare_across({"w": elsewhere}, {"w": damaged}, group, {"w": tensor}.get)
        ),
        "complains": bool(complaints),
        "digest_of_whole": bool(complaints) or together["w"] == expected["w"],
        "put_together": content["w"] == expected["w"],
    }


def places_of(found: list[Mismatch]) -> list[tuple[str, list[int], int]]:
    assert all(one.problem in (Problem.differs, Problem.replicas) for one in found)
    return [(one.name, one.facts["index"], one.facts["differing"]) for one in found]


def any_differs(
    one: tuple[list[int], bytes, bytes], other: tuple[list[int], bytes, bytes], width: int
) -> bool:
    """Return whether two ranks have different bytes for the same element."""
    theirs = {place: other[2][i * width : (i + 1) * width] for i, place in enumerate(other[0])}
    return any(
        place in theirs and theirs[place] != one[2][i * width : (i + 1) * width]
        for i, place in enumerate(one[0])
    )


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def cut(tensor: torch.Tensor, mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    return distribute_tensor(tensor, mesh_of(mesh), placements, src_data_rank=None)


def leaf(tensor: DTensor) -> TensorLeaf:
    return TensorLeaf(tensor.to_local().clone(), extent_of(tensor), str(tensor.placements))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def everybody(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
