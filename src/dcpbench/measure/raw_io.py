"""What the place where a checkpoint lies can do at best: as many bytes, in plain files, without DCP."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_PIECE = 8 * 2**20


def write(folder: Path, lengths: Sequence[int], threads: int, sync: bool) -> None:
    """Write files of these lengths, in bytes, into a folder of their own; so many threads at once.

    What is written are random bytes: there are file systems that do not store zeros.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir()
    bytes_of_any_kind = os.urandom(min(_PIECE, max(lengths, default=0)))
    _each(partial(_write, folder, memoryview(bytes_of_any_kind), sync), lengths, threads)


def read(folder: Path, lengths: Sequence[int], threads: int) -> None:
    """Read what `write` wrote, and remove it all.

    Raises:
        OSError: it cannot be read.
    """
    try:
        _each(partial(_read, folder), lengths, threads)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _each(do: Callable[[int, int], None], lengths: Sequence[int], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(do, range(len(lengths)), lengths):
            pass


def _write(folder: Path, piece: memoryview, sync: bool, number: int, length: int) -> None:
    with (folder / str(number)).open("wb", buffering=0) as out:
        left = length
        while left:
            left -= out.write(piece[:left])
        if sync:
            os.fsync(out.fileno())


def _read(folder: Path, number: int, length: int) -> None:
    piece = bytearray(min(_PIECE, length))
    with (folder / str(number)).open("rb", buffering=0) as written:
        while written.readinto(piece):
            pass
