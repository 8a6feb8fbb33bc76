"""What may be there of the bytes of files that were written and not synced: torn at sectors of 512 bytes,
which a disk writes whole, and at pages of 4096; or with writes that are lost."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

SECTOR, PAGE = 512, 4096
_TORN = 12
"""So many ways to tear a file are tried at most, the corners first."""


@dataclass(frozen=True)
class Change:
    """Of a file's bytes: `data` at `offset`, or, where `size` is given, cut or grown to that."""

    number: int
    offset: int = 0
    data: bytes = b""
    size: int | None = None

    def apply(self, held: bytes) -> bytes:
        if self.size is not None:
            return held[: self.size].ljust(self.size, b"\0")
        end = self.offset + len(self.data)
        return held[: self.offset].ljust(self.offset, b"\0") + self.data + held[end:]


def distinct(torn: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Contents that differ, each with what is lost of them the first time."""
    seen: dict[bytes, str] = {}
    for what, content in torn:
        seen.setdefault(content, what)
    return [(what, content) for content, what in seen.items()]


def torn_contents(base: bytes, changes: Sequence[Change], in_order: bool) -> Iterator[tuple[str, bytes]]:
    """What may be there of changes that were not synced, and what of them is lost; all of them first."""

    def after(some: Iterable[Change]) -> bytes:
        held = base
        for change in some:
            held = change.apply(held)
        return held

    whole = after(changes)
    yield "", whole
    yield "all changes", base
    if not changes:
        return
    last = changes[-1]
    if last.size is None:
        yield "the last write", after(changes[:-1])
        for torn_at in (len(last.data) // 2 // SECTOR * SECTOR, (len(last.data) - 1) // SECTOR * SECTOR):
            if torn_at:
                part = replace(last, data=last.data[:torn_at])
                yield f"what comes after {torn_at} bytes of the last write", after([*changes[:-1], part])
    end = (len(whole) - 1) // PAGE * PAGE
    if end > len(base):
        yield "the last page", whole[:end]
    middle = len(whole) // 2 // PAGE * PAGE
    if middle > len(base):
        yield "the second half", whole[:middle]
    for number in range(len(changes) - 2, 0, -1):
        yield f"what comes after change {number} of {len(changes)}", after(changes[:number])
    if in_order:
        return
    if len(whole) > len(base):
        yield "all bytes but not the length", base.ljust(len(whole), b"\0")
        yield "the bytes of the last page but not the length", whole[: max(end, 0)].ljust(len(whole), b"\0")
    for number, change in enumerate(changes):
        what = "the truncation" if change.size is not None else f"write {number + 1} of {len(changes)}"
        yield what, after([*changes[:number], *changes[number + 1 :]])


def combined(
    torn: dict[int, list[tuple[str, bytes]]], drawn: random.Random, samples: int, thorough: bool
) -> Iterator[tuple[dict[int, bytes], dict[int, str]]]:
    """Contents of files together: all whole, none; where it is `thorough` each torn in each way by itself;
    and some that are drawn. Of the files that are not whole also what is lost."""
    choices: list[dict[int, int]] = [{}, {file: min(len(ways) - 1, 1) for file, ways in torn.items()}]
    if thorough:
        for file, ways in torn.items():
            choices += [{file: way} for way in _some(range(1, len(ways)), drawn)]
    if len(torn) > 1:
        choices += [{file: drawn.randrange(len(ways)) for file, ways in torn.items()} for _ in range(samples)]
    for choice in choices:
        held = {file: ways[choice.get(file, 0)] for file, ways in torn.items()}
        yield (
            {file: content for file, (_, content) in held.items()},
            {file: lost for file, (lost, _) in held.items() if lost},
        )


def _some(ways: Sequence[int], drawn: random.Random) -> list[int]:
    if len(ways) <= _TORN:
        return [*ways]
    return [*ways[: _TORN // 2], *drawn.sample(ways[_TORN // 2 :], _TORN - _TORN // 2)]
