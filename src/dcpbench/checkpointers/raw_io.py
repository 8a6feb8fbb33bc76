"""Writes and reads plain files of a checkpoint's size without DCP, to measure the speed of the storage."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_PIECE = 8 * 2**20


@dataclass(frozen=True)
class RawIO:
    """Writes and reads plain files in several threads; with `sync`, each file is synced."""

    threads: int
    sync: bool

    def write(self, folder: Path, lengths: Sequence[int]) -> None:
        """Write files of these lengths, in bytes, into a new folder. The bytes are random, because some file
        systems do not store zeros.

        Raises:
            OSError: a file cannot be written.
        """
        folder.mkdir()
        piece = memoryview(os.urandom(min(_PIECE, max(lengths, default=0))))

        def write(number: int, left: int) -> None:
            with (folder / str(number)).open("wb", buffering=0) as out:
                while left:
                    left -= out.write(piece[:left])
                if self.sync:
                    os.fsync(out.fileno())

        self._each(write, lengths)

    def read(self, folder: Path, lengths: Sequence[int]) -> None:
        """Read the files that `write` wrote, and remove them.

        Raises:
            OSError: a file cannot be read.
        """

        def read(number: int, length: int) -> None:
            piece = bytearray(min(_PIECE, length))
            with (folder / str(number)).open("rb", buffering=0) as written:
                while written.readinto(piece):
                    pass

        try:
            self._each(read, lengths)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _each(self, do: Callable[[int, int], None], lengths: Sequence[int]) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(do, range(len(lengths)), lengths))
