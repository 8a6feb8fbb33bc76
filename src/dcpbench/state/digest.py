"""A 128-bit digest of a tensor's content that does not depend on how the tensor is sharded.

The digest is a sum over the tensor, so that the digests of disjoint parts `add` up to the digest of the full
tensor. Each term mixes a position with the content there: the tensor is a row of words, numbered in row-major
order of the full tensor. An element of 1, 2 or 4 bytes is one word, zero-extended to 32 bits; wider and
complex elements are two or four little-endian words. Shape and dtype are not part of the digest.

The mix is Philox2x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): the
counter is (word, low half of its number), the key the high half. The first lane is the 64-bit state
after 5 rounds, the second the state after 7. For a given place each lane is a bijection of the word:
one changed word is never missed. Seven rounds are what the paper found to withstand every test;
with fewer than five, the changes that swaps, shifts and flipped bits make in a lane do not look like
random ones. A round is one 32 x 32 -> 64 bit multiplication and one three-way xor.

There are two implementations with the same results: torch operations for any device, and a Triton
kernel for CUDA. The digest is not cryptographic: collisions can be constructed.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch

from dcpbench.state.layout import Extent

Digest = tuple[int, int]
"""Two lanes, each an unsigned 64-bit integer."""

ROUNDS = (5, 7)
_MULTIPLIER, _WEYL, _LOW = 0xD256D193, 0x9E3779B9, 0xFFFFFFFF
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_CHUNK = {"cpu": 2**16, "cuda": 2**20}
"""Elements mixed at a time in torch operations: they fit the cache of a CPU, and fill a GPU."""


def digest(part: torch.Tensor, extent: Extent) -> torch.Tensor:
    """Return the digest of a part, of any shape and strides, with `extent.numel` elements.

    The result has shape (2,) and dtype int64, on the part's device, with the bits of the unsigned lanes. It
    does not synchronize with the device; `digests_as_integers` converts many results to integers at once.
    """
    if part.numel() != extent.numel:
        raise ValueError(f"a part of {part.numel()} elements cannot fill an extent of {extent.numel}")
    total = torch.zeros(2, dtype=torch.int64, device=part.device)
    size = min(part.element_size(), 4)
    per_element = part.element_size() // size
    place = _place(extent, per_element)
    mix = _mix(part.device)
    for begin, piece in _contiguous(part.detach()):
        words = piece.resolve_conj().resolve_neg().view(_WORDS[size])
        total += mix(words, (extent.start + begin) * per_element, place)
    return total


def digests_as_integers(digests: Sequence[torch.Tensor]) -> list[Digest]:
    """Convert results of `digest` to integers, with one transfer per device."""
    integers: list[Digest] = [(0, 0)] * len(digests)
    for device in {lane_pair.device for lane_pair in digests}:
        here = [number for number, lane_pair in enumerate(digests) if lane_pair.device == device]
        lanes = torch.stack([digests[number] for number in here]).tolist()
        for number, (first, second) in zip(here, lanes, strict=True):
            integers[number] = (first % 2**64, second % 2**64)
    return integers


def add(*digests: Digest) -> Digest:
    """Return the digest of a tensor from the digests of its disjoint parts."""
    return sum(first for first, _ in digests) % 2**64, sum(second for _, second in digests) % 2**64


@dataclass(frozen=True)
class _Place:
    """The position of a box's words in the full tensor. With k written as digits to the bases `sizes`, lowest
    first, word k of the box is word `base` + sum(digits * `strides`) of the full tensor."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    wide: bool  # word numbers of the full tensor exceed 32 bits


def _place(extent: Extent, per_element: int) -> _Place:
    """Return the position of an extent's box. Dimensions that the box covers completely are joined with the
    one before them: one level remains if only the first dimension is cut, two if another one is."""
    base, words = 0, math.prod(extent.shape) * per_element
    sizes, strides = [per_element], [1]
    ranges = [*zip(extent.box, extent.offset, extent.shape, strict=True)]
    for dimension in reversed(extent.order or range(len(ranges))):
        size, begin, _ = ranges[dimension]
        stride = math.prod(extent.shape[dimension + 1 :]) * per_element
        base += begin * stride
        if stride == sizes[-1] * strides[-1]:
            sizes[-1] *= size
        elif sizes[-1] == 1:
            sizes[-1], strides[-1] = size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return _Place(base, tuple(sizes), tuple(strides), words > 2**32)


