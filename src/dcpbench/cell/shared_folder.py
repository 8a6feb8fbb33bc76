"""What ranks on several hosts see of a folder that they share. A file system may show one host late what
another has written, as NFS does: that is no defect of what wrote it. Ranks wait, and report what was late."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from dcpbench.cell.cell import Cell
from dcpbench.checkpointers.base import file_lengths

SHOWS_S = 60.0
"""How long a file may take to be seen on every host: so long an NFS client may believe what it knows of a
folder (`acdirmax`), if nothing else is said."""
_LOOK_EVERY_S = 0.1


class UnseenFileError(Exception):
    """A host does not see a file as another host does; the text names both, and how long was waited."""


def wait_until_seen(cell: Cell, folder: Path | str, where: str) -> bool:
    """Wait until every rank sees the same files below a folder, each with the same length; collective. On one
    host nobody waits: what ranks do not see there is not there.

    Returns:
        whether the ranks are on several hosts.

    Raises:
        UnseenFileError: on a rank that has not seen a file in time.
    """
    cell.world.meet()
    began, waited_s = time.monotonic(), 0.0
    late: dict[str, tuple[str, float]] = {}
    while True:
        mine = file_lengths(str(folder))
        everybody = cell.world.gathered((cell.report.host, mine, waited_s))
        if len({host for host, *_ in everybody}) < 2:
            return False
        there = _longest([(str(host), lengths) for host, lengths, _ in everybody])
        unseen = {
            path: f"{path} {where}: host {host} saw {length} bytes, this one {_seen(mine, path)}"
            for path, (length, host) in sorted(there.items())
            if mine.get(path) != length
        }
        for path in [path for path in late if path not in unseen]:
            text, since_s = late.pop(path)
            cell.report.late_files.append(f"{text}, for {waited_s - since_s:.1f} s")
        for path, text in unseen.items():
            late.setdefault(path, (text, waited_s))
        if all(lengths == mine for _, lengths, _ in everybody):
            return True
        if everybody[0][2] >= SHOWS_S:
            break
        time.sleep(_LOOK_EVERY_S)
        waited_s = time.monotonic() - began
    if unseen:
        cell.report.late_files += unseen.values()
        raise UnseenFileError(f"{next(iter(unseen.values()))}, also after {waited_s:.0f} s")
    return True


def _longest(seen: Iterable[tuple[str, Mapping[str, int]]]) -> dict[str, tuple[int, str]]:
    """The length of each file where it is the longest, and the first host that sees it so."""
    there: dict[str, tuple[int, str]] = {}
    for host, lengths in seen:
        for path, length in lengths.items():
            if length > there.get(path, (-1, ""))[0]:
                there[path] = length, host
    return there


def _seen(lengths: Mapping[str, int], path: str) -> str:
    return f"{lengths[path]} bytes" if path in lengths else "no such file"
