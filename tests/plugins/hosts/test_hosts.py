"""The driver with several hosts, without a real engine: fake agents answer at once."""

import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from conftest import Command, Finished, run
from dcpbench.code.provenance import installation, package_digest
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import RankEnd, StageEnd
from dcpbench.executors.base import HostsLostError, engine_of
from dcpbench.plugins.hosts import hosts_executor, stage_on_hosts
from dcpbench.plugins.hosts.host_agent import HostState
from dcpbench.plugins.hosts.hosts import HostProxy, HostsEngine
from dcpbench.plugins.hosts.hosts_executor import HostsExecutor
from dcpbench.plugins.hosts.placement import spread
from dcpbench.rank.messages import CellSpec, RunId, WorldSpec
from dcpbench.records.store import read_rows
from plugins.hosts.hosts import copy_dcpbench
from support.alone import config
from support.commands import python
from support.pretended_engine import PRETENDED

TWO_RANKS = WorldSpec(2, "cpu", True)
HERE = {"python": platform.python_version(), **installation()}


@dataclass(eq=False)
class Answers(HostProxy):
    """An agent of a host that differs from this one in what it is `like`; it does not tell what is null.

    About a stage it answers with `events`, a list for each call; then it is silent, and dies once the stage
    is concluded.
    """

    like: dict[str, Any] = field(default_factory=dict)
    lacks: str | None = None
    asked: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    silent: list[Future[Any]] = field(default_factory=list)

    def call(self, method: str, *_: Any) -> Future[Any]:
        self.asked.append(method)
        if method in ("run", "events"):
            return self._next_events()
        for silent in self.silent if method == "conclude" else ():
            silent.set_exception(ConnectionError("gone"))
        described = {"host": self.name, "torch": "2.13.0", **HERE, **self.like}
        answers = {
            "target_error": self.lacks,
            "describe": {name: value for name, value in described.items() if value},
            "state": HostState(time.time(), time.monotonic(), True, None),
            "listen": 1,
        }
        call: Future[Any] = Future()
        call.set_result(answers.get(method))
        return call

    def _next_events(self) -> Future[Any]:
        call: Future[Any] = Future()
        if not self.events:
            self.silent.append(call)
        else:
            call.set_result(self.events.pop(0))
        return call

    def why_lost(self, error: BaseException) -> str | None:
        return f"was lost: {error}" if isinstance(error, ConnectionError) else None

    def give_up(self) -> None:
        self.asked.append("give_up")


class Cluster(HostsEngine):
    """The hosts at each refresh of the cluster; the last entry stays."""

    def __init__(self, config: ExecutorConfig, *there: Sequence[Answers]) -> None:
        super().__init__(config)
        self._there: Iterator[Sequence[Answers]] = chain(there, repeat(there[-1]))
        self.agents = there[0]

    def begin(self, modules: Sequence[str]) -> None:
        raise AssertionError("these tests start and end no cluster")

    def refresh(self) -> None:
        self.agents = next(self._there)

    def executor(self, gpus: tuple[int, ...]) -> HostsExecutor:
        return HostsExecutor(self, 0, gpus)

    def end(self) -> None:
        raise AssertionError("these tests start and end no cluster")


def host(name: str, events: Sequence[Any] = (), **like: Any) -> Answers:
    return Answers(name, "127.0.0.1", (), like=like, events=[*events])


def placed(cluster: Cluster, kind: WorldSpec = TWO_RANKS) -> dict[str, range]:
    """Return the placement of the ranks of a cell that starts now."""
    executor = cluster.executor(())
    spec = CellSpec(RunId("tests", "cell", 0), config(), "", "")
    executor._ready(kind, spec)
    return {one.agent.name: one.ranks for one in executor._groups[kind]}


@pytest.mark.parametrize(
    ("world_size", "hosts", "room", "placed"),
    [
        (4, None, {"a": 9, "b": 9}, {"a": range(2), "b": range(2, 4)}),
        (4, None, {"a": 9, "b": 9, "c": 9}, {"a": range(2), "b": range(2, 4)}),
        (3, None, {"a": 1, "b": 1, "c": 1}, {"a": range(1), "b": range(1, 2), "c": range(2, 3)}),
        (4, None, {"a": 1, "b": 4, "c": 2}, {"b": range(2), "c": range(2, 4)}),
        (5, None, {"a": 2, "b": 4}, {"a": range(2), "b": range(2, 5)}),
        (1, None, {"a": 4, "b": 4}, {"a": range(1)}),
        (4, None, {"a": 2}, None),
        (4, None, {}, None),
        (4, 2, {"a": 9, "b": 9, "c": 9}, {"a": range(2), "b": range(2, 4)}),
        (3, 2, {"a": 9, "b": 9}, {"a": range(2), "b": range(2, 3)}),
        (4, 2, {"a": 1, "b": 1, "c": 3}, {"a": range(1), "c": range(1, 4)}),
        (4, 2, {"a": 9}, None),
        (4, 2, {"a": 2, "b": 1, "c": 1}, None),
        (4, 2, {"a": 4, "b": 0}, None),
    ],
)
def test_neighbors_share_the_requested_hosts_evenly(
    world_size: int, hosts: int | None, room: dict[str, int], placed: dict[str, range] | None
) -> None:
    assert spread(world_size, room, hosts) == placed


