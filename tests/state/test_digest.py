"""The digest against a loop over integers, for any cut; and every small change is detected."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.state import digest as module
from dcpbench.state.digest import Digest, add, digest, digests_as_integers
from dcpbench.state.layout import Extent, whole
from state.triton_in_numpy import Triton

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def philox(word: int, low: int, key: int, rounds: int) -> tuple[int, int]:
    for _ in range(rounds):
        high, word_low = divmod(word * 0xD256D193, 2**32)
        word, low = high ^ low ^ key, word_low
        key = (key + 0x9E3779B9) % 2**32
    return word, low


def reference(tensor: torch.Tensor) -> Digest:
    size = min(4, tensor.element_size())
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    words = [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]
    return mixed(words, range(len(words)))


def mixed(words: Sequence[int], numbers: Sequence[int]) -> Digest:
    lanes = [0, 0]
    for word, number in zip(words, numbers, strict=True):
        for lane, rounds in enumerate((5, 7)):
            right, left = philox(word, number % 2**32, number // 2**32, rounds)
            lanes[lane] = (lanes[lane] + (left << 32) + right) % 2**64
    return lanes[0], lanes[1]


def of(part: torch.Tensor, extent: Extent | None = None) -> Digest:
    return digests_as_integers([digest(part, extent or whole(part))])[0]


def random(shape: list[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return random bits, including NaNs of every kind."""
    width = torch.empty(0, dtype=dtype).element_size()
    size = (math.prod(shape), width)
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.reshape(-1).view(dtype).reshape(shape)


def grid(tensor: torch.Tensor, ways: list[int]) -> list[tuple[torch.Tensor, Extent]]:
    """Return boxes as of a DTensor on a mesh with the tensor's dimensions; some can be empty."""
    borders = []
    for size, count in zip(tensor.shape, ways, strict=True):
        step = -(-size // count)
        borders.append(list(pairwise(min(size, step * one) for one in range(count + 1))))
    held = []
    for ranges in product(*borders):
        part = tensor[tuple(slice(begin, end) for begin, end in ranges)]
        offset = tuple(begin for begin, _ in ranges)
        held.append((part, Extent(tuple(tensor.shape), offset, tuple(part.shape), 0, part.numel())))
    return held


def flat(part: torch.Tensor, extent: Extent, cuts: list[int]) -> list[tuple[torch.Tensor, Extent]]:
    """Return parts of a box as of FSDP1."""
    ends = [0, *sorted(cut % (part.numel() + 1) for cut in cuts), part.numel()]
    return [
        (part.reshape(-1)[begin:end], Extent(extent.shape, extent.offset, extent.box, begin, end - begin))
        for begin, end in pairwise(ends)
    ]


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4)


def test_mix_equals_reference_philox() -> None:
    """Three of the known answers that Random123 publishes for philox2x32 with seven rounds."""
    assert philox(0, 0, 0, 7) == (0x257A3673, 0xCD26BE2A)
    assert philox(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 7) == (0xAB302C4D, 0x3DC9D239)
    assert philox(0x243F6A88, 0x85A308D3, 0x13198A2E, 7) == (0xBEDBBE6B, 0xE4C770B3)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9), data=st.data())
