"""Doctor reports what the machine lacks, and how to fix it."""

import json
import os
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from dcpbench.cli import doctor
from dcpbench.cli.commands import main
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Device
from dcpbench.config.schema import Config
from dcpbench.executors import fork_server
from dcpbench.executors.fork_server import Machine
from dcpbench.sweep.validity import why_skip


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def of_torch(**other: Any) -> dict[str, Any]:
    return {"torch": "2.13.0", "gpu_count": 0, "cuda": None, **other}


@pytest.mark.slow
def test_doctor_checks_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which runs the tests."""
    status = main(["doctor", "--folder", str(tmp_path / "later")])
    shown = capsys.readouterr().out
    assert 8 <= shown.count("\n") <= 12
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) == status == 0
    lines = {line["what"]: line for line in json.loads(capsys.readouterr().out)}
    assert [*lines] == [line[:15].strip() for line in shown.splitlines()]
    assert {line["state"] for line in lines.values()} <= {"ok", "warning"}
    assert all(bool(line["fix"]) is (line["state"] != "ok") for line in lines.values())
    assert lines["torch"]["state"] == "ok"
    assert str(tmp_path) in lines["disk"]["seen"]
    assert list(tmp_path.iterdir()) == []


def test_missing_torch_is_bad(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def gone(_: object) -> None:
        raise ConfigError("torch cannot be imported here; see the error above")

    monkeypatch.setattr(fork_server, "fork_server", lambda: None)
    monkeypatch.setattr(fork_server, "probe", gone)
    assert main(["doctor"]) == 1
    assert "torch          bad      torch cannot be imported here" in capsys.readouterr().out


def test_an_old_torch_is_bad() -> None:
    line = doctor._torch(of_torch(torch="2.4.1+cu121"))
    assert (line.state, line.fix) == ("bad", "pip install 'torch>=2.11'")
    assert doctor._torch(of_torch(torch="2.14.0a0+git1234")).state == "ok"


@pytest.mark.parametrize(
    ("known", "in_driver", "state", "message"),
    [
        (of_torch(), 0, "ok", "none: cells run on the CPU"),
        (of_torch(), 3, "warning", "driver knows 3, torch 2.13.0 none: install a CUDA build of torch"),
        (of_torch(cuda="13.0"), 3, "warning", "check CUDA_VISIBLE_DEVICES"),
        (of_torch(gpu_count=4, gpus=["H200"] * 4, cuda="13.0", nccl="2.28"), 4, "ok", "NCCL 2.28"),
        (of_torch(gpu_count=1, gpus=["H200"], nccl="2.30.7"), 1, "ok", "1 × H200"),
        (
            of_torch(gpu_count=1, gpus=["H200"], nccl="2.28.9", cuda="12.8"),
            1,
            "warning",
            "for all parallelisms, pip install --target DIR 'nvidia-nccl-cu12>=2.30'",
        ),
    ],
)
def test_gpus_of_torch_and_of_the_driver(
    known: dict[str, Any],
    in_driver: int,
    state: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver's are those that a program named nvidia-smi prints, if there is one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if in_driver:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "echo GPU\n" * in_driver)
        program.chmod(0o755)
    line = doctor._gpus(known)
    assert (line.state, message in f"{line.seen}: {line.fix}") == (state, True), line


def test_full_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._disk(tmp_path).state == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 2**20))
    line = doctor._disk(tmp_path / "not" / "there")
    assert line.state == "bad"
    assert "1.0 MiB free" in line.seen
    assert "storage.keep_free_bytes" in line.seen


def test_a_read_only_folder_is_bad() -> None:
    line = doctor._disk(Path("/proc/sys"))
    assert (line.state, "cannot be written to" in line.seen) == ("bad", True)


def test_scarce_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._shared_memory(tmp_path).state == "ok"
    assert doctor._shared_memory(tmp_path / "nowhere").state == "bad"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    line = doctor._shared_memory(tmp_path)
    assert (line.state, "--shm-size" in line.fix) == ("warning", True)


def test_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if shutil.which("g++"):
        assert doctor._compiler().state == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    compiled = Config(device=Device.cpu, world_size=4, compile=True)
    for name in ("g++", "another"):  # clang++ alone is none: the compiler asks for CXX, else for g++
        (tmp_path / "clang++").touch(mode=0o755)
        assert doctor._compiler().seen == f"no {name}: cells with compile=true are skipped on the CPU"
        assert f"a C++ compiler, and {name} was not found" in str(
            why_skip(compiled, compiled, Machine(gpus=0, description={}))
        )
        monkeypatch.setenv("CXX", "another")
    monkeypatch.delenv("CXX")


def test_missing_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._loopback().state == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    assert "no interface eth77" in doctor._loopback().seen
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refused)
    line = doctor._loopback()
    assert (line.state, "Operation not permitted" in line.seen) == ("bad", True)


def test_scarce_memory_cores_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert (doctor._memory().state, "1.0 GiB of" in doctor._memory().seen) == ("warning", True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert doctor._processors().state == "warning"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    line = doctor._limit("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 65536")
    assert (line.state, line.seen) == ("warning", "at most 256 (this user can set 4,096)")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert doctor._limit("open files", 7, 1024, "").seen == "unlimited"


def test_a_hanging_nvidia_smi_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*words: object, **how: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", how["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert doctor._gpus_of_the_driver() == []
