"""State of the process that a save or a load must not change: each change is reported by its name."""

import gc
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from conftest import wait_for
from dcpbench.verify import process_state
from dcpbench.verify.compare import compare
from dcpbench.verify.process_state import left_open, snapshot_open, snapshot_process
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.generators import states_of_generators

CPU = torch.device("cpu")
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "generator.cpu": (lambda: torch.rand(1), lambda: None),
    "generator.python": (random.random, lambda: None),
    "generator.numpy": (lambda: np.random.randint(2), lambda: None),
    "process.cudnn_benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: setattr(torch.backends.cudnn, "benchmark", False),
    ),
    "process.float32_precision": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "process.grad_mode": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "process.default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "process.default_device": (
        lambda: torch.set_default_device("meta"),
        lambda: torch.set_default_device(None),
    ),
}


def observed(device: torch.device) -> Leaves:
    return snapshot_process(states_of_generators(device), device)


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_reported_by_name(name: str) -> None:
    change, undo = CHANGES[name]
    before = observed(CPU)
    assert compare(before, observed(CPU)) == []
    try:
        change()
        assert [finding.name for finding in compare(before, observed(CPU))] == [name]
    finally:
        undo()


def test_precision_of_one_kind_is_reported() -> None:
    """With the setting that torch 2.9 recommends, after which the older functions raise."""
    before = observed(CPU)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        (finding,) = compare(before, observed(CPU))
        assert finding.name == "process.float32_precision"
        assert "cuda.matmul tf32, " in finding.facts["actual"]
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert compare(before, observed(CPU)) == []


def connected() -> Iterator[Any]:
    """The TCP sockets of this process."""
    yield from psutil.Process().net_connections("tcp")


STRANGER = """
import socket
at = socket.create_connection(("127.0.0.1", int(input())))
input()
"""


@pytest.mark.slow
def test_connections_of_others_are_not_counted(tmp_path: Path, mesh: DeviceMesh) -> None:
    """Another process connects to the port at which gloo waits for peers, and gloo accepts it."""
    port = next(one.laddr.port for one in connected() if one.status == psutil.CONN_LISTEN)
    with subprocess.Popen([sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdin
        before = snapshot_open(tmp_path, counts=True)
        print(port, file=stranger.stdin, flush=True)
        wait_for(lambda: any(one.laddr.port == port and one.raddr for one in connected()))
        assert left_open(tmp_path, before) == before
        with socket.create_server(("127.0.0.1", 0)):
            assert left_open(tmp_path, before)["process.descriptors"] == before["process.descriptors"] + 1
        stranger.communicate("\n")


def test_each_device_has_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.arange(3, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    assert "generator.cuda" not in observed(CPU)
    before = observed(torch.device("cuda"))
    state[0] += 1
    found = compare(before, observed(torch.device("cuda")))
    assert [finding.name for finding in found] == ["generator.cuda"]


def test_open_files_below_a_folder_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    names = [str(folder / name) for name in ("b", "c", "a")]
    with ExitStack() as stack:
        *files, beside = (
            stack.enter_context(Path(name).open("w", encoding="utf-8"))
            for name in (*names, tmp_path / "folder-beside")
        )
        opened = snapshot_open(folder, counts=True)
        assert opened["process.open_files"] == sorted(names)
        assert opened["process.threads"] >= 1
        assert opened["process.descriptors"] >= 4
        assert list(snapshot_open(folder, counts=False)) == ["process.open_files"]
        # In any order; one of them is closed by now.
        numbers = [str(file.fileno()) for file in (*files, beside)]
        monkeypatch.setattr(os, "listdir", lambda _: [*numbers[:2], "987654", *numbers[:1:-1]])
        assert snapshot_open(folder, counts=False) == {"process.open_files": sorted(names)}
    assert snapshot_open(folder, counts=False) == {"process.open_files": []}


class Clock:
    """A clock that advances on `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: tuple[float, Callable[[], object]] | None = None

    def monotonic(self) -> float:
        self.now += 1e-4
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.at and self.now >= self.at[0]:
            self.at[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Without garbage collections, which are slow if much is imported."""
    clock = Clock()
    monkeypatch.setattr(gc, "collect", lambda: None)
    monkeypatch.setattr(process_state, "time", clock)
    return clock


def test_closing_threads_are_waited_for(tmp_path: Path, clock: Clock) -> None:
    before = snapshot_open(tmp_path, counts=False)
    with (tmp_path / "file").open("w", encoding="utf-8") as file:
        clock.at = 0.5, file.close
        assert left_open(tmp_path, before) == before
    assert 0.5 <= clock.now < 0.6, "it is looked at often"


def test_lasting_descriptors_are_reported(tmp_path: Path, clock: Clock) -> None:
    before = snapshot_open(tmp_path, counts=False)
    with (tmp_path / "file").open("w", encoding="utf-8"):
        assert left_open(tmp_path, before) == {"process.open_files": [str(tmp_path / "file")]}
    assert 1 < clock.now < 5


class Holder:
    """A file in a reference cycle, which is closed when it is collected."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.itself = file, self

    def __del__(self) -> None:
        self.file.close()


def test_files_of_garbage_are_not_left_open(tmp_path: Path) -> None:
    before = snapshot_open(tmp_path, counts=False)
    gc.disable()
    try:
        Holder((tmp_path / "file").open("w", encoding="utf-8"))
        assert snapshot_open(tmp_path, counts=False) != before
        assert left_open(tmp_path, before) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["process.open_files", "process.threads", "process.descriptors"])
def test_only_more_open_files_are_reported(
    name: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: Leaves = {"process.open_files": ["/a"], "process.threads": 5, "process.descriptors": 5}
    less: Leaves = {"process.open_files": [], "process.threads": 4, "process.descriptors": 4}
    more: Leaves = {"process.open_files": ["/a", "/b"], "process.threads": 6, "process.descriptors": 6}
    now = {**less, name: more[name]}
    monkeypatch.setattr(process_state, "snapshot_open", lambda folder, counts: now)
    assert left_open(tmp_path, before) == {**before, name: more[name]}


@pytest.mark.parametrize(
    ("now", "reported"),
    [
        (["/b", "/c"], False),
        (["/c"], False),
        (["/a", "/b", "/c"], True),
        (["/a", "/c"], True),
        (["/b", "/d"], True),
        (["/b", "/b", "/c"], True),
    ],
)
def test_files_opened_in_addition_are_reported(
    now: list[str], reported: bool, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their names, and whatever was closed meanwhile."""
    monkeypatch.setattr(process_state, "snapshot_open", lambda folder, counts: {"process.open_files": now})
    left = left_open(tmp_path, {"process.open_files": ["/b", "/c"]})
    assert left == {"process.open_files": now if reported else ["/b", "/c"]}
