"""Doctor reports what the machine lacks, and how to fix it."""

import os
import shutil
import subprocess
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from conftest import Command
from dcpbench.cli import doctor
from dcpbench.cli.doctor import MachineCheck, machine_checks
from dcpbench.compose.limits import why_skip
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Device
from dcpbench.config.schema import Config
from dcpbench.executors import machine
from dcpbench.executors.agent import ENVIRONMENT
from dcpbench.executors.machine import Machine


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, MachineCheck]]:
    """Return the checks by name, where torch has this description, for a sweep into a folder."""

    def seen(folder: Path = tmp_path, **description: Any) -> dict[str, MachineCheck]:
        known = {"torch": "2.13.0", "gpu_count": 0, "cuda": None, **description}
        monkeypatch.setattr(doctor, "own_agent", lambda: None)
        monkeypatch.setattr(machine, "probe", lambda _: (known, Pipe()[0]))
        return {line.what: line for line in machine_checks(folder)}

    return seen


@pytest.mark.slow
def test_doctor_checks_this_machine(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():  # an agent's, for this test alone
        monkeypatch.setenv(name, os.environ.get(name, value))
    shown = command("doctor").out
    assert shown.count("\n") == 7
    lines = {line.what: line for line in machine_checks(tmp_path)}
    assert [*lines] == [line[:15].strip() for line in shown.splitlines()[1:]]
    assert {line.state for line in lines.values()} <= {"ok", "warning"}
    assert all(bool(line.fix) is (line.state != "ok") for line in lines.values())
    assert lines["torch"].state == "ok"
    assert str(tmp_path) in lines["disk"].seen
    assert list(tmp_path.iterdir()) == []


def test_missing_torch_is_bad(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> None:
        raise ConfigError("torch cannot be imported here; see the error above")

    monkeypatch.setattr(doctor, "own_agent", lambda: None)
    monkeypatch.setattr(machine, "probe", gone)
    out = command("doctor", status=1).out
    assert "torch          bad    torch cannot be imported here" in out


H200 = {"gpus": ["H200"] * 4, "cuda": "13.0", "nccl": "2.28"}


@pytest.mark.parametrize(
    ("known", "in_driver", "name", "state", "message"),
    [
        ({"torch": "2.4.1+cu121"}, 0, "torch", "bad", "pip install 'torch>=2.11'"),
        ({"torch": "2.14.0a0+git1234"}, 0, "torch", "ok", "2.14"),
        ({}, 0, "gpus", "ok", "none: cells run on the CPU"),
        ({}, 3, "gpus", "warning", "driver knows 3, torch 2.13.0 none: install a CUDA build of torch"),
        ({"cuda": "13.0"}, 3, "gpus", "warning", "check CUDA_VISIBLE_DEVICES"),
        ({**H200, "gpu_count": 4}, 4, "gpus", "ok", "4 × H200, CUDA 13.0, NCCL 2.28"),
        ({**H200, "gpu_count": 1, "nccl": "2.30.7"}, 1, "gpus", "ok", "1 × H200"),
        ({**H200, "gpu_count": 1}, 1, "gpus", "warning", "for all parallelisms, pip install --target DIR"),
    ],
)
def test_torch_and_gpus(
    known: dict[str, Any],
    in_driver: int,
    name: str,
    state: str,
    message: str,
    lines: Callable[..., dict[str, MachineCheck]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver's GPUs are those that a program named nvidia-smi prints, if there is one that ends."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if in_driver:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "echo GPU\n" * in_driver)
        program.chmod(0o755)
    line = lines(**known)[name]
    assert (line.state, message in f"{line.seen}: {line.fix}") == (state, True), line
    hangs = mock.Mock(side_effect=subprocess.TimeoutExpired("nvidia-smi", 20))
    monkeypatch.setattr(subprocess, "run", hangs)
    assert lines()["gpus"].seen == "none: cells run on the CPU"


def test_scarce_memory_and_full_disks(
    lines: Callable[..., dict[str, MachineCheck]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, of_nobody = lines(), lines(Path("/proc/sys"))["disk"]
    assert {there[name].state for name in ("disk", "shared memory")} == {"ok"}
    assert (of_nobody.state, "cannot be written to" in of_nobody.seen) == ("bad", True)
    memory = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    found = lines(tmp_path / "not" / "there")
    for name, state, message in (
        ("disk", "bad", "1.0 MiB free"),
        ("disk", "bad", "storage.keep_free_bytes"),
        ("shared memory", "warning", "--shm-size"),
        ("memory", "warning", "1.0 GiB of"),
    ):
        line = found[name]
        assert (line.state, message in f"{line.seen}: {line.fix}") == (state, True), line


def test_missing_compiler(
    lines: Callable[..., dict[str, MachineCheck]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if shutil.which("g++"):
        assert lines()["compiler"].state == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "clang++").touch(mode=0o755)  # alone is none: the compiler asks for CXX, else for g++
    compiled = Config(device=Device.cpu, world_size=4, compile=True)
    for name in ("g++", "another"):
        seen = lines()["compiler"].seen
        assert seen == f"no {name}: cells with compile=true are skipped on the CPU"
        why = why_skip(compiled, compiled, Machine(gpus=0, description={}))
        assert f"a C++ compiler, and {name} was not found" in str(why)
        monkeypatch.setenv("CXX", "another")
