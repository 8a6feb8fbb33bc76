"""A writer that is correct in all crash states, and incorrect mutants of it, each of which is detected."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.plugins.crash.disk_states import disk_states
from dcpbench.plugins.crash.loading import Loaded
from dcpbench.plugins.crash.operations import Kind, Record
from plugins.crash import writer_mutants
from plugins.crash.crashes import broken, is_caught, recorded, recorded_on_ranks, states, surveyed
from plugins.crash.durable_writer import DurableWriter, SyncedAfterwards
from support.gloo_ranks import Ask


@pytest.mark.parametrize("same_folder", [False, True])
def test_durable_writer_has_no_violations(same_folder: bool) -> None:
    found = surveyed(states(DurableWriter, same_folder, samples=4), same_folder)
    assert broken(found) == set()
    assert found.count(Loaded.refused) == 0
    assert min(found.count(Loaded.old), found.count(Loaded.new)) > 0
    assert found.distinct.total() > 20


@pytest.mark.parametrize(
    ("mutant", "same_folder", "breaks"),
    [
        (writer_mutants.RenameNotSynced, False, "crash_durable"),
        (writer_mutants.MetadataPublishedBeforeData, True, "crash_recoverable"),
        (writer_mutants.OldDataRemovedBeforeTheRenameIsSynced, True, "crash_recoverable"),
        (writer_mutants.DataOverOldData, True, "crash_consistent"),
    ],
)
def test_each_mutant_is_detected(mutant: type[DurableWriter], same_folder: bool, breaks: str) -> None:
    assert is_caught(states(mutant, same_folder), same_folder, breaks)


@pytest.mark.parametrize("same_folder", [False, True])
def test_durable_writer_has_no_violations_on_ranks(same_folder: bool, ask: Ask) -> None:
    with recorded_on_ranks(ask, DurableWriter, same_folder) as record:
        found = surveyed(list(disk_states(record, 1, 0)), same_folder)
    assert broken(found) == set()
    assert min(found.count(Loaded.old), found.count(Loaded.new)) > 0


@pytest.mark.parametrize(
    ("mutant", "same_folder", "breaks"),
    [
        (writer_mutants.MetadataOfOneRankOnly, False, "crash_durable"),
        (writer_mutants.SecondRankRemovesOldData, True, "crash_recoverable"),
    ],
)
def test_each_mutant_on_several_ranks_is_detected(
    mutant: type[DurableWriter], same_folder: bool, breaks: str, ask: Ask
) -> None:
    with recorded_on_ranks(ask, mutant, same_folder) as record:
        assert is_caught(list(disk_states(record, 0, 0)), same_folder, breaks)


def without_one(record: Record, kind: Kind) -> Iterator[tuple[str, Record]]:
    """Yield the record of one rank without each step of a kind in turn, and the path of that step."""
    (steps,) = record.ranks
    for number, step in enumerate(steps):
        if step.kind is kind:
            yield step.path, replace(record, ranks=((*steps[:number], *steps[number + 1 :]),))


@pytest.mark.parametrize(("same_folder", "not_needed"), [(False, ["new"]), (True, ["."])])
def test_each_missing_sync_is_detected(same_folder: bool, not_needed: list[str]) -> None:
    """Two syncs are not needed: of the names of data before the metadata, if the old checkpoint is in another
    folder; of the parent folder, if the folder existed before."""
    mutants = [*without_one(recorded(DurableWriter, same_folder), Kind.fsync)]
    assert len(mutants) == 6
    found = [(path, surveyed(list(disk_states(mutant, 0, 0)), same_folder)) for path, mutant in mutants]
    assert [path for path, survey in found if not broken(survey)] == not_needed


def test_missing_barrier_is_detected(ask: Ask) -> None:
    with recorded_on_ranks(ask, DurableWriter, same_folder=True) as record:
        alone = tuple(tuple(step for step in steps if step.kind is not Kind.wait) for steps in record.ranks)
        found = surveyed(list(disk_states(replace(record, ranks=alone), 0, 0)), same_folder=True)
    assert broken(found) >= {"killed crash_recoverable"}


def test_workaround_of_the_docs_is_sufficient() -> None:
    found = surveyed(states(SyncedAfterwards, same_folder=False), same_folder=False)
    assert broken(found) == set()


def test_writer_of_torch_is_not_durable() -> None:
    assert is_caught(states(FileSystemWriter, same_folder=False), False, "crash_durable")