def test_digests_of_parts_add_up(
    shape: list[int], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = random(shape, dtype, seed)
    expected = reference(tensor)
    assert of(tensor) == expected
    boxes = grid(tensor, [data.draw(st.integers(1, 4)) for _ in shape])
    assert add(*(of(part, extent) for part, extent in boxes)) == expected
    assert add(*(of(part.contiguous(), extent) for part, extent in boxes)) == expected
    cuts = data.draw(st.lists(st.integers(0, 1300), max_size=4))
    pieces = [piece for box in boxes for piece in flat(*box, cuts)]
    assert add(*digests_as_integers([digest(part, extent) for part, extent in pieces])) == expected
    turned = data.draw(st.permutations(range(len(shape))))
    in_order = [
        (piece, replace(extent, order=tuple(turned)))
        for box, whole in boxes
        for piece, extent in flat(box.permute(turned), whole, cuts)
    ]
    assert add(*digests_as_integers([digest(part, extent) for part, extent in in_order])) == expected
    strided = tensor.permute(turned).contiguous().permute([turned.index(one) for one in range(len(shape))])
    assert of(strided) == expected


@settings(deadline=None, max_examples=60)
@given(
    runs=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 9)), min_size=1, max_size=4),
    width=st.sampled_from([torch.uint8, torch.uint16, torch.uint32]),
    base=st.sampled_from([0, 5, 2**32 - 70, 2**40 - 3]),
    data=st.data(),
)
def test_words_are_numbered_in_the_full_tensor(
    runs: list[tuple[int, int]], width: torch.dtype, base: int, data: st.DataObject
) -> None:
    """Also if numbers exceed 32 bits, for tensors that do not fit into memory."""
    sizes = tuple(size for size, _ in runs)
    strides = tuple(accumulate((size + gap for size, gap in runs), lambda one, other: one * other, initial=1))
    place = module._Place(base, sizes, strides[:-1], True)
    first = data.draw(st.integers(0, math.prod(sizes) - 1))
    count = data.draw(st.integers(0, min(200, math.prod(sizes) - first)))
    words = random([count], width)
    numbers = []
    for rest in range(first, first + count):
        number = base
        for size, stride in zip(sizes[:-1], place.strides[:-1], strict=True):
            rest, digit = divmod(rest, size)
            number += digit * stride
        numbers.append(number + rest * place.strides[-1])
    assert digests_as_integers([module._eager(words, first, place)]) == [mixed(words.tolist(), numbers)]


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Triton]:
    stand_in = Triton()
    monkeypatch.setitem(sys.modules, "triton", stand_in.module)
    monkeypatch.setitem(sys.modules, "triton.language", stand_in.language)
    module._kernel.cache_clear()
    yield stand_in
    module._kernel.cache_clear()


@pytest.mark.parametrize(
    ("width", "base"),
    [(torch.uint8, 0), (torch.uint16, 5), (torch.uint32, 2**32 - 70), (torch.uint8, 2**40 - 3)],
)
def test_kernel_equals_torch_operations(triton: Triton, width: torch.dtype, base: int) -> None:
    """One level and two, complete tiles and parts of them, rows that begin within a tile."""
    levels: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((10**6,), (1,))]
    levels += [((run, 10**6), (1, 3 * run)) for run in (1, 3, 16, 48, 50)]
    wanted = 0
    for (sizes, strides), first, count in product(levels, (0, 19), (1, 16, 96, 131)):
        words = random([count], width, seed=count)
        place = module._Place(base, sizes, strides, base + 3 * (first + count + 50) > 2**32)
        found = module._triton(words, first, place, tile=16)
        assert torch.equal(found, module._eager(words, first, place)), (sizes, first, count)
        wanted += 1
    assert len(triton.launched) == wanted


def test_program_walks_down_its_column(triton: Triton) -> None:
    words = random([3 * 2049 * 4], torch.uint8)
    place = module._Place(7, (2049 * 4, 9), (1, 10**5), False)
    assert torch.equal(module._triton(words, 0, place, tile=4), module._eager(words, 0, place))
    assert triton.launched == [2049]


@pytest.mark.parametrize(("sizes", "count"), [((2, 3, 2), 9), ((5,), 0), ((0, 3), 0), ((2**42, 3), 5)])
def test_eager_replaces_an_unusable_kernel(triton: Triton, sizes: tuple[int, ...], count: int) -> None:
    strides = (1, 2**43, 2**44)[: len(sizes)]
    words, place = random([count], torch.uint8), module._Place(3, sizes, strides, True)
    assert torch.equal(module._triton(words, 1, place), module._eager(words, 1, place))
    assert triton.launched == []


