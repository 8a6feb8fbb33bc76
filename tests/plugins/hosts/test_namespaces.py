"""Cells on two hosts of Ray that have separate addresses, clocks, folders and a link: network namespaces."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, Finished, alive_in, blocks, run, wait_for, words_of
from plugins.hosts.hosts import RayDaemons, ended, ray_in
from plugins.hosts.namespaces import Namespace, cut, end, namespaces, processes_in, slowly_linked, up

pytest.importorskip("ray", reason="make test-multinode installs it")

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]

AHEAD_S = 3600
DELAY_S = 0.02
LOSSES = ("loss_at_save", "loss_resumed", "loss_continued", "loss_twin")
ON_CPU = (*SMALL, "device=cpu", "saves=1")
DIES = (*ON_CPU, "parallel=hsdp2", "world_size=4", "scenario=dies", "scenario.options.rank=3")
IN_SAVE = (*DIES, "scenario.options.phase=save", "timeouts.save_s=6")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Namespace]]:
    with namespaces() as made:
        yield made


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that only the second host can access."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def ray(hosts: list[Namespace], own: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayDaemons]:
    """Two hosts; the second has a private folder, and clocks that are ahead."""
    here, clock = tmp_path_factory.mktemp("ray"), tmp_path_factory.mktemp("clock")
    shifted = f"import time\nhonest = time.time\ntime.time = lambda: honest() + {AHEAD_S}\n"
    (clock / "sitecustomize.py").write_text(shifted)
    other = f'mount -t tmpfs own {own} && export PYTHONPATH={clock}:$PYTHONPATH && exec "$@"'
    apart = ("unshare", "--time", f"--monotonic={AHEAD_S}", "--fork", "--kill-child", "sh", "-c", other, "sh")
    with ray_in([hosts[0], replace(hosts[1], also=apart)], here) as made:
        yield made


@pytest.fixture(scope="module")
def swept(ray: RayDaemons, own: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep in which the link to a host is cut, and restored."""
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    ways = itertools.product(("cuts_link", "not"), (None, str(own)))
    cells = blocks(
        {"seed": seed, "scenario.options.how": how, "storage.root": root}
        for seed, (how, root) in enumerate(ways)
    )
    asked = ("retry=0", "executor.hosts=2", *cells)
    driver = ray.driver(folder, *words_of(folder, "-m", *IN_SAVE, *asked))
    wait_for(lambda: bool(Finished(0, "", "", folder).rows))
    _come_back(ray, ray.hosts[1])
    return ended(driver, folder)


def _come_back(ray: RayDaemons, host: Namespace) -> None:
    end(host)
    wait_for(lambda: not processes_in(host))
    up(host)
    ray.start(host)


def _row(swept: Finished, how: str, root: Path | None = None) -> dict[str, Any]:
    wanted = {f"scenario.options.how={how}", f"storage.root={root or 'null'}"}
    found = [row for row in swept.rows if wanted <= {*row["overrides"].split()}]
    assert len(found) == 1, (swept.rows, swept.err)
    return found[0]


def _given_up(host: Namespace) -> str:
    """Return a pattern of the reason of a stage on a disconnected host."""
    where = rf"rank 2 \(local rank 0 of host {re.escape(host.address)}\)"
    return rf"{where} was abandoned with its host, which did not answer within 5 s, last heard of in \w+"


def test_link_cut_in_a_save_costs_one_row(swept: Finished, hosts: list[Namespace]) -> None:
    cut, later = _row(swept, "cuts_link"), _row(swept, "not")
    assert re.fullmatch(_given_up(hosts[1]), str(cut["reason"])), cut["reason"]
    assert (cut["status"], later["status"]) == ("crash", "pass"), later["reason"]
    used = {host["name"]: host["ranks"] for host in later["details"]["hosts"]}
    assert used == {hosts[0].address: [0, 1], hosts[1].address: [2, 3]}
    assert later["config"]["parallel.dp_replicate"] == 2


def test_clocks_of_hosts_are_compared(swept: Finished) -> None:
    row = _row(swept, "not")
    assert row["clock_offset_s"] == pytest.approx(AHEAD_S, abs=1)


