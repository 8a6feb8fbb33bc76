"""Ranks that share GPUs: their number, backend and environment, and cells that are skipped.

The version of NCCL comes from a library of one function, or from a made-up machine.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpbench.compose.cells import SweepCell
from dcpbench.compose.limits import resolve
from dcpbench.config.schema import Config
from dcpbench.executors.interpreters import Versions, versions_of
from dcpbench.executors.local import devices_of
from dcpbench.executors.machine import Machine
from dcpbench.executors.shared_gpus import nccl_can_share, ranks_per_gpu
from dcpbench.plan.plan import PlannedCell, identity_of, plan_of
from dcpbench.rank.messages import Backend, WorldSpec
from dcpbench.records.row import shared_gpu_sentences
from support.alone import config
from support.commands import python

OLD, NEW = "2.28.9", "2.30.7"
NCCL_SOURCE = "int ncclGetVersion(int* version) { *version = 23105; return 0; }"
ASK_VERSION = "from dcpbench.rank import nccl; print(nccl.load_nccl()); print(nccl.version())"


def machine(gpus: int, nccl: str | None = NEW, **more: Any) -> Machine:
    return Machine(gpus, {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": nccl}, **more)


def given(**values: Any) -> Config:
    return config(**{"device": "auto", "world_size": "auto", "parallel": "fsdp", **values})


def planned(here: Machine, **values: Any) -> PlannedCell:
    cell = SweepCell("a", [], given(**values), Path("a"), None)
    return plan_of([cell], here).cells[0]


@pytest.fixture
def library(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that compiles source code to a shared library that imitates NCCL."""

    def made(source: str = NCCL_SOURCE, name: str = "libnccl.so.2") -> Path:
        path = tmp_path / "newer.so"
        words = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", str(path)]
        subprocess.run(words, input=source, text=True, check=True)
        return path

    return made


@pytest.mark.parametrize(
    ("ranks", "gpus", "expected"),
    [
        (4, (0,), [0, 0, 0, 0]),
        (4, (3, 1), [3, 3, 1, 1]),
        (5, (0, 1, 2, 3), [0, 0, 1, 1, 2]),
        (4, (2, 3, 0, 1), [2, 3, 0, 1]),
        (2, (1, 2, 3), [1, 2]),
    ],
)
def test_neighbors_share_a_gpu(ranks: int, gpus: tuple[int, ...], expected: list[int]) -> None:
    kind = WorldSpec(ranks, "cuda", True)
    assert list(devices_of(kind, range(ranks), gpus).values()) == [f"cuda:{gpu}" for gpu in expected]
    assert ranks_per_gpu(ranks, len(gpus)) == max(expected.count(gpu) for gpu in gpus)


@pytest.mark.parametrize(("gpus", "expected"), [(0, 4), (1, 4), (2, 2), (3, 3), (4, 4), (8, 4)])
def test_one_gpu_has_four_ranks_by_default(gpus: int, expected: int) -> None:
    assert resolve(given(), machine(gpus)).world_size == expected


@pytest.mark.parametrize(
    ("version", "can"),
    [("2.30.7", True), ("3.0.0", True), ("2.29.7", False), (None, False)],
)
def test_nccl_can_share_since_2_30(version: str | None, can: bool) -> None:
    assert nccl_can_share(version) is can


def test_sharing_ranks_configure_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_BUFFSIZE", "4194304")
    job = planned(machine(1))
    (kind,) = job.world_specs
    assert kind.backend is Backend.nccl
    assert dict(kind.environment) == {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "8",
    }, "variables set by the user are kept"
    assert (job.columns["ranks_per_gpu"], job.columns["backend"]) == (4, "nccl")
    assert shared_gpu_sentences([job.columns], [NEW]) == [
        "4 ranks per GPU (NCCL 2.30.7): NVLink and peer copies are not tested"
    ]


@pytest.mark.parametrize("nccl", [OLD, NEW])
def test_ranks_with_separate_gpus_do_not_share(nccl: str) -> None:
    job = planned(machine(4, nccl))
    assert job.skip is None
    assert job.world_specs == (WorldSpec(4, "cuda", True),)
    assert (job.columns["ranks_per_gpu"], job.columns["backend"]) == (1, "nccl")
    assert shared_gpu_sentences([job.columns], [nccl]) == []


