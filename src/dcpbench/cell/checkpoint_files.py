"""The files of checkpoints: that they are there when a save reports success, stay as they are, and which
checkpoints a user's trainer has removed itself."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint, SavedCheckpoint
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.core.rank_report import NOTHING
from dcpbench.verify.files import compare_files

CHECK = "files_unchanged"

C = TypeVar("C", bound=Checkpoint)


def digests_of(cell: Cell, checkpoint: SavedCheckpoint, on_several_hosts: bool) -> Mapping[str, str]:
    """Compare the files that were there when the save reported success on this rank with those that are there
    when it has on all ranks; on rank 0 return their digests of then."""
    checkpointer, checkpoint_id = checkpoint.checkpointer, checkpoint.checkpoint_id
    complete_at, listing, digests = checkpoint.files.result()
    if on_several_hosts:
        listing = {**listing, **checkpointer.listing(checkpoint_id, until=complete_at)}
        if cell.world.rank == 0:
            digests = checkpointer.digests_with_late(checkpoint_id, digests, complete_at)
    if cell.world.size > 1 and checkpointer.has_files:
        compared = compare_files(listing, checkpointer.listing(checkpoint_id))
        cell.record(CHECK, compared, str(checkpoint))
    return digests


def follow(cell: Cell, checkpoint: SavedCheckpoint, digests: Mapping[str, str]) -> None:
    """Compare the files of a checkpoint with these digests at the end of the stage; collective."""
    checkpointer, checkpoint_id, where = checkpoint.checkpointer, checkpoint.checkpoint_id, str(checkpoint)
    if not checkpointer.has_files:
        cell.report.not_applied[CHECK] = "its checkpoints are not files"
        return
    # Without its files a readable checkpoint has no manifest, which fails.
    empty = not digests and checkpointer.unreadable and cell.world.rank == 0
    if empty and (compared := checkpointer.without_files(checkpoint_id)):  # else `verify_files` names them
        cell.record(CHECK, compared, where)
    replaced(cell, checkpointer, checkpoint_id, checkpoint.step, digests)
    cell.files[checkpoint_id] = where, digests, checkpointer


def replaced(
    cell: Cell, checkpointer: Checkpointer, checkpoint_id: str, step: int, names: Collection[str]
) -> None:
    """Note which files and checkpoints of earlier saves the save of a newer checkpoint, with files of these
    names, has written again or removed; collective."""
    folder = checkpointer.folder(checkpoint_id)
    for earlier, (where, then, its) in cell.files.items():
        if then is None or earlier == checkpoint_id or its.folder(earlier) != folder:
            continue
        again = {name: then[name] for name in then if name in names}
        for name in its.written_again(earlier, again) if cell.world.rank == 0 else ():
            cell.report.not_applied[f"{CHECK} of {name} {where}"] = f"the save of step {step} wrote it again"
        cell.files[earlier] = where, {name: then[name] for name in then if name not in again}, its
    _note_removed(cell, [*cell.files])


def remaining(cell: Cell, checkpoints: Sequence[C]) -> list[C]:
    """Return the checkpoints that can be loaded: the newest, and others if the trainer has removed none of
    their files; collective."""
    _note_removed(cell, [*cell.files][:-1])
    newest = max(one.step for one in checkpoints)

    def can_be_loaded(checkpoint: Checkpoint) -> bool:
        _, then, checkpointer = cell.files.get(checkpoint.checkpoint_id, ("", {}, checkpoint.checkpointer))
        return then is not None and (
            checkpoint.step == newest or not _missing(checkpointer, checkpoint.checkpoint_id, then)
        )

    if not any(one.checkpointer.prunes for one in checkpoints):
        return [*checkpoints]
    loadable = cell.world.gathered([can_be_loaded(one) for one in checkpoints])[0]
    return [one for one, can in zip(checkpoints, loadable, strict=True) if can]


def verify_files(cell: Cell) -> None:
    """At the end of a stage, check on rank 0 that the files of each checkpoint have not changed since its
    save reported success; collective."""
    _note_removed(cell, [*cell.files][:-1])
    for checkpoint_id, (where, then, checkpointer) in cell.files.items():
        if then is None:
            continue
        with cell.phase("verify", "files"):
            compared = NOTHING
            if cell.world.rank == 0:
                compared = compare_files(then, checkpointer.digests(checkpoint_id, then))
            cell.record(CHECK, compared, where)


def _note_removed(cell: Cell, checkpoint_ids: Sequence[str]) -> None:
    """Note which of these checkpoints the trainer has removed completely; collective."""
    if not any(cell.files[one][2].prunes for one in checkpoint_ids):
        return
    removed = [one for one in checkpoint_ids if _is_removed(cell, one)]
    for checkpoint_id in cell.world.gathered(removed)[0]:
        where, _, checkpointer = cell.files[checkpoint_id]
        cell.files[checkpoint_id] = where, None, checkpointer
        cell.report.not_applied[f"{CHECK} {where}"] = "the trainer removed it, so it is not loaded"


def _is_removed(cell: Cell, checkpoint_id: str) -> bool:
    _, then, checkpointer = cell.files[checkpoint_id]
    missing = _missing(checkpointer, checkpoint_id, then) if then else []
    return bool(missing) and len(missing) == len(checkpointer.own(checkpoint_id, then or ()))


def _missing(checkpointer: Checkpointer, checkpoint_id: str, then: Mapping[str, str]) -> list[str]:
    """Return those of a checkpoint's own files that are not there, if it may remove checkpoints."""
    if not checkpointer.prunes:
        return []
    folder = checkpointer.folder(checkpoint_id)
    return [name for name in checkpointer.own(checkpoint_id, then) if not (folder / name).exists()]