def _contiguous(part: torch.Tensor, begin: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a part in flat pieces, each with the number of its first element; copy in chunks if necessary."""
    chunk = _CHUNK.get(part.device.type, 2**20)
    if part.is_contiguous() or part.numel() <= chunk:
        # Not reshape(-1): one element of stride 2 is contiguous, and keeps a stride that `view` refuses.
        yield begin, part.contiguous().as_strided((part.numel(),), (1,))
    elif part.shape[0] == 1:
        yield from _contiguous(part[0], begin)
    else:
        for piece in part.split(max(1, chunk * part.shape[0] // part.numel())):
            yield from _contiguous(piece, begin)
            begin += piece.numel()


def _eager(words: torch.Tensor, first: int, place: _Place) -> torch.Tensor:
    """Mix in 64-bit integers, the only ones in torch for which the product of two words is exact."""
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    chunk = _CHUNK.get(words.device.type, 2**20)
    for begin in range(0, words.numel(), chunk):
        right = words[begin : begin + chunk].to(torch.int64)
        rest = torch.arange(first + begin, first + begin + right.numel(), device=words.device)
        left = torch.full_like(rest, place.base)
        for size, stride in zip(place.sizes[:-1], place.strides[:-1], strict=True):
            left.add_(rest % size, alpha=stride)
            rest.div_(size, rounding_mode="floor")
        left.add_(rest, alpha=place.strides[-1])
        key = left >> 32 if place.wide else None
        left &= _LOW
        for number in range(ROUNDS[1]):
            right *= _MULTIPLIER
            left ^= (right >> 32) & _LOW  # a shift of int64 brings the sign bit in
            weyl = number * _WEYL
            left ^= weyl & _LOW if key is None else (key + weyl) & _LOW
            left, right = right.bitwise_and_(_LOW), left
            if number + 1 in ROUNDS:
                total[ROUNDS.index(number + 1)] += (left.sum() << 32) + right.sum()
    return total


def _mix(device: torch.device) -> Callable[[torch.Tensor, int, _Place], torch.Tensor]:
    """Return the faster implementation."""
    return _triton if device.type == "cuda" and _kernel() is not None else _eager


@functools.cache
def _kernel() -> Any:
    """The Triton kernel, or None where there is no Triton: the import needs no GPU, but takes a while."""
    try:
        triton: Any = importlib.import_module("triton")
        tl: Any = importlib.import_module("triton.language")
    except ImportError:
        return None

    # A program walks down the rows of one column of tiles. Rows are counted from `words` on: `shift` words
    # of the first one are not there, and `count` are in all. WIDE and EVEN leave out what few tensors need.
    @triton.jit(do_not_specialize=["base", "stride", "rows", "shift", "count"])
    @no_type_check
    def kernel(
        words, partial, base, run, stride, rows, shift, count,
        FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
        EVEN: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        begin = tl.program_id(0).to(tl.int64) * COLUMNS
        column = tl.arange(0, COLUMNS)[None, :]
        first_sum = tl.zeros((ROWS, COLUMNS), tl.uint64)
        second_sum = tl.zeros((ROWS, COLUMNS), tl.uint64)
        for top in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
            row = top + tl.arange(0, ROWS)[:, None].to(tl.int64)
            if EVEN:
                word = tl.load(words + (row * run + begin + column))
            else:
                local = row * run + begin + column - shift
                inside = (begin + column < run) & (local >= 0) & (local < count)
                word = tl.load(words + local, mask=inside, other=0)
            index = row * stride + begin + base
            right = word.to(tl.uint32)
            if WIDE:
                left = (index + column).to(tl.uint32)
                high = ((index + column) >> 32).to(tl.uint32)
            else:
                left = index.to(tl.uint32) + column.to(tl.uint32)
            for number in tl.static_range(SECOND):
                # Not tl.umulhi: of an extended factor's product ptxas makes one IMAD.WIDE for both halves.
                product = right.to(tl.uint64) * 0xD256D193
                left ^= (product >> 32).to(tl.uint32)
                if WIDE:
                    left ^= high + ((number * 0x9E3779B9) & 0xFFFFFFFF)
                else:
                    left ^= (number * 0x9E3779B9) & 0xFFFFFFFF
                right = left
                left = product.to(tl.uint32)
                if number + 1 == FIRST or number + 1 == SECOND:
                    state = (left.to(tl.uint64) << 32) | right.to(tl.uint64)
                    if not EVEN:
                        state = tl.where(inside, state, 0)
                    if number + 1 == FIRST:
                        first_sum += state
                    else:
                        second_sum += state
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partial + program * 2, tl.sum(first_sum).to(tl.int64))
        tl.store(partial + program * 2 + 1, tl.sum(second_sum).to(tl.int64))

    return kernel


def _triton(words: torch.Tensor, first: int, place: _Place, tile: int = 2048) -> torch.Tensor:
    """Mix up to two levels in Triton. A single level is divided into rows as long as a tile."""
    if len(place.sizes) > 2 or not words.numel():
        return _eager(words, first, place)
    flat = len(place.sizes) == 1
    run, stride = (tile, tile) if flat else (place.sizes[0], place.strides[1])
    row, shift = (0, 0) if flat else divmod(first, run)
    base = place.base + (first if flat else row * stride)
    rows = -(-(shift + words.numel()) // run)
    columns = min(tile, 1 << (run - 1).bit_length())
    high = tile // columns
    even = not (shift or words.numel() % run or run % columns or rows % high)
    across, down = -(-run // columns), -(-rows // high)
    if max(across, rows + 4096 * high) >= 2**31:
        # Beyond the kernel's 32-bit row numbers; no such tensor fits a GPU.
        return _eager(words, first, place)
    # Enough programs to fill any GPU, but few enough that each has many tiles, because its sum has a cost.
    down = min(down, 65535, max(1, 4096 // across))
    partial = torch.empty((across * down, 2), dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        _kernel()[(across, down)](
            words, partial, base, run, stride, rows, shift, words.numel(), FIRST=ROUNDS[0], SECOND=ROUNDS[1],
            ROWS=high, COLUMNS=columns, EVEN=even, WIDE=place.wide, num_warps=8,
        )  # fmt: skip
    return partial.sum(0)
