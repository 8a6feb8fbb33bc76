"""Wait for files in a folder that several hosts share. A file system such as NFS may show a host late what
another has written, which is not a bug of the writer. Ranks wait, and report which files were late."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dcpbench.cell.cell import Cell
from dcpbench.records.files import file_lengths

SHOWS_S = 60.0
"""How long a file may take to appear on every host: NFS clients cache a folder for that long (`acdirmax`)."""
_POLL_S = 0.1


class UnseenFileError(Exception):
    """A host does not see a file as another host does; the text names both and the time waited."""


def wait_until_seen(cell: Cell, folder: Path | str, where: str) -> bool:
    """Wait until every rank sees the same files with the same lengths below a folder; collective. On one host
    there is no wait.

    Returns:
        whether the ranks are on several hosts.

    Raises:
        UnseenFileError: on a rank that has not seen a file in time.
    """
    cell.world.meet()
    if not cell.world.on_several_hosts(cell.report.host):
        return False
    began, waited_s = time.monotonic(), 0.0
    late: dict[str, tuple[str, float]] = {}
    while True:
        mine = file_lengths(folder)
        of_ranks = cell.world.gathered((cell.report.host, mine, waited_s))
        unseen = {path: f"{path} {where}: {text}" for path, text in _unseen(mine, of_ranks).items()}
        for path in [path for path in late if path not in unseen]:
            text, since_s = late.pop(path)
            cell.report.late_files.append(f"{text}, for {waited_s - since_s:.1f} s")
        for path, text in unseen.items():
            late.setdefault(path, (text, waited_s))
        if all(lengths == mine for _, lengths, _ in of_ranks):
            return True
        if of_ranks[0][2] >= SHOWS_S:
            break
        time.sleep(_POLL_S)
        waited_s = time.monotonic() - began
    if unseen:
        cell.report.late_files += unseen.values()
        raise UnseenFileError(f"{next(iter(unseen.values()))}, also after {waited_s:.0f} s")
    return True


def _unseen(
    mine: Mapping[str, int], of_ranks: Iterable[tuple[Any, Mapping[str, int], float]]
) -> dict[str, str]:
    """Describe each file that is longer on another host than on this one."""
    longest: dict[str, tuple[int, Any]] = {}
    for host, lengths, _ in of_ranks:
        for path, length in lengths.items():
            if length > longest.get(path, (-1, None))[0]:
                longest[path] = length, host
    return {
        path: f"host {host} saw {length} bytes, this one "
        + (f"{mine[path]} bytes" if path in mine else "no such file")
        for path, (length, host) in sorted(longest.items())
        if mine.get(path) != length
    }
