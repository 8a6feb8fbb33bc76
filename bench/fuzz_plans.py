"""DCP's planning for hundreds of ranks, without any: `make fuzz`.

Their writes tile each tensor once, and the reads of other ranks, under another layout, give their part of the
full tensor. The argument is the number of plans to draw.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcpbench.formats.audit import audit
from dcpbench.formats.dcp_metadata import manifest_of

Layout = list[tuple[int, int | None]]
"""The size of each dimension of a mesh, and the dimension of a tensor that it divides, or None."""


def layouts(dimensions: int) -> st.SearchStrategy[Layout]:
    divided = st.one_of(st.none(), st.integers(0, dimensions - 1)) if dimensions else st.none()
    of_mesh = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 7, 8, 16]), divided), min_size=1, max_size=3)
    return of_mesh.filter(lambda mesh: math.prod(size for size, _ in mesh) <= 512)


@st.composite
def tensors_in_two_layouts(draw: st.DrawFn) -> tuple[list[int], Layout, Layout]:
    shape = draw(st.lists(st.integers(0, 40), max_size=3))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def boxes(shape: list[int], layout: Layout) -> Iterator[ChunkStorageMetadata]:
    """The part of each rank, as DTensor divides: what `torch.chunk` makes, one dimension of a mesh after the
    other; who has nothing begins where the tensor ends."""
    for rank in range(math.prod(size for size, _ in layout)):
        begins, sizes, left = [0] * len(shape), [*shape], rank
        inner = math.prod(size for size, _ in layout)
        for size, divides in layout:
            inner //= size
            at, left = divmod(left, inner)
            if divides is None:
                continue
            each = -(-sizes[divides] // size)
            begin = min(at * each, sizes[divides])
            begins[divides] += begin
            sizes[divides] = min(each, sizes[divides] - begin)
        places = zip(begins, sizes, shape, strict=True)
        offsets = [begin if size else whole for begin, size, whole in places]
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def plan_of(shape: list[int], box: ChunkStorageMetadata) -> SavePlan:
    """Return the write items of a rank's part."""
    properties = TensorProperties(dtype=torch.int64)
    data = TensorWriteData(box, properties, torch.Size(shape))
    item = WriteItem(MetadataIndex("w", box.offsets), WriteItemType.SHARD, tensor_data=data)
    return SavePlan([item], planner_data={"w": ("w",)})


def part(whole: torch.Tensor, offsets: torch.Size, sizes: torch.Size) -> torch.Tensor:
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


@given(drawn=tensors_in_two_layouts(), to_lowest=st.booleans())
def plans_are_readable(drawn: tuple[list[int], Layout, Layout], to_lowest: bool) -> None:
    shape, saved, loaded = drawn
    whole = torch.arange(math.prod(shape)).reshape(shape)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=to_lowest)
    plans, metadata = planner.create_global_plan([plan_of(shape, box) for box in boxes(shape, saved)])

    written = Counter(item.index for plan in plans for item in plan.items)
    assert set(written.values()) == {1}, "what several ranks have is written once"
    items = list(dict.fromkeys(item.index for plan in plans for item in plan.items))
    metadata.storage_data = {index: _StorageInfo("0", 8 * at, 8) for at, index in enumerate(items)}
    manifest = manifest_of(metadata, {"0": 8 * len(items)})
    assert audit(manifest, manifest.entries) == []

    stored = metadata.state_dict_metadata["w"]
    chunks = {chunk.offsets: part(whole, chunk.offsets, chunk.sizes) for chunk in stored.chunks}
    for box in boxes(shape, loaded):
        mine = torch.full(box.sizes, -1)
        for item in create_read_items_for_chunk_list("w", stored, [box]):
            source = chunks[item.storage_index.offset]
            part(mine, item.dest_offsets, item.lengths).copy_(
                part(source, item.storage_offsets, item.lengths)
            )
        assert torch.equal(mine, part(whole, box.offsets, box.sizes))


if __name__ == "__main__":
    settings(max_examples=int(sys.argv[1]), deadline=None, database=None)(plans_are_readable)()
