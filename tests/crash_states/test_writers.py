"""A writer that is right in all crash states, and mutants of it that are not: each is caught."""

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.crash_states.loading import Loaded
from support.crashes import broken, is_caught, states, surveyed
from support.durable_writer import MUTANTS, DurableWriter, Mutant, SyncedAfterwards


@pytest.mark.parametrize("same_folder", [False, True])
def test_nothing_is_found_of_a_writer_that_is_right(same_folder: bool) -> None:
    found = surveyed(states(DurableWriter, same_folder, samples=4), same_folder)
    assert broken(found) == set()
    assert found.count(Loaded.refused) == 0
    assert min(found.count(Loaded.old), found.count(Loaded.new)) > 0
    assert found.distinct.total() > 20


def test_there_are_at_least_twenty_mutants() -> None:
    assert len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mutant_is_caught(mutant: type[Mutant]) -> None:
    assert is_caught(states(mutant, mutant.same_folder), mutant.same_folder, mutant.breaks)


def test_what_the_page_recommends_is_enough() -> None:
    found = surveyed(states(SyncedAfterwards, same_folder=False), same_folder=False)
    assert broken(found) == set()


def test_what_torch_does_is_not() -> None:
    assert is_caught(states(FileSystemWriter, same_folder=False), False, "crash_durable")
