"""The files of checkpoints: that they are there when a save reports success, and stay as they are. A user's
trainer may remove older checkpoints.

In a folder that several hosts share, ranks wait for files, and report which were late: a file system such as
NFS may show a host late what another has written, which is not a bug of the writer.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcpbench.cell.cell import Cell, KnownFiles
from dcpbench.cell.checkpoint import Checkpoint, SaveInFlight
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.checkpointers.trainer import TrainerCheckpointer, is_under
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.core.rank_report import NOTHING, Compared
from dcpbench.formats.files import compare_files
from dcpbench.records.files import file_lengths

CHECK = "files_unchanged"
SHOWS_S = 60.0
"""How long a file may take to appear on every host: NFS clients cache a folder for that long (`acdirmax`)."""
_POLL_S = 0.1


def digests_of(cell: Cell, save: SaveInFlight, on_several_hosts: bool) -> Mapping[str, str]:
    """Compare the files that were there when the save reported success on this rank with those that are there
    when it has on all ranks; on rank 0 return their digests of then."""
    checkpointer, checkpoint_id = cell.checkpointer, save.checkpoint.checkpoint_id
    complete_at, listing, digests = save.files.result()
    if on_several_hosts:
        listing = {**listing, **checkpointer.listing(checkpoint_id, until=complete_at)}
        if cell.world.rank == 0:
            digests = checkpointer.digests_with_late(checkpoint_id, digests, complete_at)
    if cell.world.size > 1 and checkpointer.has_files and checkpoint_id not in checkpointer.removed:
        listing = without_shared(checkpointer, checkpoint_id, listing)
        compared = compare_files(listing, checkpointer.listing(checkpoint_id))
        cell.record(CHECK, compared, save.checkpoint.place)
    return without_shared(checkpointer, checkpoint_id, digests)


def watch_files(cell: Cell, checkpoint: Checkpoint, digests: Mapping[str, str]) -> None:
    """Compare the files of a checkpoint with these digests at the end of the stage; collective. The newest
    one must have files; that an older one was removed is a fact."""
    checkpointer, checkpoint_id, where = cell.checkpointer, checkpoint.checkpoint_id, checkpoint.place
    if not checkpointer.has_files:
        cell.leave_out([CHECK], "its checkpoints are not files")
        return
    known = cell.files[checkpoint_id] = KnownFiles(where, digests, checkpointer)
    _note_removed(cell)
    if digests or not checkpointer.unreadable or cell.files[checkpoint_id].digests is None:
        return  # without its files a readable checkpoint has no manifest, which fails
    compared = checkpointer.without_files(checkpoint_id) if cell.world.rank == 0 else None
    if compared:  # else `verify_files` names them
        cell.record(CHECK, compared, where)
    if cell.world.gathered(compared is not None)[0]:
        cell.files[checkpoint_id] = known._replace(digests=None)


def not_removed(cell: Cell, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints that their trainer has not removed."""
    removed = {checkpoint_id for checkpoint_id, known in cell.files.items() if known.digests is None}
    return [checkpoint for checkpoint in checkpoints if checkpoint.checkpoint_id not in removed]


def report_missing(cell: Cell, checkpoint: Checkpoint, file: str | None) -> str:
    """Report that a load of a trainer's checkpoint misses a `file` under its path, and return what became of
    it. Another file, such as one of a data set, is none of the checkpoint."""
    checkpointer, checkpoint_id = cell.checkpointer, checkpoint.checkpoint_id
    known = cell.files.get(checkpoint_id)
    digests = known.digests if known else None
    gone = sorted({*(digests or ())} - {*checkpointer.lengths(checkpoint_id)})
    path = os.path.relpath(file, checkpointer.folder(checkpoint_id)) if file else ""
    if is_under(checkpoint_id, path) or path in (digests or ()):
        name = Path(checkpoint_id).name
        facts = {"then": "complete", "now": "without a file that its load opens"}
        mismatch = [Mismatch(name, Problem.file_changed, facts=facts)]
        cell.record(CHECK, Compared.of(mismatch, mismatch, [name]), checkpoint.place)
    if gone:
        return f"{gone[0]} was there when the save of step {checkpoint.step} returned, and was removed since"
    return f"the save of step {checkpoint.step} wrote no such file under its path"


