"""Tests that need GPUs: NCCL, cached staging in pinned memory, ranks that stay up."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import pytest

import conftest

# What tests' drivers are forked from compiles once, and has touched CUDA.
run = partial(conftest.run, own_process=True)


def gpus() -> int:
    """How many GPUs the driver lists; torch is not asked, so that CUDA stays untouched here."""
    program = shutil.which("nvidia-smi")
    if program is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return len(listed.stdout.splitlines()) if listed.returncode == 0 else 0


pytestmark = [pytest.mark.gpu, pytest.mark.slow]
one_gpu = pytest.mark.skipif(not gpus(), reason="needs a CUDA GPU")
four_gpus = pytest.mark.skipif(gpus() < 4, reason=f"needs four CUDA GPUs, and {gpus()} are here")


@one_gpu
def test_numbers_that_a_load_moves_to_the_gpu_are_what_they_were(tmp_path: Path) -> None:
    """NAdam keeps the product of its momenta on the CPU; `load_state_dict` puts it where the parameter is."""
    ended = run(tmp_path / "sweep", "-m", "optimizer=nadam", "parallel=none", "world_size=1")
    assert [row["status"] for row in ended.rows] == ["pass"], ended.out


@one_gpu
def test_ranks_on_the_cpu_leave_gpus_alone(tmp_path: Path) -> None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def used_mb() -> int:
        return sum(map(int, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()))

    before, seen = used_mb(), []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, tmp_path / "sweep", "-m", "device=cpu", "parallel=ddp", "save=sync,async")
        while not running.done():
            seen.append(used_mb())
            wait([running], timeout=0.2)
    assert [row["status"] for row in running.result().rows] == ["pass"] * 2, running.result().out
    assert max(seen) - before < 100


@four_gpus
def test_every_way_of_saving_on_four_gpus(tmp_path: Path) -> None:
    lists = (
        "parallel=ddp,hsdp,fsdp2_tp",
        "compile=false,true",
        "save=sync,async,async_cached",
        "model=uneven",
    )
    ended = run(tmp_path / "sweep", "-m", *lists, timeout_s=500)
    assert [row["status"] for row in ended.rows] == ["pass"] * 18, ended.out
    for row in ended.rows:
        assert row["device"] == "cuda"
        assert row["peak_device_bytes"] > 0


@four_gpus
def test_fsdp1_with_tp_is_known_on_gpus_too(tmp_path: Path) -> None:
    ended = run(tmp_path / "sweep", "-m", "parallel=fsdp_tp", "save=sync,async_cached", timeout_s=300)
    assert [row["status"] for row in ended.rows] == ["xfail"] * 2, ended.out
    assert ended.status == 0


@four_gpus
def test_the_experiment_of_pytorchs_own_tests_on_gpus(tmp_path: Path) -> None:
    ended = run(tmp_path / "sweep", "experiment=seeds", timeout_s=300)
    assert ended.status == 0, ended.out
    assert {row["status"] for row in ended.rows} == {"pass", "xfail"}
    assert ended.row(scenario="no_cpu_backend")["contract_held"] is True
    assert ended.row(save="async_cached")["status"] == "pass"


@four_gpus
def test_a_save_that_should_have_been_refused_is_seen(tmp_path: Path) -> None:
    which = ("scenario.options.scenario=no_cpu_backend", "scenario.options.defect=accepting")
    ended = run(tmp_path / "sweep", "scenario=planted", *which, "parallel=ddp", "save=async", timeout_s=200)
    (row,) = ended.rows
    assert row["status"] == "fail"
    assert "refusal of the save: expected AssertionError" in row["reason"]
    assert "it was not refused" in row["reason"]


@four_gpus
def test_a_device_that_runs_out_of_memory_is_an_error(tmp_path: Path) -> None:
    death = ("how=device_out_of_memory,not", "phase=train", "rank=2")
    ended = run(
        tmp_path / "sweep",
        *("-m", "scenario=dies", "parallel=fsdp2", "retry=0"),
        *(f"scenario.options.{option}" for option in death),
    )
    assert [row["status"] for row in ended.rows] == ["error", "pass"], ended.out
    assert ended.rows[0]["reason"].startswith("rank 2 in train: OutOfMemoryError: CUDA out of memory")
