"""What the place where a checkpoint lies can do at best: as many bytes, in plain files, without DCP."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_PIECE = 8 * 2**20


@dataclass(frozen=True)
class RawIO:
    """Plain files of some lengths, in bytes, by so many `threads` at once, each synced if `sync` says so."""

    threads: int
    sync: bool

    def write(self, folder: Path, lengths: Sequence[int]) -> None:
        """Write files of these lengths into a new folder.

        What is written are random bytes: there are file systems that do not store zeros.

        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir()
        bytes_of_any_kind = os.urandom(min(_PIECE, max(lengths, default=0)))
        self._each(partial(_write, folder, memoryview(bytes_of_any_kind), self.sync), lengths)

    def read(self, folder: Path, lengths: Sequence[int]) -> None:
        """Read what `write` wrote, and remove it all.

        Raises:
            OSError: it cannot be read.
        """
        try:
            self._each(partial(_read, folder), lengths)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _each(self, do: Callable[[int, int], None], lengths: Sequence[int]) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
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