def without_shared(checkpointer: Checkpointer, checkpoint_id: str, then: Mapping[str, str]) -> dict[str, str]:
    """Return the files of then without those that a later save has written too."""
    if not isinstance(checkpointer, TrainerCheckpointer):
        return {**then}
    now, folder = checkpointer.lengths(checkpoint_id), checkpointer.folder(checkpoint_id)
    return {name: file for name, file in then.items() if name in now or not (folder / name).exists()}


def verify_files(cell: Cell) -> None:
    """At the end of a stage, check on rank 0 that the files of each checkpoint have not changed since its
    save reported success; collective."""
    _note_removed(cell)
    for checkpoint_id, known in cell.files.items():
        if known.digests is None:
            continue
        with cell.phase("verify", "files"):
            compared = NOTHING
            if cell.world.rank == 0:
                then = without_shared(known.checkpointer, checkpoint_id, known.digests)
                compared = compare_files(then, known.checkpointer.digests(checkpoint_id))
            cell.record(CHECK, compared, known.where)


def _note_removed(cell: Cell) -> None:
    """Note which checkpoints a trainer has removed, and in which save; collective."""
    if not cell.config.own_trainer:
        return
    files = cell.files.items()
    removers_here = {
        checkpoint_id: known.checkpointer.removed.get(checkpoint_id) for checkpoint_id, known in files
    }
    removers = cell.world.gathered(removers_here)[0]
    for checkpoint_id, known in [*files]:
        remover = removers[checkpoint_id]
        if known.digests is not None and remover:
            cell.files[checkpoint_id] = known._replace(digests=None)
            why = f"the save of {remover} removed it, so it is not loaded"
            cell.leave_out([CHECK], why, known.where)


class UnseenFileError(Exception):
    """A host does not see a file as another host does; the text names both and the time waited."""


def wait_until_seen(cell: Cell, folder: Path | str, where: Place | str) -> bool:
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
        lengths_here = file_lengths(folder)
        of_ranks = cell.world.gathered((cell.report.host, lengths_here, waited_s))
        unseen = {path: f"{path} {where}: {text}" for path, text in _unseen(lengths_here, of_ranks).items()}
        for path in [path for path in late if path not in unseen]:
            text, since_s = late.pop(path)
            cell.report.note("late_files", f"{text}, for {waited_s - since_s:.1f} s")
        for path, text in unseen.items():
            late.setdefault(path, (text, waited_s))
        if all(lengths == lengths_here for _, lengths, _ in of_ranks):
            return True
        if of_ranks[0][2] >= SHOWS_S:
            break
        time.sleep(_POLL_S)
        waited_s = time.monotonic() - began
    if unseen:
        for text in unseen.values():
            cell.report.note("late_files", text)
        raise UnseenFileError(f"{next(iter(unseen.values()))}, also after {waited_s:.0f} s")
    return True


def _unseen(
    lengths_here: Mapping[str, int], of_ranks: Iterable[tuple[Any, Mapping[str, int], float]]
) -> dict[str, str]:
    """Describe each file that is longer on another host than on this one."""
    longest: dict[str, tuple[int, Any]] = {}
    for host, lengths, _ in of_ranks:
        for path, length in lengths.items():
            if length > longest.get(path, (-1, None))[0]:
                longest[path] = length, host
    return {
        path: f"host {host} saw {length} bytes, this one "
        + (f"{lengths_here[path]} bytes" if path in lengths_here else "no such file")
        for path, (length, host) in sorted(longest.items())
        if lengths_here.get(path) != length
    }