def test_folder_that_is_not_shared_is_a_skip(swept: Finished, hosts: list[Namespace], own: Path) -> None:
    for how in ("cuts_link", "not"):
        row = _row(swept, how, own)
        assert row["status"] == "skip"
        assert f"host {hosts[1].address} does not see" in str(row["reason"])


def test_disconnected_host_leaves_the_retry_alone(
    ray: RayDaemons, swept: Finished, hosts: list[Namespace], tmp_path: Path
) -> None:
    once = ("scenario.options.how=writes_late", "scenario.options.once=true")
    ended = ray.run(tmp_path / "sweep", *words_of(tmp_path / "sweep", *IN_SAVE, *once))
    row = ended.row(scenario="dies")
    retry = ended.retries[row["config_digest"]]
    assert (row["status"], row["flaky"], retry["status"]) == ("crash", True, "pass"), row["reason"]
    assert re.fullmatch(_given_up(hosts[1]), str(row["reason"]))
    wrote = ended.folder / row["cell"] / "late"
    wait_for(wrote.exists)
    assert {host["name"] for host in retry["details"]["hosts"]} == {hosts[0].address}
    _come_back(ray, ray.hosts[1])


def test_killed_driver_leaves_no_ranks_and_resumes(ray: RayDaemons, swept: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    sleeps = ("scenario.options.how=not,sleeps", "scenario.options.phase=train", "scenario.options.once=true")
    asked = words_of(folder, "-m", *DIES, *sleeps, "executor.hosts=2", "timeouts.cell_s=10")
    driver = ray.driver(folder, *asked)
    wait_for(lambda: len([*folder.glob("*/rank3.log")]) == 2 and len(alive_in(folder)) >= 5)
    (first,) = Finished(0, "", "", folder).rows
    driver.kill()
    driver.wait()
    wait_for(lambda: not alive_in(folder))
    resumed = ray.run(folder, "resume", str(folder))
    assert "resume: 1 of 2 cells are done" in resumed.err
    assert resumed.rows[0] == first
    assert [row["status"] for row in resumed.rows] == ["pass", "timeout"], resumed.err
    assert [row["status"] for row in resumed.retries.values()] == ["pass"], resumed.err


def test_disconnected_processes_exit_on_their_own(
    ray: RayDaemons, swept: Finished, hosts: list[Namespace], tmp_path: Path
) -> None:
    """The head of the cluster and the driver have exited, and a host is disconnected from both."""
    _come_back(ray, hosts[1])  # with honest clocks, by which a daemon finds its head gone
    folder = tmp_path / "sweep"
    sleeps = ("scenario.options.how=sleeps", "scenario.options.phase=train")
    driver = ray.driver(folder, *words_of(folder, *DIES, *sleeps, "executor.hosts=2"))
    wait_for(lambda: any(folder.glob("*/rank3.log")) and len(alive_in(folder)) >= 5)
    cut(hosts[1])
    end(hosts[0])
    driver.wait()
    wait_for(lambda: not processes_in(hosts[1]))
    up(hosts[1])


def test_slow_lossy_link_changes_no_verdict(tmp_path: Path) -> None:
    asked = ("-m", *ON_CPU, "parallel=fsdp2,hsdp2", "save=sync,async", "retry=0", "world_size=4")
    here = run(tmp_path / "here", *asked)
    with slowly_linked(DELAY_S, loss=0.02) as apart, ray_in(apart, tmp_path) as slow:
        ended = slow.run(tmp_path / "sweep", *words_of(tmp_path / "sweep", *asked))
    assert [row["status"] for row in ended.rows] == ["pass"] * 4, ended.err
    for row in ended.rows:
        same = here.row(parallel=row["parallel"], save=row["save"])
        assert {name: row[name] for name in LOSSES} == {name: same[name] for name in LOSSES}
        (far,) = [host for host in row["details"]["hosts"] if host["name"] == apart[1].address]
        assert far["clock_error_s"] > DELAY_S
        assert abs(far["clock_offset_s"]) <= far["clock_error_s"], "they have one clock"
