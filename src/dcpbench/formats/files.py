"""The files of a checkpoint: whether they have changed since the save reported success, and were synced."""

import ctypes
import hashlib
import os
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from unittest import mock

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.records.files import files_below

_BLOCK = 2**20
_BLOCKS = 32
"""Number of evenly spread blocks that are read of a larger file, including the first and the last."""
_THREADS = 8

FileDigests = Mapping[str, str]
"""Length and digest of each file as text, by its path in the checkpoint; in a listing length and mtime."""


def digest_files(folder: Path, paths: Iterable[Path] | None = None) -> FileDigests:
    """Return the length and the SHA-256 digest of every file below a folder, or of these. For a file of more
    than 32 MiB only some blocks are digested, and its mtime stands for the others."""
    paths = [*(files_below(folder) if paths is None else paths)]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = zip(paths, pool.map(_digest_or_none, paths), strict=True)
        return {str(path.relative_to(folder)): digest for path, digest in digests if digest}


def _digest_or_none(path: Path) -> str | None:
    """Return the digest of a file; None if it was removed meanwhile."""
    with suppress(FileNotFoundError):
        return _digest(path)
    return None


def _digest(path: Path) -> str:
    """Return the length and the digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        stat = path.stat()
        size = stat.st_size
        last = max(size - 1, 0) // _BLOCK
        is_small = last < _BLOCKS
        for number in range(min(last + 1, _BLOCKS)):
            start = (number if is_small else number * last // (_BLOCKS - 1)) * _BLOCK
            file.seek(start)
            digest.update(file.read(_BLOCK))
    mtime = "" if is_small else f" of {stat.st_mtime_ns} ns"
    return f"{size} bytes{mtime}, {digest.hexdigest()[:32]}"


def list_files(folder: Path, stats: Mapping[Path, os.stat_result]) -> FileDigests:
    """Return the length and the mtime of files below a folder, instead of a digest. Inodes are left out: some
    file systems give a file another one later."""
    return {str(path.relative_to(folder)): _listed(stat) for path, stat in stats.items()}


def _listed(stat: os.stat_result) -> str:
    seconds, nanoseconds = divmod(stat.st_mtime_ns, 10**9)
    return f"{stat.st_size} bytes of {time.strftime('%H:%M:%S', time.gmtime(seconds))}.{nanoseconds:09} UTC"


def digest_late_files(
    folder: Path, stats: Mapping[Path, os.stat_result], then: FileDigests, complete_at: float
) -> FileDigests:
    """Digest those of these files that a shared file system made visible late: when the save reported success
    (`time.time`) they were missing, or had another length, although nothing has changed them since."""
    late = {
        str(path.relative_to(folder)): path for path, stat in stats.items() if stat.st_ctime < complete_at
    }
    return {
        name: _digest(path)
        for name, path in late.items()
        if not then.get(name, "").startswith(f"{stats[path].st_size} bytes")
    }


def compare_files(then: FileDigests, now: FileDigests) -> Compared:
    """Compare the files of a checkpoint. The controls change the digest of every second file and of the
    others, and remove and add a file."""

    def reported(then: FileDigests, now: FileDigests) -> set[str]:
        return {mismatch.name for mismatch in _differing(then, now)}

    paths, detected = [*then], dict.fromkeys(then, False)
    for some in ({*paths[::2]}, {*paths[1::2]}):  # of the others none may be reported
        names = reported(
            then,
            {
                path: f"not {file_digest}" if path in some else file_digest
                for path, file_digest in then.items()
            },
        )
        detected |= dict.fromkeys(names & some, names <= some)
    more = {**then, "another file": "0 bytes"}
    detected["a file that went"] = reported(more, then) == {"another file"}
    detected["a file that came"] = reported(then, more) == {"another file"}
    return Compared(_differing(then, now), dict.fromkeys(detected, True), detected)


def no_files(name: str) -> Compared:
    """Report a checkpoint that has no file although its save reported success; the control has none."""
    facts = {"then": "a checkpoint", "now": "no file: its save wrote none under its path, or removed it"}
    mismatches = [Mismatch(name, Problem.file_changed, facts=facts)]
    return Compared.of(mismatches, mismatches, [name])


def _differing(then: FileDigests, now: FileDigests) -> list[Mismatch]:
    missing = "no such file"
    pairs = {path: (then.get(path, missing), now.get(path, missing)) for path in (*then, *now)}
    return [
        Mismatch(path, Problem.file_changed, facts={"then": was, "now": became})
        for path, (was, became) in pairs.items()
        if was != became
    ]


def drop_pages(paths: Iterable[Path]) -> None:
    """Sync files, and ask the kernel to drop its cached pages of them.

    The kernel keeps pages that a process has mapped and those of a file system in memory. Caches of a disk or
    a file server are not affected.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


FileId = tuple[int, int, int]
"""Device, inode and birth time of a file. A rename keeps them; an inode is reused as soon as it is free."""

_AT_FDCWD, _AT_EMPTY_PATH, _STATX_BTIME, _BTIME_AT = -100, 0x1000, 0x800, 80
"""Constants of statx(2), and the offset of the birth time in its result."""
_STATX = getattr(ctypes.CDLL(None), "statx", None)


def file_id(file: int | Path) -> FileId:
    """Identify a file by its descriptor or path. The birth time is 0 if the file system does not keep it."""
    # `os.stat` has no birth time on Linux.
    place = (file, b"", _AT_EMPTY_PATH) if isinstance(file, int) else (_AT_FDCWD, bytes(file), 0)
    result = ctypes.create_string_buffer(256)
    known = _STATX is not None and _STATX(*place, _STATX_BTIME, result) == 0
    born = struct.unpack_from("=qI", result, _BTIME_AT) if known else (0, 0)
    stat = os.fstat(file) if isinstance(file, int) else file.stat()
    return stat.st_dev, stat.st_ino, born[0] * 10**9 + born[1]


@contextmanager
def recorded_syncs() -> Iterator[set[FileId]]:
    """Context manager: collect the files that this process syncs with `os.fsync`."""
    synced: set[FileId] = set()
    honest = os.fsync

    def fsync(file: int | IO[Any]) -> None:
        honest(file)
        synced.add(file_id(file if isinstance(file, int) else file.fileno()))

    with mock.patch.object(os, "fsync", fsync):
        yield synced


def synced_in(folder: Path, synced: Collection[FileId]) -> set[str]:
    """Return the synced files below a folder by their relative paths, because device numbers differ between
    hosts."""
    return {str(path.relative_to(folder)) for path in files_below(folder) if file_id(path) in synced}


def compare_synced(files: Collection[str], synced: Collection[str]) -> Compared:
    """Find every file that no rank synced; the control is that none was."""
    mismatches, control = _not_synced(files, synced), _not_synced(files, ())
    name = "files that were not synced"
    return Compared(mismatches, {name: True}, {name: 0 < len(control) == len(files)})


def _not_synced(files: Iterable[str], synced: Collection[str]) -> list[Mismatch]:
    return [Mismatch(path, Problem.not_synced) for path in sorted(files) if path not in synced]
