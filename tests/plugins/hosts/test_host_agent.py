"""Two agents of two hosts in one process; their ranks rendezvous by address."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcpbench.code.provenance import installation
from dcpbench.config.schema import Config, TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.plugins.hosts import host_agent
from dcpbench.plugins.hosts.host_agent import Event, HostAgent, HostEnvironment
from dcpbench.rank.messages import CellSpec, RunId, StoreAddress, WorldSpec
from support import drivers
from support.alone import config

KEY = (0, WorldSpec(2, "cpu", True))
LIMITS = TimeoutsConfig(cell_s=60)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostAgent]]:
    monkeypatch.setattr(host_agent, "own_agent", lambda _: drivers.first)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo")
    monkeypatch.setattr(sys, "path", [*sys.path])
    around = HostEnvironment(str(Path.cwd()), tuple(sys.path), {})
    made = [HostAgent(f"host{number}", f"127.0.0.{2 + number}", around, ()) for number in range(2)]
    at = StoreAddress("127.0.0.2", made[0].listen(0))
    for number, agent in enumerate(made):
        agent.start(KEY, [number], [], at)
    yield made
    for agent in made:
        agent.kill(KEY)


def _spec(folder: Path, given: Config) -> CellSpec:
    (folder / "checkpoints").mkdir(parents=True)
    return CellSpec(RunId("tests", "cell", 0), given, str(folder), str(folder / "checkpoints"))


def _run(agent: HostAgent, epoch: int, spec: CellSpec) -> list[Event]:
    """Run a stage, and return all of its events."""
    events = agent.run(epoch, KEY, spec, LIMITS)
    while not (events and isinstance(events[-1], StageEnd)):
        events += agent.events(epoch)
    return events


def test_agents_run_a_stage_unless_it_is_concluded(agents: list[HostAgent], tmp_path: Path) -> None:
    spec = _spec(tmp_path / "cell", config(world_size=2, parallel="ddp", model="short", saves=1))
    with ThreadPoolExecutor() as threads:
        events = [*threads.map(lambda agent: _run(agent, 1, spec), agents)]
    for number, (*phases, _) in enumerate(events):
        assert {rank for rank, *_ in phases} == {number}, "each agent reports the ranks that it has"
        assert {"train", "save", "load"} <= {phase for _, phase, *_ in phases}
    reports = [rank.report for *_, end in events for rank in end.ranks]
    assert [(one.rank, one.host, one.local_rank) for one in reports if one] == [
        (0, "host0", 0),
        (1, "host1", 0),
    ]
    assert all(agent.state(KEY, [str(tmp_path)]).usable for agent in agents)
    described = agents[1].describe()
    assert {name: described[name] for name in ("dcpbench", "plugins")} == installation()
    missing = "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    for target, why in (("math.tau", "is of type float; name a function"), ("nowhere.build", missing)):
        assert agents[1].target_error([config(workload={"target": target})]) == why

    agents[1].conclude(2, dumps=False)
    again = _spec(tmp_path / "again", spec.config)
    assert _run(agents[1], 2, again) == [StageEnd()]
    concluding = threading.Timer(0.5, agents[0].conclude, (2, True))
    concluding.start()
    *_, end = _run(agents[0], 2, again)
    (waiting,) = end.ranks
    assert (waiting.waiting, waiting.report, end.limit) == (True, None, None)
    assert waiting.doing, "its stack was dumped"
    assert not any((tmp_path / "again" / "checkpoints").iterdir())


def test_late_folder_is_awaited_or_reported(
    agents: list[HostAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "cell"
    shows = threading.Timer(0.3, late.mkdir)
    shows.start()
    assert agents[0].state(KEY, [str(tmp_path), str(late)]).unseen is None
    shows.join()
    monkeypatch.setattr(host_agent, "_APPEARS_S", 0.2)
    never = str(tmp_path / "of another host" / "cell")
    assert agents[0].state(KEY, [str(late), never]).unseen == never
