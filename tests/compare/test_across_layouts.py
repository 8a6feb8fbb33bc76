"""Comparison by digests: equal content is equal, and differences are found."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.compare import across_layouts
from dcpbench.compare.across_layouts import _add_up, compare_across, digests_of_full, gathered_values
from dcpbench.compare.leaves import TensorReader, compare
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.sentences import describe
from dcpbench.state import snapshot
from dcpbench.state.layout import Extent, whole
from dcpbench.state.snapshot import DigestedLeaf, Leaves, TensorLeaf, digested


def leaf(tensor: torch.Tensor) -> TensorLeaf:
    return TensorLeaf(tensor, whole(tensor), None)


def described(finding: Mismatch | None) -> str:
    return describe(finding) if finding else ""


def part(tensor: torch.Tensor, extent: Extent) -> DigestedLeaf:
    return digested({"w": TensorLeaf(tensor, extent, None, "param")})["w"]


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), cut=st.integers(0, 5), at=st.integers(0, 999)
)
def test_every_cut_has_the_digest_of_the_full_tensor(shape: list[int], cut: int, at: int) -> None:
    tensor = torch.rand(shape)
    rows = min(cut, shape[0])
    zeros = (0,) * (len(shape) - 1)
    parts = {}
    for rank, (begin, end) in enumerate([(0, rows), (rows, shape[0])]):
        piece = tensor[begin:end]
        extent = Extent(tuple(shape), (begin, *zeros), tuple(piece.shape), 0, piece.numel())
        parts[rank] = part(piece, extent)
    together, wrong = _add_up("w", parts)
    assert wrong is None
    assert together.blocks == part(tensor, whole(tensor)).blocks
    changed = tensor.clone().view(-1)
    changed.view(torch.int32)[at % changed.numel()] ^= 1
    assert part(changed.reshape(shape), whole(tensor)).blocks != together.blocks


def test_replicas_and_holes_are_reported() -> None:
    tensor = torch.rand(4, 2)
    same = part(tensor, whole(tensor))
    assert _add_up("w", {0: same, 1: same})[1] is None
    drifted = part(tensor + 1, whole(tensor))
    together, told = _add_up("w", {0: same, 1: drifted})
    assert "rank 0 and rank 1 have different bits" in described(told)
    assert isinstance(together, DigestedLeaf), "what a stage hands over to the next"
    half = part(tensor[:2], Extent((4, 2), (0, 0), (2, 2), 0, 4))
    assert described(_add_up("w", {0: half, 1: half})[1]) == "the ranks have 4 of 8 elements"


def test_tensor_and_number_under_one_name_disagree() -> None:
    tensor = part(torch.rand(4), whole(torch.empty(4)))
    for parts in ({0: tensor, 1: 5}, {0: 5, 1: tensor}):
        held = {rank: "a tensor of torch.float32" if one is tensor else "5" for rank, one in parts.items()}
        together, wrong = _add_up("w", parts)
        assert together is parts[0]
        assert described(wrong) == f"rank 0 has {held[0]}, rank 1 has {held[1]}"


def test_only_names_of_a_group_are_joined() -> None:
    """Stages of a pipeline have other parameters; an object of a user may have anything under such a name."""
    for mine, other in (([["a"]], [["b"]]), (3, 4), ("a", "b"), (["a"], 4), (None, ["b"])):
        assert _add_up(("counted", "params"), {0: mine, 1: mine}) == (mine, None)
        assert _add_up(("counted", "params"), {0: mine, 1: other})[1] is not None
    assert _add_up(("param_groups", 10, "params"), {0: ["a"], 1: ["b"]}) == (["a", "b"], None)
    assert _add_up(("param_groups", 10, "params"), {0: ["a"], 1: 3})[1] is not None


ONES, ZEROS = torch.ones(2, 3), torch.zeros(2, 3)
OTHER = torch.tensor([[1.0, 1, 1], [1, 2, 1]])
NAN = torch.full((2, 3), float("nan"))
HOLDS = {"ones": {"w": ONES}.get, "zeros": {"w": ZEROS}.get, "nothing": {}.get, "no checkpoint": None}
AT_5 = "index [1, 1]: saved 1.0 (0x3f800000), restored 2.0 (0x40000000)"
DRIFTED = "replicas differ: rank 0 and rank 1 have different bits for the same part"
CORRUPT = "; the checkpoint itself differs from the saved state"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two threads as ranks; the number of a thread replaces its group."""
    barrier, values = threading.Barrier(2), [None, None]

    def exchanged(value: Any, rank: int) -> list[Any]:
        values[rank] = value
        barrier.wait(20)
        everybody = values.copy()
        barrier.wait(20)
        return everybody

    monkeypatch.setattr(across_layouts, "gathered_values", exchanged)
    monkeypatch.setattr(across_layouts.dist, "get_rank", lambda rank: rank)


