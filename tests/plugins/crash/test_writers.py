"""A writer that is right in all crash states, and mutants of it that are not: each is caught."""

import inspect
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.plugins.crash.disk_states import disk_states
from dcpbench.plugins.crash.loading import Loaded
from dcpbench.plugins.crash.operations import Kind, Record
from plugins.crash.crashes import broken, is_caught, recorded, recorded_on_ranks, states, surveyed
from plugins.crash.durable_writer import DurableWriter, SyncedAfterwards
from plugins.crash.writer_mutants import MUTANTS, MUTANTS_ON_RANKS, MetadataPublishedBeforeData, Mutant
from support.gloo_ranks import Ask


@pytest.mark.parametrize("same_folder", [False, True])
def test_nothing_is_found_of_a_writer_that_is_right(same_folder: bool) -> None:
    found = surveyed(states(DurableWriter, same_folder, samples=4), same_folder)
    assert broken(found) == set()
    assert found.count(Loaded.refused) == 0
    assert min(found.count(Loaded.old), found.count(Loaded.new)) > 0
    assert found.distinct.total() > 20


@pytest.mark.parametrize("mutant", [*MUTANTS, *MUTANTS_ON_RANKS], ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_the_writer_with_one_method_otherwise(mutant: type[Mutant]) -> None:
    changed = {name for name, made in vars(mutant).items() if inspect.isfunction(made)}
    assert changed <= {*dir(DurableWriter)}
    # An order of two phases is what both do.
    assert len(changed) == (2 if mutant is MetadataPublishedBeforeData else 1)


def test_there_are_at_least_thirty_mutants() -> None:
    assert len(MUTANTS) + len(MUTANTS_ON_RANKS) >= 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mutant_is_caught(mutant: type[Mutant]) -> None:
    assert is_caught(states(mutant, mutant.same_folder), mutant.same_folder, mutant.breaks)


@pytest.mark.parametrize("same_folder", [False, True])
def test_nothing_is_found_of_it_on_several_ranks(same_folder: bool, ask: Ask) -> None:
    with recorded_on_ranks(ask, DurableWriter, same_folder) as record:
        found = surveyed(list(disk_states(record, 1, 0)), same_folder)
    assert broken(found) == set()
    assert min(found.count(Loaded.old), found.count(Loaded.new)) > 0


@pytest.mark.parametrize("mutant", MUTANTS_ON_RANKS, ids=lambda mutant: mutant.__name__)
def test_each_mutant_on_several_ranks_is_caught(mutant: type[Mutant], ask: Ask) -> None:
    with recorded_on_ranks(ask, mutant, mutant.same_folder) as record:
        assert is_caught(list(disk_states(record, 0, 0)), mutant.same_folder, mutant.breaks)


def without_one(record: Record, kind: Kind) -> Iterator[tuple[str, Record]]:
    """The record of one rank without each step of a kind in turn, and what that was done to."""
    (steps,) = record.ranks
    for number, step in enumerate(steps):
        if step.kind is kind:
            yield step.path, replace(record, ranks=((*steps[:number], *steps[number + 1 :]),))


@pytest.mark.parametrize(("same_folder", "not_needed"), [(False, ["new"]), (True, ["."])])
def test_without_any_of_its_syncs_it_is_caught(same_folder: bool, not_needed: list[str]) -> None:
    """But where the old checkpoint is elsewhere, the names of data need not be synced before the metadata are
    there; and where its folder was there before, the one above it need not be."""
    mutants = [*without_one(recorded(DurableWriter, same_folder), Kind.fsync)]
    assert len(mutants) == 6
    found = [(path, surveyed(list(disk_states(mutant, 0, 0)), same_folder)) for path, mutant in mutants]
    assert [path for path, survey in found if not broken(survey)] == not_needed


def test_ranks_that_do_not_wait_for_each_other_are_caught(ask: Ask) -> None:
    with recorded_on_ranks(ask, DurableWriter, same_folder=True) as record:
        alone = tuple(tuple(step for step in steps if step.kind is not Kind.wait) for steps in record.ranks)
        found = surveyed(list(disk_states(replace(record, ranks=alone), 0, 0)), same_folder=True)
    assert broken(found) >= {"killed crash_recoverable"}


def test_what_the_page_recommends_is_enough() -> None:
    found = surveyed(states(SyncedAfterwards, same_folder=False), same_folder=False)
    assert broken(found) == set()


def test_what_torch_does_is_not() -> None:
    assert is_caught(states(FileSystemWriter, same_folder=False), False, "crash_durable")