def test_kernel_needs_cuda_and_triton(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert (module._mix(cuda), module._mix(cpu)) == (module._triton, module._eager)
    monkeypatch.setitem(sys.modules, "triton", None)
    module._kernel.cache_clear()
    assert (module._mix(cuda), module._mix(cpu)) == (module._eager, module._eager)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("count", [2**16 - 1, 2**16, 2**16 + 1, 2**17 + 77])
def test_chunk_borders_are_covered(count: int, offset: int) -> None:
    tensor = random([count + offset], torch.int16)
    extent = Extent((count + offset,), (offset,), (count,), 0, count)
    cuts = [1, 2**15 + 3, 2**16, count - 1]
    parts = digests_as_integers([digest(*piece) for piece in flat(tensor[offset:], extent, cuts)])
    assert of(tensor[offset:], extent) == add(*parts)
    before = Extent((count + offset,), (0,), (offset,), 0, offset)
    assert of(tensor) == add(of(tensor[:offset], before), *parts)


@pytest.mark.parametrize("first", [0, 2**32 - 2, 2**32 + 5, 2**33 - 4])
def test_part_of_a_huge_tensor(first: int) -> None:
    words = torch.tensor([1, 2, 3, 2**31 - 1], dtype=torch.int32)
    expected = mixed(words.tolist(), range(first, first + 4))
    assert of(words, Extent((2**33,), (first,), (4,), 0, 4)) == expected
    assert of(words, Extent((2**33,), (0,), (2**33,), first, 4)) == expected
    assert module._place(Extent((2**32,), (0,), (4,), 0, 4), 1).wide is False


def test_copies_are_made_in_chunks() -> None:
    tensor = torch.arange(2 * 400 * 500, dtype=torch.int32).reshape(2, 400, 500)
    for part in (tensor[:1, :, ::2], tensor[:, :, :450], tensor[:, ::2].transpose(0, 2)):
        pieces = [*module._contiguous(part)]
        assert max(piece.numel() for _, piece in pieces) <= module._CHUNK["cpu"]
        assert [begin for begin, _ in pieces] == [0, *accumulate(piece.numel() for _, piece in pieces)][:-1]
        assert torch.equal(torch.cat([piece for _, piece in pieces]), part.reshape(-1))
    ((begin, piece),) = module._contiguous(tensor)
    assert (begin, piece.data_ptr()) == (0, tensor.data_ptr()), "it is no copy"


def test_levels_of_rows_and_columns() -> None:
    assert len(module._place(Extent((8, 4, 6), (2, 0, 0), (3, 4, 6), 0, 72), 1).sizes) == 1
    assert len(module._place(Extent((8, 4, 6), (2, 0, 3), (3, 4, 3), 0, 36), 1).sizes) == 2
    assert len(module._place(Extent((8, 4, 6), (2, 2, 0), (3, 2, 6), 0, 36), 2).sizes) == 2
    assert len(module._place(Extent((8, 4, 6), (2, 2, 3), (3, 2, 3), 0, 18), 1).sizes) == 3
    assert len(module._place(Extent((8, 4, 6), (2, 2, 3), (1, 1, 3), 0, 3), 1).sizes) == 1 + 1


@settings(deadline=None, max_examples=100)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), at=st.integers(0, 10**6), bit=st.integers(0, 127))
def test_flipped_bit_changes_both_lanes(shape: list[int], dtype: torch.dtype, at: int, bit: int) -> None:
    tensor = random(shape, dtype)
    before = of(tensor)
    width = tensor.element_size()
    flipped = tensor.reshape(-1).view(torch.uint8).clone()
    bit = 0 if dtype == torch.bool else bit % (8 * width)
    flipped[at % tensor.numel() * width + bit // 8] ^= 1 << bit % 8
    after = of(flipped.view(dtype).reshape(shape))
    assert before[0] != after[0]
    assert before[1] != after[1]


@settings(deadline=None, max_examples=100)
@given(shape=shapes, one=st.integers(0, 10**6), other=st.integers(0, 10**6), seed=st.integers(0, 9))
def test_swapped_elements_change_both_lanes(shape: list[int], one: int, other: int, seed: int) -> None:
    tensor = random(shape, torch.bfloat16, seed)
    swapped = tensor.clone().reshape(-1)
    one, other = one % tensor.numel(), other % tensor.numel()
    swapped[[one, other]] = swapped[[other, one]]
    same = torch.equal(swapped.view(torch.int16), tensor.reshape(-1).view(torch.int16))
    for before, after in zip(of(tensor), of(swapped.reshape(shape)), strict=True):
        assert (before == after) == same


def test_lazy_views_are_resolved() -> None:
    tensor = random([5, 3], torch.complex64)
    assert of(tensor.conj()) == of(tensor.conj().resolve_conj()) != of(tensor)
    assert of(tensor.conj().imag) == of(tensor.conj().imag.clone())


@pytest.mark.parametrize("extent", [Extent((2, 3), (0,), (2, 3), 0, 6), Extent((2, 3), (0, 0), (6,), 0, 6)])
def test_extent_with_other_dimensions_is_refused(extent: Extent) -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        digest(torch.zeros(6), extent)


def test_empty_part_has_digest_zero() -> None:
    assert of(torch.empty(0, 3)) == add() == (0, 0)
    assert digests_as_integers([]) == []
    with pytest.raises(ValueError, match="3 elements cannot fill an extent of 4"):
        digest(torch.zeros(3), whole(torch.zeros(4)))