def across(saved: Leaves, restored: list[Leaves], read_saved: TensorReader | None) -> list[list[str]]:
    """Return the mismatches that each rank reports."""

    def rank(number: int) -> list[str]:
        found = compare_across(saved, restored[number], number, read_saved)  # type: ignore[arg-type]
        return [f"{one.name} {one.problem} {describe(one)}" for one in found]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.parametrize(
    ("held", "restored", "told"),
    [
        ("ones", (ONES, ONES), ([], [])),
        ("nothing", (ONES, ONES), ([], [])),
        ("ones", (OTHER, OTHER), ([f"differs {AT_5}; 1 of 6 elements differ, by at most 1"],) * 2),
        ("ones", (OTHER, ONES), ([f"replicas replicas differ: {AT_5}"], [])),
        ("ones", (ONES, OTHER), ([], [f"replicas replicas differ: {AT_5}"])),
        ("zeros", (OTHER, ONES), ([f"replicas {DRIFTED}{CORRUPT}"],) * 2),
        ("zeros", (ONES, OTHER), ([f"replicas {DRIFTED}{CORRUPT}"],) * 2),
        ("nothing", (OTHER, ONES), ([f"replicas {DRIFTED}"],) * 2),
        ("no checkpoint", (ONES, OTHER), ([f"replicas {DRIFTED}"],) * 2),
        ("no checkpoint", (OTHER, ONES), ([f"replicas {DRIFTED}"],) * 2),
        ("no checkpoint", (OTHER, OTHER), (["digests_differ its digests differ"],) * 2),
    ],
)
@pytest.mark.usefixtures("threads")
def test_each_rank_reports_its_part(
    held: str, restored: tuple[torch.Tensor, torch.Tensor], told: tuple[list[str], list[str]]
) -> None:
    found = across({"w": leaf(ONES)}, [{"w": leaf(each)} for each in restored], HOLDS[held])
    assert found == [[f"w {one}" for one in each] for each in told]


@pytest.mark.usefixtures("threads")
def test_replicas_of_unsaved_names_are_compared() -> None:
    read_saved = {"v": ONES}.get
    restored: list[Leaves] = [{"v": leaf(ONES), "w": leaf(each)} for each in (ONES, OTHER)]
    told = [f"w replicas {DRIFTED}", "w unexpected not saved, but restored"]
    assert across({"v": leaf(ONES)}, restored, read_saved) == [told] * 2
    restored = [{"v": leaf(each.T)} for each in (ONES, OTHER)]
    told = [f"v replicas {DRIFTED}", "v shape global shape: saved (2, 3), restored (3, 2)"]
    assert across({"v": leaf(ONES)}, restored, read_saved) == [told] * 2


