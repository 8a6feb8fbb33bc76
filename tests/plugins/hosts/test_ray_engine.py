"""Cells on several simulated nodes of Ray, with real processes, sockets and deaths."""

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conftest import ONE_STEP, SMALL, Finished, alive_in, resume, run, start, wait_for, words_of
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from plugins.hosts.hosts import Hosts, copy_dcpbench, hosts
from support.drivers import plant
from support.s3 import CREDENTIALS, s3_server

pytest.importorskip("ray", reason="make test-multinode installs it")
from dcpbench.plugins.hosts import ray_engine

pytestmark = pytest.mark.multinode

ON_CPU = (*SMALL, "device=cpu", "saves=1")
DIES = (*ON_CPU, "parallel=hsdp2", "world_size=4", "scenario=dies", "scenario.options.rank=3")
LOSSES = ("loss_at_save", "loss_resumed", "loss_continued", "loss_twin")


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def test_cells_have_equal_results_on_two_hosts(two: Hosts, tmp_path: Path) -> None:
    asked = ("-m", *ON_CPU, "parallel=ddp,fsdp2,hsdp2", "world_size=2,4")
    spread = run(tmp_path / "spread", *asked, *two.words)
    here = run(tmp_path / "here", *asked)
    assert [row["status"] for row in spread.rows] == ["pass"] * 6, spread.err
    for row in spread.rows:
        same = here.row(cell=row["cell"])
        assert {name: row[name] for name in LOSSES} == {name: same[name] for name in LOSSES}
        assert row["details"]["checks"].keys() == same["details"]["checks"].keys()
        assert row["config_digest"] == same["config_digest"]
        used = {host["name"]: host["ranks"] for host in row["details"]["hosts"]}
        half = row["world_size"] // 2
        assert used == {"127.0.0.2": [*range(half)], "127.0.0.3": [*range(half, 2 * half)]}
        of_ranks = [(rank["host"], rank["local_rank"]) for rank in row["details"]["ranks"]]
        assert of_ranks == [(name, local) for name in used for local in range(half)]
        assert 0 < row["clock_offset_s"] < 1
    assert same["clock_offset_s"] is None
    assert alive_in(tmp_path) == []


def test_all_hosts_read_checkpoints_in_a_store(
    two: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3_server("tests") as server:
        asked = ("-m", *ON_CPU, "parallel=fsdp2", "save=sync,async", "world_size=4", "storage=fsspec_s3")
        spread = run(tmp_path / "spread", *asked, "keep_checkpoints=all", *server.words, *two.words)
        kept = {name.rsplit("/", 1)[-1] for name in server.objects()}
    assert [row["status"] for row in spread.rows] == ["pass"] * 2, spread.err
    for row in spread.rows:
        assert {rank["host"] for rank in row["details"]["ranks"]} == {"127.0.0.2", "127.0.0.3"}
        checks = ("checkpoint_whole", "files_equal", "files_unchanged")
        assert [row[check] for check in checks] == [True] * 3
    assert kept == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}


def test_trainer_is_loaded_by_new_processes_on_two_hosts(two: Hosts, tmp_path: Path) -> None:
    targets = "workload.target=support.trainers.Trainer,support.trainers.KeepsItInMemory"
    words = ("checkpointer=trainer", "device=cpu", "parallel=ddp", "world_size=2", "saves=1", "retry=0")
    swept = run(tmp_path / "sweep", "-m", targets, *words, *ONE_STEP, *two.words)
    assert [(row["status"], row["restart"]) for row in swept.rows] == [
        ("pass", "process"),
        ("fail", "process"),
    ]
    assert "progress.step" in swept.rows[1]["first_mismatch"]
    assert {rank["host"] for rank in swept.rows[0]["details"]["ranks"]} == {"127.0.0.2", "127.0.0.3"}