def test_only_the_stage_with_too_many_ranks_shares() -> None:
    job = planned(machine(2), scenario="convert", load_world_size=4)
    saves, loads = job.world_specs
    assert (saves.world_size, loads.world_size) == (2, 4)
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in dict(saves.environment)
    assert "NCCL_MULTI_RANK_GPU_ENABLE" in dict(loads.environment)
    assert job.columns["ranks_per_gpu"] == 2


@pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp2", "hsdp2", "fsdp2_tp"])
def test_older_nccl_is_replaced_by_gloo(parallel: str) -> None:
    job = planned(machine(1, OLD), parallel=parallel, model="even")
    assert job.skip is None
    assert job.world_specs == (WorldSpec(4, "cuda", True, backend=Backend.gloo),)
    assert (job.columns["ranks_per_gpu"], job.columns["backend"]) == (4, "gloo")
    assert shared_gpu_sentences([job.columns], [OLD]) == [
        "4 ranks per GPU (gloo; NCCL is 2.28.9): NCCL, NVLink and peer copies are not tested"
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"parallel": "fsdp"},
        {"parallel": "fsdp2", "state_dict": "full"},
        {"parallel": "fsdp2", "load_parallel": "fsdp", "scenario": "convert"},
    ],
)
def test_cells_without_gloo_skip_under_older_nccl(values: dict[str, str]) -> None:
    if other := values.pop("load_parallel", None):
        values["load_parallel"] = config(parallel=other).parallel  # type: ignore[assignment]
    job = planned(machine(1, OLD), **values)
    assert job.skip == (
        "4 ranks cannot share 1 GPU under NCCL 2.28.9: pip install --target DIR 'nvidia-nccl-cu13>=2.30', "
        "and pass nccl=DIR/nvidia/nccl/lib/libnccl.so.2 or DCPBENCH_NCCL"
    )
    assert job.columns.get("backend") is None
    assert planned(machine(1, NEW), **values).skip is None


def test_nccl_of_a_loading_interpreter_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = Versions("3.12.3", "2.11.0", OLD)
    monkeypatch.setattr("dcpbench.executors.interpreters.versions_of", lambda python: versions)
    cell = planned(machine(1, NEW, has_interpreters=True), scenario="convert", load_python="python")
    assert "under NCCL 2.28.9" in str(cell.skip)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA needs all functions of NCCL")
def test_nccl_version_of_an_interpreter(library: Callable[..., Path], monkeypatch: Any) -> None:
    monkeypatch.setenv("DCPBENCH_NCCL", str(library()))
    versions_of.cache_clear()
    assert versions_of(sys.executable).nccl == "2.31.5"
    versions_of.cache_clear()


def test_ranks_per_gpu_limits_how_many_share() -> None:
    job = planned(machine(1), ranks_per_gpu=1)
    assert job.skip == "ranks_per_gpu=1: 4 ranks on 1 GPU need 4"
    assert planned(machine(1), ranks_per_gpu=4).skip is None
    assert planned(machine(4), ranks_per_gpu=1).skip is None


def test_sharing_does_not_change_the_cell_key() -> None:
    shared, separate = planned(machine(1)), planned(machine(4))
    assert shared.key.digest == separate.key.digest
    assert identity_of(given(ranks_per_gpu=1)).digest == identity_of(given()).digest


def versions(path: Path | str) -> list[str]:
    ended = python("-c", ASK_VERSION, env={**os.environ, "DCPBENCH_NCCL": str(path)}, check=True)
    return ended.stdout.splitlines()


def test_newer_nccl_is_loaded(library: Callable[..., Path]) -> None:
    assert versions(library()) == ["None", "2.31.5"]
    assert versions("")[0] == "None"


@pytest.mark.parametrize(
    ("source", "name", "why"),
    [
        ("int other(void) { return 0; }", "libnccl.so.2", "is not a libnccl.so.2"),
        (NCCL_SOURCE, "libother.so", "is not a libnccl.so.2"),
    ],
)
def test_other_libraries_are_rejected(library: Callable[..., Path], source: str, name: str, why: str) -> None:
    path = library(source, name)
    assert why in versions(path)[0]
    assert versions(path)[0].startswith(f"nccl={path}: ")


def test_missing_library_is_reported(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPBENCH_NCCL", "")  # the key sets it, and later tests must not have it
    line = refused("nccl=/nowhere/libnccl.so.2", "device=cpu")
    assert line.startswith("dcpbench: nccl=/nowhere/libnccl.so.2: ")
    assert "No such file" in line