def test_target_that_a_host_cannot_import_is_refused() -> None:
    a, b = host("a"), host("b")
    cluster = Cluster(ExecutorConfig("ray"), [a, b])
    cluster.probe()
    assert cluster.target_error([config()]) is None
    b.lacks = "ModuleNotFoundError: No module named 'mine'"
    assert cluster.target_error([config()]) == f"{b.lacks} (host b)"
    b.lost = "was lost with its host"
    assert cluster.target_error([config()]) is None, "its cells run on the other"


@pytest.mark.slow
def test_cells_wait_for_the_requested_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = host("a"), host("b")
    assert placed(Cluster(ExecutorConfig("ray"), [a])) == {"a": range(2)}, "no number was requested"
    two = ExecutorConfig("ray", hosts=2)
    assert placed(Cluster(two, [a], [a], [a, b])) == {"a": range(1), "b": range(1, 2)}
    assert placed(Cluster(two, [a]), WorldSpec(1, "cpu", True)) == {"a": range(1)}, "one rank is on one host"
    monkeypatch.setattr(hosts_executor, "HOSTS_S", 0.3)
    lost = "2 ranks have no room on the hosts that are left (executor.hosts=2): a is"
    with pytest.raises(HostsLostError, match=re.escape(lost)):
        placed(Cluster(two, [a]))
    monkeypatch.setattr(hosts_executor, "HOSTS_S", 60.0)
    with pytest.raises(HostsLostError, match=re.escape(lost.replace("a is", "none is"))):
        placed(Cluster(two, []))


def _reported(rank: int) -> StageEnd:
    report = RankReport(rank)
    return StageEnd((RankEnd(rank, 0, "", "report", report=report),))


def _run(executor: HostsExecutor) -> tuple[StageEnd, list[tuple[int, str]]]:
    """Run a stage, and return its ends and the phases that began."""
    phases: list[tuple[int, str]] = []
    spec = CellSpec(RunId("tests", "cell", 0), config(), "", "")
    end = executor.run(TWO_RANKS, spec, TimeoutsConfig(cell_s=60), lambda *phase: phases.append(phase))
    return end, phases


def test_stage_ends_when_each_host_has_reported() -> None:
    a = host("a", events=[[(0, "train")], [], [(0, "save"), _reported(0)]])
    b = host("b", events=[[], [(1, "train")], [_reported(1)]])
    end, phases = _run(Cluster(ExecutorConfig("ray"), [a, b]).executor(()))
    assert end.is_complete
    assert sorted(phases) == [(0, "save"), (0, "train"), (1, "train")]
    assert [(one.name, one.ranks) for one in end.hosts] == [("a", (0,)), ("b", (1,))]
    assert "conclude" not in a.asked + b.asked


def test_failure_on_a_host_ends_the_stage_on_others() -> None:
    failed = RankEnd(0, 0, "a", "train", exited_at=time.monotonic(), exit_status=-9)
    a = host("a", events=[[StageEnd((failed,))]])
    b = host("b", events=[[(1, "load")]])
    end, _ = _run(Cluster(ExecutorConfig("ray"), [a, b]).executor(()))
    killed, lost = end.ranks
    assert (killed.exit_status, killed.lost) == (-9, None)
    assert (lost.phase, lost.lost) == ("load", "was lost: gone")
    assert lost.exited_at is not None
    assert lost.exited_at < time.monotonic() - 1, "its ranks ended before anybody saw that it had"


def test_late_answer_of_a_silent_agent_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_on_hosts, "_SILENT_S", 0.5)
    a = host("a", events=[[(0, "save")]])
    b = host("b", events=[[], [], [_reported(1)], [], [_reported(1)]])
    c = host("c", events=[[(0, "train")], [_reported(0)]])
    executor = Cluster(ExecutorConfig("ray", hosts=2), [a, b], [c, b]).executor(())
    end, phases = _run(executor)
    given_up = "was abandoned with its host, which did not answer within 0.5 s, last heard of"
    assert [(one.phase, one.lost) for one in end.ranks] == [("save", given_up), ("report", None)]
    assert "give_up" in a.asked

    (late,) = a.silent
    late.set_result([(0, "load")])
    end, phases = _run(executor)
    assert end.is_complete
    assert phases == [(0, "train")]
    assert end.dropped == ("host a: a late answer was dropped: cell, epoch 1",)


@pytest.mark.slow
def test_delayed_driver_gives_up_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_on_hosts, "_SILENT_S", 2.0)
    a, b = host("a"), host("b", events=[[(1, "train")], [_reported(1)]])

    def hold_up(*_: Any) -> None:
        time.sleep(2.5)
        threading.Timer(0.5, a.silent[0].set_result, [[_reported(0)]]).start()

    executor = Cluster(ExecutorConfig("ray"), [a, b]).executor(())
    spec = CellSpec(RunId("tests", "cell", 0), config(), "", "")
    assert executor.run(TWO_RANKS, spec, TimeoutsConfig(cell_s=60), hold_up).is_complete