@pytest.fixture(scope="module")
def deaths(two: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    ways = "scenario.options.how=not,kill,raises,kills_actor,loops,stops_actor"
    asked = ("-m", *DIES, ways, "scenario.options.phase=load", "scenario.options.once=true")
    folder = tmp_path_factory.mktemp("deaths") / "sweep"
    return run(folder, *asked, "timeouts.load_s=6", "timeouts.cell_s=20", *two.words)


@pytest.mark.parametrize(
    ("how", "was"),
    {
        "kill": r"rank 3 \(local rank 1 of host 127\.0\.0\.3\) was killed by SIGKILL in load",
        "raises": r"rank 3 \(local rank 1 of host 127\.0\.0\.3\) in load: ValueError: planted",
        "kills_actor": r"rank 2 \(local rank 0 of host 127\.0\.0\.3\) was lost with the actor of its "
        r"host, which died, last heard of in \w+",
        "loops": r"after 6 s \(timeouts\.load_s=6\) still in load \(rank .*3\); "
        r".*rank 3 of host 127\.0\.0\.3 at _loops .*",
        "stops_actor": r"rank 2 \(local rank 0 of host 127\.0\.0\.3\) was abandoned with its "
        r"host, which did not answer within 5 s, last heard of in \w+",
    }.items(),
)
def test_first_cause_names_its_host_and_retry_passes(deaths: Finished, how: str, was: str) -> None:
    (row,) = [row for row in deaths.rows if f"how={how} " in row["overrides"]]
    retry = deaths.retries[row["config_digest"]]
    assert row["status"] == {"raises": "error", "loops": "timeout"}.get(how, "crash"), row["reason"]
    assert (row["flaky"], retry["retry_of"], retry["status"]) == (True, 0, "pass"), retry["reason"]
    assert re.fullmatch(f"{was}.*", row["reason"]), row["reason"]


def test_every_cell_has_one_row(deaths: Finished) -> None:
    assert len(deaths.rows) == len({row["cell"] for row in deaths.rows}) == 6
    (healthy,) = [row for row in deaths.rows if "how=not " in row["overrides"]]
    assert (healthy["status"], healthy["flaky"]) == ("pass", None)
    assert alive_in(deaths.folder) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("{other}", "the server there is not a Ray cluster, whose default port is 6379"),
        ("auto", "(RAY_ADDRESS={other}): the server there is not a Ray cluster, whose default port is 6379"),
        ("ray://{other}", "must be HOST:PORT, auto or null"),
        ("127.0.0.1:1", "nothing answers there; must be that of a Ray cluster"),
    ],
)
def test_address_without_a_cluster_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, message: str
) -> None:
    """Without the check, Ray would wait for a server of HTTP/1.0 for ever."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        other = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("RAY_ADDRESS", other)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"executor.address={asked.format(other=other)}"
        ended = run(tmp_path / "sweep", "parallel=ddp", "device=cpu", "executor=ray", address)
        server.shutdown()
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert line.startswith(f"dcpbench: {address}")
    assert message.format(other=other) in line


def test_driver_waits_for_the_requested_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = {"NodeName": "a"}
    engine = ray_engine.RayEngine(ExecutorConfig("ray", "", hosts=2))
    monkeypatch.setattr(ray_engine, "_connect", lambda _: None)
    monkeypatch.setattr(engine, "_actors", list)
    monkeypatch.setattr(ray_engine, "HOSTS_S", 0.0)
    monkeypatch.setattr(ray_engine, "_offering", lambda: [node])
    with pytest.raises(ConfigError, match=r"executor\.hosts=2: not there within 0 s, only a"):
        engine.begin([])
    joining = iter([[], [node], [node, node], [node, node]])
    monkeypatch.setattr(ray_engine, "HOSTS_S", 60.0)
    monkeypatch.setattr(ray_engine, "_offering", lambda: next(joining))
    engine.begin([])
    assert [*engine.agents] == [node, node]


def test_sweep_continues_while_hosts_have_slots(tmp_path: Path) -> None:
    """A cell whose host was lost runs again with a resume."""
    folder, stays = tmp_path / "sweep", tmp_path / "stays"
    asked = ("-m", *DIES, "scenario.options.phase=train", f"scenario.options.unless={stays}")
    with hosts(3) as three:
        room = (*three.words, "executor.ranks_per_host=2")
        ended = run(folder, *asked, "timeouts.cell_s=60", "scenario.options.how=kills_host,not", *room)
        both = [*ended.rows, *ended.retries.values()]
        assert [(row["status"], row["retry_of"]) for row in both] == [("crash", None), ("crash", 0)]
        for host, row in zip((3, 4), both, strict=True):
            where = rf"rank 2 \(local rank 0 of host 127\.0\.0\.{host}\)"
            died = rf"{where} was lost with its host, which died, last heard of in \w+"
            assert re.fullmatch(died, row["reason"]), row["reason"]
        assert ended.status == 1
        left = "4 ranks have no room on the hosts that are left: 127.0.0.2 is"
        assert f"interrupted: 1 of 2 cells done, 1 left: {left}; run: " in ended.err
        three.add()
        stays.touch()
        resumed = resume(folder, *room)
    assert "resume: 1 cell again: it failed for a reason outside it (a host was lost)" in resumed.err
    assert [row["status"] for row in resumed.rows] == ["pass", "pass"], resumed.err
    for row in resumed.rows:
        assert {host["name"] for host in row["details"]["hosts"]} == {"127.0.0.2", "127.0.0.5"}
    assert resumed.retries == {}


def test_cells_for_two_hosts_never_run_on_one(tmp_path: Path) -> None:
    folder, stays = tmp_path / "sweep", tmp_path / "stays"
    unless = f"scenario.options.unless={stays}"
    asked = ("-m", *DIES, "scenario.options.phase=train", unless, "timeouts.cell_s=60")
    with hosts(2) as two:
        words = ("scenario.options.how=kills_host,not", *two.words, "executor.hosts=2")
        soon = partial(plant, "dcpbench.plugins.hosts.hosts_executor", "HOSTS_S", 2.0)
        ended = run(folder, *asked, *words, prepare=soon)
        left = "4 ranks have no room on the hosts that are left (executor.hosts=2): 127.0.0.2 is"
        (row,) = ended.rows
        assert (row["status"], row["details"]["no_retry"]) == ("crash", left), row["reason"]
        assert f"interrupted: 1 of 2 cells done, 1 left: {left}; run: " in ended.err
        two.add(environment=copy_dcpbench(tmp_path / "other", changed=True))
        refused = resume(folder, *two.words)
        assert refused.status == 2
        *_, line = refused.err.splitlines()
        differs = r"dcpbench is .*\w{16} on host 127\.0\.0\.4 and \w{16} on the driver's host"
        assert re.fullmatch(rf"dcpbench: executor=ray: {differs}; must be the same on every host", line), line
        two.remove_newest()
        two.add()
        stays.touch()
        resumed = resume(folder, *two.words)
    assert [row["status"] for row in resumed.rows] == ["pass", "pass"], resumed.err
    assert {host["name"] for host in resumed.rows[1]["details"]["hosts"]} == {"127.0.0.2", "127.0.0.5"}
    assert resumed.rows[1]["config"]["executor.hosts"] == 2


def test_driver_ends_at_once_without_its_cluster(tmp_path: Path) -> None:
    """After a Slurm job is cancelled, Ray would search for its head for a minute, and then end the driver."""
    folder = tmp_path / "sweep"
    ways = ("scenario.options.phase=train", "scenario.options.how=not,sleeps")
    done = Finished(0, "", "", folder)
    with hosts(1) as one:
        driver = start(*words_of(folder, "-m", *DIES, *ways, *one.words, "executor.hosts=1"), cwd=tmp_path)
        wait_for(lambda: len([*folder.glob("*/rank3.log")]) == 2 and len(done.rows) == 1)
        one.kill()
        _, message = driver.communicate(40)
    assert driver.returncode == 1
    assert [row["status"] for row in done.rows] == ["pass", "crash"], message
    assert "was lost with its host, which died" in done.rows[1]["reason"]
