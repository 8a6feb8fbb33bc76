"""Full tensors from the parts of four real ranks: cut flat as by FSDP1, unevenly, or not at all."""

from collections.abc import Iterable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dcpbench.compare import whole_tensors
from dcpbench.compare.whole_tensors import Exchange, Parts, assembled, real_elements, summed
from dcpbench.state.layout import Extent, whole
from dcpbench.state.snapshot import EmptyShard, Leaves, TensorLeaf
from support.gloo_ranks import WORLD_SIZE, Ask

SHAPE = (5, 3)
EXPECTED = torch.arange(15.0).reshape(SHAPE)
COLUMNS = Extent(SHAPE, (0, 1), (5, 2), 0, 10)
"""A shard of tensor parallelism: two columns of three."""


def flat(begin: int, end: int, box: Extent | None = None) -> Extent:
    """Some elements of a flattened tensor, or of a flattened shard of it."""
    inside = box or whole(EXPECTED)
    return Extent(SHAPE, inside.offset, inside.box, begin, end - begin)


def rows(begin: int, end: int) -> Extent:
    return Extent(SHAPE, (begin, 0), (end - begin, 3), 0, 3 * (end - begin))


LAYOUTS = {
    "flat": [flat(0, 4), flat(4, 8), flat(8, 12), flat(12, 15)],
    "uneven": [rows(0, 2), rows(2, 4), rows(4, 5), rows(5, 5)],
    "one has all": [flat(0, 0), flat(0, 15), flat(0, 0), flat(0, 0)],
    "replicas": [whole(EXPECTED)] * 4,
    "replicas of shards": [rows(0, 2), rows(2, 5), rows(0, 2), rows(2, 5)],
    "flat shards": [
        flat(0, 3, COLUMNS),
        flat(3, 10, COLUMNS),
        Extent(SHAPE, (0, 0), (5, 1), 0, 2),
        Extent(SHAPE, (0, 0), (5, 1), 2, 3),
    ],
}


def here() -> Exchange:
    return Exchange(dist.group.WORLD)


def part(tensor: torch.Tensor, extents: Iterable[Extent]) -> TensorLeaf:
    extent = [*extents][dist.get_rank()]
    return TensorLeaf(extent.take(tensor), extent, None, "param")


