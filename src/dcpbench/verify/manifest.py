"""What a checkpoint says of itself, whatever wrote it. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor that is stored in one place: `file` by its path in the checkpoint, None for
    nowhere."""

    offsets: Shape
    sizes: Shape
    file: str | None


@dataclass(frozen=True)
class Entry:
    """What is stored under one key. Of what is no tensor, `shape` and `dtype` are None and its one chunk
    has no dimensions."""

    shape: Shape | None
    dtype: str | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's entries by their flattened keys (`model.net1.weight`), and its files by their paths.

    `named` has the bytes of each file by what the checkpoint says, `found` by what is there.
    """

    entries: Mapping[str, Entry]
    named: Mapping[str, int]
    found: Mapping[str, int]
