"""What known defects make of a state is told from anything else, and how far it may be off: against what of
a tensor."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.verify import known_defects
from dcpbench.verify.compare import compare
from dcpbench.verify.known_defects import (
    NEVER_STEPPED,
    ONE_REPLICA,
    OWN_CHUNKS,
    SLICED_BY_SHARD,
    mark_expected,
    mark_never_stepped,
    mark_own_chunks,
    mark_replica,
    mark_sliced,
)
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.plain_read import StoredChunk
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf, digested


def by(marked: Iterable[Mismatch]) -> dict[str, str | None]:
    return {one.name: one.by for one in marked}


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    shards=st.integers(2, 3),
    large=st.booleans(),
    data=st.data(),
)
def test_what_slicing_by_tp_shards_makes_of_a_tensor_is_told(
    shape: list[int], shards: int, large: bool, data: st.DataObject
) -> None:
    """Cut by TP in any dimension and by FSDP1 anywhere; `large` parts of which digests are retained."""
    tensor = torch.rand(shape)
    dimension = data.draw(st.integers(0, len(shape) - 1))
    cuts = tensor.chunk(shards, dimension)
    rank = data.draw(st.integers(0, len(cuts) - 1))
    offset = [0] * len(shape)
    offset[dimension] = sum(cut.shape[dimension] for cut in cuts[:rank])
    start = data.draw(st.integers(0, cuts[rank].numel() - 1))
    numel = data.draw(st.integers(1, cuts[rank].numel() - start))
    extent = Extent(tuple(shape), tuple(offset), tuple(cuts[rank].shape), start, numel)
    own = slice(start, start + numel)

    flat = tensor.reshape(-1)
    again = torch.cat([flat[: cut.numel()].reshape(cut.shape) for cut in cuts], dimension)
    wrong = extent.take(tensor).clone()
    wrong[-1] = 2.0
    restored = {"once": flat[own], "again": again.reshape(-1)[own], "wrong": wrong}
    live = {name: TensorLeaf(extent.take(tensor), extent, None) for name in restored}
    saved = digested(live) if large else live
    actual: Leaves = {name: TensorLeaf(each, extent, None) for name, each in restored.items()}
    found = compare(saved, actual)
    expected = {one.name: None if one.name == "wrong" else SLICED_BY_SHARD for one in found}
    assert by(mark_sliced(found, saved, actual, lambda name: tensor, shards)) == expected
    others = tensor + 1, tensor.view(torch.int32), torch.cat([tensor, tensor]), None
    for other in others:
        marked = mark_sliced(found, saved, actual, lambda name, held=other: held, shards)  # type: ignore[misc]
        assert [*marked] == found, "the checkpoint does not hold what was saved"


def test_of_what_no_tp_shard_is_cut_out_nothing_is_a_slice() -> None:
    tensor = torch.arange(8.0)
    half, all_of_it = Extent((8,), (4,), (4,), 0, 4), Extent((8,), (0,), (8,), 4, 4)
    saved: Leaves = {
        "w": TensorLeaf(tensor[4:], half, None),
        "plain": TensorLeaf(tensor[4:], all_of_it, None),
    }
    saved |= {"nan": saved["w"], "lr": 0.1}
    actual: Leaves = {name: replace(saved[name], local=tensor[:4]) for name in ("w", "plain", "nan")}
    actual |= {"lr": 0.2}
    found = [
        replace(one, problem=Problem.nan) if one.name == "nan" else one for one in compare(saved, actual)
    ]
    marked = mark_sliced(found, saved, actual, lambda name: tensor, 2)
    assert by(marked) == {"w": SLICED_BY_SHARD, "plain": None, "nan": None, "lr": None}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("large", [False, True])
def test_what_any_replica_had_is_told(monkeypatch: pytest.MonkeyPatch, place: int, large: bool) -> None:
    """The peer whose values came back is the first, the second or the last rank."""

    def leaves(value: float) -> Leaves:
        tensor = torch.full((2,), value)
        leaf = TensorLeaf(tensor, whole(tensor), None)
        return {"first": leaf, "idle": Idle(leaf), "lr": value, "dtype": leaf, "none": leaf, "last": leaf}

    saved, actual = leaves(1.0), leaves(2.0)
    actual["none"] = replace(actual["none"], local=torch.full((2,), 3.0))

    def gathered(mine: object, group: object) -> list[object]:
        assert mine == {name: known_defects._digest(leaf) for name, leaf in saved.items()}
        peers = {name: known_defects._digest(leaf) for name, leaf in leaves(2.0).items()}
        ranks: list[object] = [mine, mine]
        ranks.insert(place, peers)
        return ranks

    monkeypatch.setattr(known_defects, "gathered", gathered)
    found = [
        replace(one, problem=Problem.dtype) if one.name == "dtype" else one for one in compare(saved, actual)
    ]
    assert len(found) == len(saved)
    marked = mark_replica(found, digested(saved) if large else saved, actual, None)
    told = dict.fromkeys(("first", "last"), ONE_REPLICA)
    assert by(marked) == dict.fromkeys(saved) | told


def test_what_is_not_found_beside_a_run_with_the_defect_is_by_it() -> None:
    beside = compare({"b": 1, "c": 1, "d": 1}, {"b": 2, "c": 2, "d": 2})
    found = compare(dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2))
    marked = mark_expected(found, "defect", lambda: beside)
    assert by(marked) == {"a": "defect", "b": None, "c": None, "d": None, "e": "defect"}


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    start=st.integers(0, 3),
    share=st.floats(0, 1),
    changed=st.booleans(),
    data=st.data(),
)
def test_what_a_load_of_ones_own_chunks_makes_of_a_part_is_told(
    shape: list[int], start: int, share: float, changed: bool, data: st.DataObject
) -> None:
    """A part anywhere in a tensor of which this rank has stored some boxes, which may overlap."""
    saved = torch.rand(shape) + 1
    size = saved.numel()
    start = min(start, size - 1)
    part = Extent(tuple(shape), (0,) * len(shape), tuple(shape), start, max(1, int(share * (size - start))))
    before = -torch.rand(part.numel) - 1
    expected, chunks = -torch.ones(shape) * 9, []
    expected.view(-1)[start : start + part.numel] = before
    for _ in range(data.draw(st.integers(0, 2))):
        offsets = [data.draw(st.integers(0, each - 1)) for each in shape]
        sizes = [data.draw(st.integers(1, each - at)) for each, at in zip(shape, offsets, strict=True)]
        box = tuple(slice(at, at + long) for at, long in zip(offsets, sizes, strict=True))
        expected[box] = saved[box]
        chunks.append(StoredChunk(tuple(offsets), tuple(sizes), saved[box].clone))
    local = part.take(expected).clone()
    if changed:
        local.view(-1)[data.draw(st.integers(0, part.numel - 1))] = 5
    was, here = {"w": TensorLeaf(before, part, None)}, {"w": TensorLeaf(local.view(-1), part, None)}
    found = [Mismatch("w", problem) for problem in (Problem.differs, Problem.replicas, Problem.nan)]
    asked: list[str] = []

    def own(name: str) -> list[StoredChunk]:
        asked.append(name)
        return chunks

    marks = [one.by for one in mark_own_chunks(found, was, here, own)]
    assert marks == [None if changed else OWN_CHUNKS] * 2 + [None]
    assert set(asked) == {"w"}
    assert torch.equal(before, was["w"].local), "what is retained stays"
    for unknown in ({}, {"w": digested(was)["w"]}):
        assert by(mark_own_chunks(found[:1], unknown, here, own)) == {"w": None}
    assert by(mark_own_chunks(found[:1], was, {}, own)) == {"w": None}


def test_a_list_of_the_same_for_a_tuple_is_known_and_no_other() -> None:
    saved = {"betas": (0.8, 0.9), "eps": (None, 1.0), "lr": [0.1], "weight": 1.0}
    actual = {"betas": [0.8, 0.9], "eps": [None, 2.0], "lr": (0.1,), "weight": 2.0}
    found = [Mismatch(name, Problem.value) for name in (*saved, "stranger")]
    marked = known_defects.mark_lists(found, saved, actual)
    assert {one.name: one.by for one in marked} == {
        **dict.fromkeys((*saved, "stranger")),
        "betas": known_defects.AS_LIST,
    }


@pytest.mark.parametrize(("restored", "by"), [(1.0, NEVER_STEPPED), (2.0, None)])
def test_an_idle_counter_of_one_step_is_marked(restored: float, by: str | None) -> None:
    def counter(value: float) -> Leaves:
        step = torch.tensor(value)
        return {"state.w.step": Idle(TensorLeaf(step, whole(step), None, "step"))}

    found = compare(counter(3.0), counter(restored))
    assert [one.by for one in mark_never_stepped(found, counter(restored))] == [by]