@pytest.mark.usefixtures("threads")
def test_content_of_each_rank_is_compared() -> None:
    """A tensor that differed by rank in an earlier stage has to differ in the same way."""

    def full(rank: int) -> Leaves:
        return digests_of_full({"w": leaf((ONES, OTHER)[rank])}, rank)[0]  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        saved, same = pool.map(full, range(2))
    assert saved == same
    for restored, equal in (((ONES, OTHER), True), ((OTHER, ONES), False), ((ONES, NAN), False)):
        found = across(saved, [{"w": leaf(each)} for each in restored], None)
        assert (found == [[], []]) is equal, found


def test_unlocated_mismatch_is_reported_as_is() -> None:
    """Of half a tensor that is as it was the digest differs all the same, and of a part that is not the rest
    is still not held."""
    half = Extent((2, 3), (0, 0), (1, 3), 0, 3)
    uncovered, digests_differ, differs = (("w", each) for each in ("uncovered", "digests_differ", "differs"))
    for part, told in ((ONES[:1], [uncovered, digests_differ]), (ONES[:1] + 1, [differs, uncovered])):
        restored = {"w": TensorLeaf(part, half, None), "lr": 0.2}
        found = compare_across({"w": leaf(ONES), "lr": 0.1}, restored, None, {"w": ONES}.get)
        assert [(one.name, one.problem) for one in found] == [*told, ("lr", "value")]


def test_every_rank_contributes() -> None:
    assert gathered_values("mine", None) == ["mine"]
    dist.init_process_group("fake", rank=1, world_size=3)  # the others have whatever this one has
    try:
        assert gathered_values("mine", dist.group.WORLD) == ["mine"] * 3
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("drifted", [None, 0, 1])
def test_replicas_have_the_same_bits(threads: None, drifted: int | None) -> None:
    """A name without a replica is not compared."""
    cut = [Extent((4, 2), (2 * rank, 0), (2, 2), 0, 4) for rank in range(2)]
    empty = Extent((4, 2), (4, 0), (0, 2), 0, 0)

    def compared(rank: int) -> Compared:
        tensor = torch.arange(8.0).view(4, 2)
        other = tensor.clone()
        other.view(torch.int32)[2, 1] ^= rank == drifted
        leaves: Leaves = {
            "w": TensorLeaf(other, whole(other), None, "param"),
            "scalar": leaf(torch.tensor(2.0)),
            "shard": TensorLeaf(cut[rank].take(tensor), cut[rank], None),
            "on one rank": TensorLeaf(tensor, whole(tensor), None)
            if rank
            else TensorLeaf(tensor[4:], empty, None),
        }
        if rank:
            leaves["alone"] = leaf(tensor)
        return across_layouts.compare_replicas(leaves, rank)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        results = [one.result(60) for one in [pool.submit(compared, rank) for rank in range(2)]]
    for result in results:
        assert result.detected == {"w": True, "scalar": True}, "a bit that one rank has otherwise is reported"
        assert [(one.name, one.problem) for one in result.found] == (
            [] if drifted is None else [("w", Problem.replicas)]
        )


def test_disagreeing_values_are_reported() -> None:
    assert _add_up("w", {0: 0.1, 1: 0.1}) == (0.1, None)
    assert described(_add_up("w", {0: 0.1, 3: 0.2})[1]) == "rank 0 has 0.1, rank 3 has 0.2"
    kinds = enumerate((torch.ones(2), torch.ones(2, dtype=torch.int32)))
    _, wrong = _add_up("w", {rank: part(tensor, whole(tensor)) for rank, tensor in kinds})
    assert described(wrong).startswith("the ranks do not agree on shape and dtype")


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_full_digest_is_compared_with_a_part_of_any_size(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an empty part, and with one of several blocks."""
    monkeypatch.setattr(snapshot, "BLOCK", 4)
    tensor = torch.arange(2.0 * rows).reshape(rows, 2)
    full, _ = digests_of_full({"w": leaf(tensor)}, None)
    assert compare(full, {"w": leaf(tensor)}) == []
    if rows:
        assert [one.name for one in compare(full, {"w": leaf(tensor + 1)})] == ["w"]
