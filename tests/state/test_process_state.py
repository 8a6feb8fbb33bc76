"""State of the process that a save or a load must not change: each change is reported by its name."""

import gc
import os
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
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
from dcpbench.cell.side_effects import open_before
from dcpbench.compare.leaves import compare
from dcpbench.state import process_state
from dcpbench.state.process_state import ProcessState
from dcpbench.state.snapshot import Leaves
from dcpbench.workloads.generators import states_of_generators
from support.alone import bare_cell

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
    return ProcessState.leaves(states_of_generators(device), device)


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


def added_since(before: ProcessState) -> dict[str, list[str]]:
    resources = ProcessState.now(CPU).minus(before).resources
    return {kind: sorted(names.elements()) for kind, names in resources.items()}


@pytest.mark.slow
def test_connections_of_others_are_not_counted(mesh: DeviceMesh) -> None:
    """Another process connects to the port at which gloo waits for peers, and gloo accepts it."""
    port = next(one.laddr.port for one in connected() if one.status == psutil.CONN_LISTEN)
    with subprocess.Popen([sys.executable, "-c", STRANGER], stdin=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdin
        before = ProcessState.now(CPU)
        print(port, file=stranger.stdin, flush=True)
        wait_for(lambda: any(one.laddr.port == port and one.raddr for one in connected()))
        assert added_since(before) == {}
        with socket.create_server(("127.0.0.1", 0)):
            (added,) = added_since(before)["descriptors"]
            assert added.startswith("socket:")
        stranger.communicate("\n")


def test_each_device_has_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.arange(3, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    assert "generator.cuda" not in observed(CPU)
    before = observed(torch.device("cuda"))
    state[0] += 1
    found = compare(before, observed(torch.device("cuda")))
    assert [finding.name for finding in found] == ["generator.cuda"]


def test_resources_are_listed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(tmp_path / name) for name in ("b", "c", "a")]
    with ExitStack() as stack:
        files = [stack.enter_context(Path(name).open("w", encoding="utf-8")) for name in names]
        opened = ProcessState.now(CPU).resources
        assert {name for name in opened["open_files"] if name.startswith(str(tmp_path))} == {*names}
        assert opened["threads"].total() >= 1
        assert opened["descriptors"].total() >= 3
        # One of them is closed by now.
        numbers = [str(file.fileno()) for file in files]
        monkeypatch.setattr(os, "listdir", lambda _: [*numbers, "987654"])
        assert ProcessState.now(CPU).resources["open_files"] == Counter(names)
    assert ProcessState.now(CPU).resources["open_files"] == Counter()


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


def left_open(folder: Path, again: bool, change: Callable[[], object]) -> dict[str, str]:
    """What a save leaves open that makes a change, and what the check reports of it."""
    compared = open_before(bare_cell(folder), again)
    change()
    return {finding.name: finding.facts["actual"] for finding in compared().found}


def test_closing_threads_are_waited_for(tmp_path: Path, clock: Clock) -> None:
    def begin() -> None:
        file = (tmp_path / "file").open("w", encoding="utf-8")
        clock.at = clock.now + 0.5, file.close

    assert left_open(tmp_path, False, begin) == {}
    assert 0.5 <= clock.now < 0.6, "it is looked at often"


def test_lasting_descriptors_are_reported(tmp_path: Path, clock: Clock) -> None:
    folder, beside = tmp_path / "folder", tmp_path / "folder-beside"
    folder.mkdir()
    with ExitStack() as stack:

        def begin() -> None:
            for path in (folder / "file", beside):
                stack.enter_context(path.open("w", encoding="utf-8"))

        assert left_open(folder, False, begin) == {"process.open_files": str([str(folder / "file")])}
    assert 1 < clock.now < 5


class Holder:
    """A file in a reference cycle, which is closed when it is collected."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.itself = file, self

    def __del__(self) -> None:
        self.file.close()


def test_files_of_garbage_are_not_left_open(tmp_path: Path) -> None:
    before = ProcessState.now(CPU)
    gc.disable()
    try:
        Holder((tmp_path / "file").open("w", encoding="utf-8"))
        assert added_since(before)["open_files"] == [str(tmp_path / "file")]
        assert left_open(tmp_path, False, lambda: Holder((tmp_path / "other").open("w"))) == {}
        assert added_since(before) == {}
    finally:
        gc.enable()


def test_threads_and_descriptors_are_counted_from_the_second_save_on(tmp_path: Path, clock: Clock) -> None:
    ended = threading.Event()
    with ExitStack() as stack:

        def begin() -> None:
            threading.Thread(target=ended.wait, name="idle").start()
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        assert left_open(tmp_path, False, begin) == {}
        found = left_open(tmp_path, True, begin)
        ended.set()
    assert found.keys() == {"process.threads", "process.descriptors"}
    assert "idle (" in found["process.threads"]
    assert "socket:" in found["process.descriptors"]


@pytest.mark.parametrize("kind", ["threads", "descriptors", "processes", "open_files"])
def test_only_additions_are_reported(kind: str) -> None:
    """A thread or descriptor in place of another one is none; a file with another name is."""
    state = {kind: Counter() for kind in ProcessState.now(CPU).resources}
    two, more = (ProcessState({}, state | {kind: Counter(names)}) for names in ("ab", "abb"))
    for less in ("", "a", "ab"):
        assert ProcessState({}, state | {kind: Counter(less)}).minus(two).resources == {}
    assert more.minus(two).resources == {kind: Counter("b")}
    other = ProcessState({}, state | {kind: Counter("ac")}).minus(two).resources
    assert other == ({} if kind in ("threads", "descriptors") else {kind: Counter("c")})


def test_changed_settings_are_reported() -> None:
    before = ProcessState({"a": 1, "b": 2, "c": 3}, {})
    assert ProcessState({"a": 1, "b": 3, "d": 4}, {}).minus(before).settings == {"b": 3, "c": None, "d": 4}