def gathered(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every layout together, for a dtype, with a part on one rank only and values that are not tensors."""
    tensor = EXPECTED.to(dtype)
    leaves: Leaves = {name: part(tensor, extents) for name, extents in LAYOUTS.items()}
    leaves |= {"lr": 0.1, "step": EmptyShard(leaves["flat"])}
    if dist.get_rank() == 2:
        leaves["alone"] = TensorLeaf(torch.tensor(7.0), whole(torch.tensor(7.0)), None)
    return assembled(leaves, here())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.bool]
)
def test_parts_of_any_layout_are_assembled(ask: Ask, dtype: torch.dtype) -> None:
    for found in ask(gathered, dtype):
        assert found.keys() == {*LAYOUTS, "alone"}
        assert (found.pop("alone").item(), found["flat"].dtype) == (7.0, dtype)
        for name, one in found.items():
            assert one.dtype == dtype
            assert torch.equal(one.to(torch.complex64), EXPECTED.to(dtype).to(torch.complex64)), name


def several_times() -> list[dict[str, list[float]]]:
    """The same parts with other values, then without the parts of some ranks."""
    rank, extents = dist.get_rank(), LAYOUTS["flat"]
    parts = Parts({"w": (extents[rank], torch.float32), "b": (extents[rank], torch.float32)}, here())
    assert not parts.complete
    found = []
    for factor, names in ((2, ("w", "b")), (3, ("w",)), (4, ("w", "b") if rank == 1 else ())):
        mine = {name: extents[rank].take(EXPECTED * factor) for name in names}
        found.append({name: one.view(-1).tolist() for name, one in parts.gather(mine).items()})
    return found


def test_parts_can_be_gathered_repeatedly(ask: Ask) -> None:
    twice, thrice = ((EXPECTED * factor).view(-1).tolist() for factor in (2, 3))
    of_one = [4.0 * value if 4 <= value < 8 else 0.0 for value in range(15)]
    for found in ask(several_times):
        assert found == [{"w": twice, "b": twice}, {"w": thrice}, {"w": of_one, "b": of_one}]


def own_replica() -> tuple[bool, float, float]:
    """Each rank has a different value: some full tensors, and replicas of shards."""
    rank = dist.get_rank()
    mine = torch.full(SHAPE, float(rank))
    complete = Parts({"w": (whole(mine), mine.dtype)}, here())
    extent = LAYOUTS["replicas of shards"][rank]
    shards = Parts({"w": (extent, mine.dtype)}, here())
    assert not shards.complete
    of_shard = shards.gather({"w": extent.take(mine)})["w"]
    return complete.complete, float(complete.gather({"w": mine})["w"].mean()), float(extent.take(of_shard)[0])


def test_rank_gets_its_own_replica(ask: Ask) -> None:
    assert ask(own_replica) == [(True, float(rank), float(rank)) for rank in range(WORLD_SIZE)]


def named_alike() -> dict[str, tuple[int, ...]]:
    """Like stages of a pipeline that number their layers from 1."""
    mine = torch.ones(2 if dist.get_rank() < 2 else 3, 5)
    parts = {"w": mine, "b": EXPECTED}
    leaves = {name: TensorLeaf(value, whole(value), None) for name, value in parts.items()}
    return {name: tuple(value.shape) for name, value in assembled(leaves, here()).items()}


def test_conflicting_shapes_are_left_out(ask: Ask) -> None:
    assert ask(named_alike) == [{"b": SHAPE}] * WORLD_SIZE


def sums(names: list[str], absent: str) -> list[tuple[str, bool, list[list[float]]]]:
    """Two terms for each name on each rank; one name on one rank only, one on none."""
    rank = dist.get_rank()
    values = torch.full((3,), 1e9 + rank, dtype=torch.float64)
    terms = {name: [torch.full((3,), rank + 1.0), values] for name in names}
    del terms[absent]
    if rank != 3:
        del terms[names[0]]
    shapes = dict.fromkeys(names, 3) | {names[-1]: 0}
    terms[names[-1]] = [torch.empty(0)] * 2
    return [
        (name, present, [one.tolist() for one in found])
        for name, present, found in summed(names, terms, shapes, 2, here())
    ]


def test_terms_are_summed_over_ranks(ask: Ask) -> None:
    expected = [
        ("one rank's", True, [[4.0] * 3, [1e9 + 3] * 3]),
        ("everybody's", True, [[10.0] * 3, [4e9 + 6] * 3]),
        ("nobody's", False, [[0.0] * 3] * 2),
        ("empty", True, []),
    ]
    for found in ask(sums, [name for name, _, _ in expected], "nobody's"):
        assert found == expected, "float32 has no 4e9 + 6"


def in_chunks() -> tuple[list[float], list[int]]:
    """Return sums of enough elements for several all-reduces, and how many elements each of these had."""
    names = [str(number) for number in range(7)]
    terms = {name: [torch.full((5,), float(name))] for name in names}
    with (
        mock.patch.object(whole_tensors, "_CHUNK", 10),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
    ):
        sums = [*summed(names, terms, dict.fromkeys(names, 5), 1, here())]
    return [float(total.mean()) for _, _, (total,) in sums], [
        call.args[0].numel() for call in all_reduce.call_args_list
    ]


def test_many_tensors_are_summed_in_chunks(ask: Ask) -> None:
    pair, last = 2 * (5 + 1), 5 + 1
    expected = [4.0 * number for number in range(7)], [pair, pair, pair, last]
    assert ask(in_chunks) == [expected] * WORLD_SIZE


def test_single_rank_needs_no_group() -> None:
    alone = Exchange(None)
    leaf = TensorLeaf(EXPECTED, whole(EXPECTED), None)
    assert torch.equal(assembled({"w": leaf, "lr": 1}, alone)["w"], EXPECTED)
    cut = flat(4, 8)
    found = assembled({"w": TensorLeaf(cut.take(EXPECTED), cut, None)}, alone)["w"]
    assert found.view(-1).tolist() == [float(value) if 4 <= value < 8 else 0.0 for value in range(15)]
    ((name, present, (total,)),) = summed(["w"], {"w": [EXPECTED]}, {"w": 15}, 1, alone)
    assert (name, present, total.tolist()) == ("w", True, EXPECTED.view(-1).tolist())


def test_real_elements_are_a_copy() -> None:
    one = torch.tensor([[1 + 2j, 3 - 4j]])
    assert real_elements(one).tolist() == [1.0, 2.0, 3.0, -4.0]
    assert real_elements(one.conj()).tolist() == [1.0, -2.0, 3.0, 4.0]
    half = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    assert real_elements(half).dtype == torch.float64
    assert real_elements(half).tolist() == [1.5, 2.5]
