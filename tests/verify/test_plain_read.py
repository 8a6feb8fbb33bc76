"""Parts of tensors out of stored chunks: however a part lies, and of large ones a block."""

from functools import partial

import pytest
import torch

from dcpbench.records.findings import Problem
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.plain_read import StoredChunk, compare_stored
from dcpbench.verify.snapshot import BLOCK, TensorLeaf, digested

CPU = torch.device("cpu")
SMALL = torch.arange(60.0).reshape(6, 10)


def _chunks(tensor: torch.Tensor, rows: int) -> list[StoredChunk]:
    """Of so many rows each, as the files have them."""
    return [
        StoredChunk((number * rows, 0), tuple(part.shape), partial(torch.clone, part))
        for number, part in enumerate(tensor.split(rows))
    ]


@pytest.mark.parametrize(
    "extent",
    [
        whole(SMALL),
        Extent((6, 10), (2, 0), (2, 10), 0, 20),  # a DTensor's shard
        Extent((6, 10), (0, 5), (6, 5), 0, 30),  # of columns
        Extent((6, 10), (0, 0), (6, 10), 13, 29),  # FSDP1 cuts anywhere
    ],
)
def test_a_part_is_put_together_and_a_wrong_element_told(extent: Extent) -> None:
    leaves = {"w": TensorLeaf(extent.take(SMALL).clone(), extent, None)}
    read = compare_stored([leaves], {"w": _chunks(SMALL, 4)}, 0, 1, CPU)
    assert (read.found, read.control) == ([], {"w": True})
    leaves["w"].local[-1] += 1
    (finding,) = compare_stored([leaves], {"w": _chunks(SMALL, 4)}, 0, 1, CPU).found
    assert finding.problem is Problem.differs


def test_of_a_large_part_one_block_is_read() -> None:
    large = torch.arange(float(BLOCK + 100)).reshape(-1, 2)
    leaves = digested({"w": TensorLeaf(large, whole(large), None)})
    read = compare_stored([leaves], {"w": _chunks(large, BLOCK)}, 0, 1, CPU)
    assert (read.found, read.control) == ([], {"w": True})
    (finding,) = compare_stored([leaves], {"w": _chunks(-large, BLOCK)}, 0, 1, CPU).found
    assert finding.problem is Problem.digests_differ