@pytest.mark.parametrize(
    ("like", "differs"),
    [
        ({"dcpbench": "1234"}, f"dcpbench is 1234 on host b and {HERE['dcpbench']} on the driver's host"),
        ({"dcpbench": None}, f"dcpbench is not known on host b and {HERE['dcpbench']} on the driver's host"),
        ({"python": "3.9"}, f"Python is 3.9 on host b and {HERE['python']} on the driver's host"),
        ({"plugins": "own 12"}, f"plug-ins is own 12 on host b and {HERE['plugins']} on the driver's host"),
        ({"torch": "2.11.0"}, "torch is 2.11.0 on host b and 2.13.0 on host a"),
    ],
)
def test_host_with_other_code_is_refused(like: dict[str, Any], differs: str) -> None:
    a, b = host("a"), host("b", **like)
    message = re.escape(f"{differs}; must be the same on every host")
    with pytest.raises(ConfigError, match=f"executor=ray: {message}"):
        Cluster(ExecutorConfig("ray"), [a, b]).probe()
    late = Cluster(ExecutorConfig("ray"), [a], [a, b])
    described = late.probe().description
    assert described.keys().isdisjoint({"dcpbench", "plugins"})
    assert described["hosts"][0]["dcpbench"] == HERE["dcpbench"]
    late.refresh()
    with pytest.raises(HostsLostError, match=message):
        placed(late)
    assert "start" not in b.asked
    assert placed(late, WorldSpec(1, "cpu", True)) == {"a": range(1)}, "host b is not needed"


def installed(variables: dict[str, str]) -> str:
    """Return the digest of the dcpbench that a process with these variables imports."""
    asks = "from dcpbench.code.provenance import installation; print(installation()['dcpbench'])"
    return python("-P", "-c", asks, env=variables, check=True).stdout.strip()


@pytest.mark.slow
def test_digest_covers_sources_and_conf(tmp_path: Path) -> None:
    variables = copy_dcpbench(tmp_path)
    digests = [installed(variables)]
    assert digests == [HERE["dcpbench"]]
    for name in ("conf/save/async.yaml", "src/dcpbench/compare/leaves.py"):
        with (tmp_path / name).open("a") as file:
            file.write("\n# changed\n")
        digests.append(installed(variables))
    assert len({*digests}) == 3


def test_plugins_are_described_with_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DCPBENCH_PLUGINS", "an_own_plugin")
    seen = set()
    code = "from dcpbench.core.plugins import Plugin\nplugin = Plugin(name='own', api=1)\n"
    for text in (code, f"{code}# changed\n"):
        (tmp_path / "an_own_plugin.py").write_text(text)
        package_digest.cache_clear()
        seen.add(installation()["plugins"])
    assert len(seen) == 2
    assert all(re.fullmatch(r"an_own_plugin \w{16}", one) for one in seen), seen


def test_driver_of_many_hosts_does_not_import_torch() -> None:
    names = ("hosts", "hosts_executor", "stage_on_hosts", "host_agent", "placement")
    imported = ", ".join(f"dcpbench.plugins.hosts.{name}" for name in names)
    asks = f"import sys, {imported}; print('torch' in sys.modules)"
    done = python("-c", asks, check=True)
    assert done.stdout == "False\n"


HOSTS = (PRETENDED, "executor.hosts=2")
CELLS = ("-m", "device=cpu", "parallel=none", "world_size=1,2")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep whose cells request two hosts."""
    folder = tmp_path_factory.mktemp("hosts") / "night"
    ended = run(folder, *CELLS, *HOSTS)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.slow
def test_requested_hosts_are_part_of_the_cell(asked: Finished, command: Command) -> None:
    rows, _ = read_rows(asked.folder)
    hosts = {row["world_size"]: row["config"].get("executor.hosts") for row in rows}
    assert hosts == {1: None, 2: 2}
    other = asked.folder.parent / "other"
    assert run(other, *CELLS, PRETENDED).status == 0
    compare = ("compare", other, asked.folder, "--fail-on", "vanished,new")
    assert "No cell is in both" not in command(*compare, status=1).out
    command(*compare, "--ignore", "executor.hosts")
    assert "1 cell not in the newest sweep" in command("history", other.parent).out


@pytest.mark.slow
def test_hosts_of_a_local_sweep_are_refused(refused: Callable[..., str]) -> None:
    why = "dcpbench: executor.hosts=2: executor=local runs on this host only; choose another executor"
    assert why in refused("parallel=ddp", "device=cpu", "executor.hosts=2")


def test_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "dcpbench.plugins.hosts.ray_engine"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    why = "executor=ray: needs the package ray; pip install 'dcpbench[ray]'"
    with pytest.raises(ConfigError, match=f"^{re.escape(why)}$"):
        engine_of(ExecutorConfig(name="ray", target=f"{module}.RayEngine"))
