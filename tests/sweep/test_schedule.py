"""Which cells run at once, and that they do not notice each other."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from conftest import SMALL, Finished, alive_in
from dcpbench.config.groups import Device, ModelConfig, SaveConfig, ScenarioConfig, Sharing
from dcpbench.config.schema import Config
from dcpbench.executors.shared_gpus import ranks_per_gpu
from dcpbench.plan.at_once import by_training, gpus_of_runners, groups_by_ranks
from dcpbench.plan.plan import PlannedCell
from support.jobs import job as a_job


def job(world_size: int, sharing: str, device: str = "cuda", skip: str | None = None) -> PlannedCell:
    config = Config(
        scenario=ScenarioConfig(name="save_load", target="x.y"),
        world_size=world_size,
        device=Device(device),
        sharing=Sharing(sharing),
    )
    return a_job(config, skip=skip)


@pytest.mark.parametrize(
    ("size", "sharing", "expected"),
    [
        (2, "disjoint", [(0, 1), (2, 3)]),
        (1, "disjoint", [(0,), (1,), (2,), (3,)]),
        (3, "disjoint", [(0, 1, 2)]),
        (4, "disjoint", [(0, 1, 2, 3)]),
        (2, "none", [(0, 1, 2, 3)]),
    ],
)
def test_cells_with_separate_gpus_run_at_once(
    size: int, sharing: str, expected: list[tuple[int, ...]]
) -> None:
    assert gpus_of_runners([job(size, sharing)] * 5, gpus=4) == expected
    assert gpus_of_runners([job(size, sharing)], gpus=4) == expected[:1], "no more workers than cells"
    assert len(gpus_of_runners([job(size, sharing, skip="no"), job(size, sharing)], gpus=4)) == 1


def test_cells_that_train_the_same_run_are_together() -> None:
    def cell(seed: int, save: str, repeat: int = 0) -> PlannedCell:
        config = replace(job(2, "none").config, seed=seed, save=SaveConfig(name=save), repeat=repeat)
        return a_job(config)

    cells = [
        *(cell(0, "sync"), cell(1, "sync"), cell(0, "async"), cell(1, "async")),
        *(cell(0, "sync", 1), cell(1, "sync", 1), cell(0, "async", 1), cell(1, "async", 1)),
    ]
    assert [cells.index(one) for one in by_training(cells)] == [0, 2, 1, 3, 4, 5, 6, 7], "repeats stay apart"


def test_cells_of_several_hosts_run_one_by_one() -> None:
    several = job(2, "disjoint")
    several.config.executor.hosts = 2
    assert gpus_of_runners([several] * 5, gpus=4) == [(0, 1, 2, 3)]


def test_cells_share_gpus_for_correctness() -> None:
    found = gpus_of_runners([job(4, "correctness"), job(1, "correctness")] * 9, gpus=4)
    assert len(found) >= 2
    assert all(sorted(gpus) == [0, 1, 2, 3] for gpus in found)
    assert len({gpus[0] for gpus in found}) == len(found), "small cells begin on different GPUs"
    assert len(gpus_of_runners([job(4, "correctness", "cpu")] * 9, gpus=0)) >= 2
    assert gpus_of_runners([job(4, "disjoint", "cpu")] * 9, gpus=0) == [()], "cells on a CPU have all of it"


def test_cells_at_once_follow_the_cpu_affinity() -> None:
    """As under `taskset` or Slurm, where a process may use some of the machine's cores."""
    jobs = [job(4, "correctness", "cpu")] * 99
    with mock.patch("os.cpu_count", return_value=96):
        for cores, at_once in ((4, 2), (12, 3), (96, 16)):
            with mock.patch("os.sched_getaffinity", return_value={*range(cores)}):
                assert len(gpus_of_runners(jobs, gpus=0)) == at_once, cores


def test_cells_are_grouped_by_their_ranks() -> None:
    two, four, shared, alone = job(2, "none"), job(4, "none"), job(2, "correctness"), job(1, "correctness")
    assert groups_by_ranks([two, four, shared, two, alone, four]) == [
        [two, two],
        [four, four],
        [shared, alone],
    ]


@pytest.mark.slow
def test_sharing_cells_do_not_affect_each_other(sweep: Callable[..., Finished]) -> None:
    """One cell dies again and again, and each time its ranks are ended, beside others that pass."""
    lists = ("scenario=save_load,kills_itself", "seed=1,2", "parallel=ddp", "world_size=2", "saves=1")
    ended = sweep("-m", *lists, *SMALL, "device=cpu", "sharing=correctness", "retry=0")
    seen = [(row["scenario"], row["seed"], row["status"]) for row in ended.rows]
    assert seen == [
        (scenario, seed, "pass" if scenario == "save_load" else "crash")
        for scenario in ("save_load", "kills_itself")
        for seed in (1, 2)
    ], "one row for each cell, in the order of the product"
    for each in ended.rows:
        assert {column for column in each if column.endswith("_s") and each[column] is not None} == {
            "shared_cell_s"
        }
        if each["scenario"] == "kills_itself":
            assert "rank 1 was killed by SIGKILL" in each["reason"]
    assert alive_in(ended.folder) == []


_REPEATS = itertools.count()


def shared_job(name: str, model: str = "small", world_size: int = 4, gpus: int = 1) -> PlannedCell:
    config = Config(
        scenario=ScenarioConfig(name="save_load", target="x.y"),
        model=ModelConfig(name=model, target="x.y"),
        world_size=world_size,
        device=Device.cuda,
        sharing=Sharing.correctness,
        repeat=next(_REPEATS),
    )
    return replace(a_job(config), name=name, ranks_per_gpu=ranks_per_gpu(world_size, gpus))


def test_workers_that_share_a_gpu_fit_its_memory() -> None:
    jobs = [shared_job(str(number)) for number in range(9)]
    with mock.patch("os.sched_getaffinity", return_value=range(16)):
        for gigabytes, workers in ((80, 4), (40, 2), (24, 1), (8, 1), (None, 4)):
            memory = gigabytes and gigabytes * 10**9
            assert len(gpus_of_runners(jobs, 1, memory)) == workers, gigabytes
        apart = [shared_job(str(number), gpus=4) for number in range(9)]
        assert len(gpus_of_runners(apart, 4, 8 * 10**9)) == 4, "they have a GPU each"
