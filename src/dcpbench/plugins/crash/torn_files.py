"""Possible contents of files that were written and not synced. Writes are lost, or torn at pages of 4096
bytes or at sectors of 512 bytes, which a disk writes atomically."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

SECTOR, PAGE = 512, 4096
_TORN = 12
"""The maximum number of ways in which one file is torn."""


@dataclass(frozen=True)
class FileChange:
    """A write of `data` at `offset`, or a truncation to `size` if that is given."""

    number: int
    offset: int = 0
    data: bytes = b""
    size: int | None = None

    def apply(self, content: bytes) -> bytes:
        if self.size is not None:
            return content[: self.size].ljust(self.size, b"\0")
        end = self.offset + len(self.data)
        return content[: self.offset].ljust(self.offset, b"\0") + self.data + content[end:]


def applied(content: bytes, changes: Iterable[FileChange]) -> bytes:
    """Return the content of a file after changes."""
    for change in changes:
        content = change.apply(content)
    return content


def distinct(torn: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Remove contents that occur twice; the first description of a loss is kept."""
    losses: dict[bytes, str] = {}
    for lost, content in torn:
        losses.setdefault(content, lost)
    return [(lost, content) for content, lost in losses.items()]


def torn_contents(base: bytes, changes: Sequence[FileChange], in_order: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the possible contents after changes that were not synced, each with what is lost; first nothing
    is."""
    after = partial(applied, base)
    complete = after(changes)
    yield "", complete
    yield "all changes", base
    if not changes:
        return
    last = changes[-1]
    if last.size is None:
        yield "the last write", after(changes[:-1])
        for torn_at in (len(last.data) // 2 // SECTOR * SECTOR, (len(last.data) - 1) // SECTOR * SECTOR):
            if torn_at:
                torn_change = replace(last, data=last.data[:torn_at])
                yield (
                    f"everything after {torn_at} bytes of the last write",
                    after([*changes[:-1], torn_change]),
                )
    end = (len(complete) - 1) // PAGE * PAGE
    if end > len(base):
        yield "the last page", complete[:end]
    middle = len(complete) // 2 // PAGE * PAGE
    if middle > len(base):
        yield "the second half", complete[:middle]
    for number in range(len(changes) - 2, 0, -1):
        yield f"everything after change {number} of {len(changes)}", after(changes[:number])
    if in_order:
        return
    if len(complete) > len(base):
        yield "all bytes, but not the length", base.ljust(len(complete), b"\0")
        yield (
            "the bytes of the last page, but not the length",
            complete[: max(end, 0)].ljust(len(complete), b"\0"),
        )
    for number, change in enumerate(changes):
        lost = "the truncation" if change.size is not None else f"write {number + 1} of {len(changes)}"
        yield lost, after([*changes[:number], *changes[number + 1 :]])


def combined(
    torn: dict[int, list[tuple[str, bytes]]], drawn: random.Random, samples: int, thorough: bool
) -> Iterator[tuple[dict[int, bytes], dict[int, str]]]:
    """Yield contents of all files, and what is lost of each incomplete one: all complete, all lost, random
    combinations, and if `thorough` each file torn in each way while the others are complete."""
    choices: list[dict[int, int]] = [{}, {file: min(len(ways) - 1, 1) for file, ways in torn.items()}]
    if thorough:
        for file, ways in torn.items():
            choices += [{file: way} for way in _some(range(1, len(ways)), drawn)]
    if len(torn) > 1:
        choices += [{file: drawn.randrange(len(ways)) for file, ways in torn.items()} for _ in range(samples)]
    for choice in choices:
        chosen = {file: ways[choice.get(file, 0)] for file, ways in torn.items()}
        yield (
            {file: content for file, (_, content) in chosen.items()},
            {file: lost for file, (lost, _) in chosen.items() if lost},
        )


def _some(ways: Sequence[int], drawn: random.Random) -> list[int]:
    if len(ways) <= _TORN:
        return [*ways]
    return [*ways[: _TORN // 2], *drawn.sample(ways[_TORN // 2 :], _TORN - _TORN // 2)]
