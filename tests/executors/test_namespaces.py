"""Cells on two hosts that have addresses, clocks, a folder and a link of their own: network namespaces."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, Finished, command, run, wait_for
from support.drivers import environment
from support.elastic import torchrun
from support.hosts import ray_in
from support.namespaces import Namespace, cut, namespaces, processes_in, slowly_linked, up

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]

AHEAD_S = 3600
DELAY_S = 0.02
LOSSES = ("loss_at_save", "loss_resumed", "loss_continued", "loss_twin")
ASKED = (*SMALL, "device=cpu", "saves=1", "parallel=hsdp2", "retry=0", "timeouts.save_s=6")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Namespace]]:
    with namespaces() as made:
        yield made


@pytest.fixture(scope="module")
def ended(hosts: list[Namespace], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep in which the link is cut, and one host has a folder of its own and clocks that are ahead."""
    here = tmp_path_factory.mktemp("namespaces")
    folder, own, clock = here / "sweep", here / "own", here / "clock"
    own.mkdir()
    clock.mkdir()
    shifted = f"import time\nhonest = time.time\ntime.time = lambda: honest() + {AHEAD_S}\n"
    (clock / "sitecustomize.py").write_text(shifted)
    other = f'mount -t tmpfs own {own} && export PYTHONPATH={clock}:$PYTHONPATH && exec "$@"'
    apart = ("unshare", "--time", f"--monotonic={AHEAD_S}", "--fork", "--kill-child", "sh", "-c", other, "sh")
    dies = ("scenario=dies", "scenario.options.rank=3", "scenario.options.phase=save")
    cells = (*dies, "scenario.options.how=cuts_link,not", f"storage.root=null,{own}")
    two = [(hosts[0].address, hosts[0].prefix), (hosts[1].address, (*hosts[1].prefix, *apart))]
    with torchrun(folder, "-m", *ASKED, *cells, max_restarts=3, hosts=two) as run:
        wait_for(lambda: bool(Finished(0, "", "", folder).rows))
        up(hosts[1])
        wait_for(lambda: "written to" in run.log.read_text(), 300)
        run.end()  # it would start its group again, to no effect
        return run.ended()


def _row(ended: Finished, how: str, root: str) -> dict[str, Any]:
    found = [row for row in ended.rows if f"how={how} " in row["overrides"] and root in row["overrides"]]
    assert len(found) == 1, (ended.rows, ended.err)
    return found[0]


def test_a_link_that_is_cut_in_a_save_costs_one_row_and_the_next_cell_passes(
    ended: Finished, hosts: list[Namespace]
) -> None:
    cut = _row(ended, "cuts_link", "root=null")
    where = rf"rank 2 \(local rank 0 of host {re.escape(hosts[1].address)}\)"
    given_up = "was given up with its host, which did not answer within 5 s, last heard of in"
    assert re.fullmatch(rf"{where} {given_up} \w+", str(cut["reason"])), cut["reason"]
    assert cut["status"] == "crash"
    assert _row(ended, "not", "root=null")["status"] == "pass"


def test_clocks_of_hosts_are_compared(ended: Finished) -> None:
    row = _row(ended, "not", "root=null")
    assert row["clock_offset_s"] == pytest.approx(AHEAD_S, abs=1)


def test_a_folder_that_hosts_do_not_share_is_a_skip(ended: Finished, hosts: list[Namespace]) -> None:
    for how in ("cuts_link", "not"):
        row = _row(ended, how, "/own")
        assert row["status"] == "skip"
        assert f"host {hosts[1].address} does not see" in str(row["reason"])


def test_processes_of_torchrun_end_where_nothing_is_left_that_would_end_them(
    hosts: list[Namespace], tmp_path: Path
) -> None:
    """Their torchrun is killed, and the driver cannot be reached any more."""
    folder = tmp_path / "sweep"
    sleeps = ("scenario=dies", "scenario.options.how=sleeps", "scenario.options.phase=train")
    two = [(host.address, host.prefix) for host in hosts]
    try:
        with torchrun(folder, *ASKED, *sleeps, "world_size=4", hosts=two) as run:
            wait_for(lambda: any(folder.glob("*/rank3.log")))
            cut(hosts[1])
            run.kill()
        wait_for(lambda: not processes_in(hosts[1]))
    finally:
        up(hosts[1])


def test_a_link_that_is_slow_and_loses_packets_costs_no_verdict(tmp_path: Path) -> None:
    asked = (*SMALL, "device=cpu", "saves=1", "parallel=fsdp2,hsdp2", "save=sync,async", "retry=0")
    here = run(tmp_path / "here", "-m", *asked, "world_size=4")
    with slowly_linked(DELAY_S, loss=0.02) as apart:
        two = [(host.address, host.prefix) for host in apart]
        with torchrun(tmp_path / "sweep", "-m", *asked, hosts=two) as driven:
            ended = driven.ended()
    assert [row["status"] for row in ended.rows] == ["pass"] * 4, ended.err
    for row in ended.rows:
        same = here.row(parallel=row["parallel"], save=row["save"])
        assert {name: row[name] for name in LOSSES} == {name: same[name] for name in LOSSES}
        (far,) = [host for host in row["details"]["hosts"] if host["clock_error_s"] > DELAY_S]
        assert abs(far["clock_offset_s"]) <= far["clock_error_s"], "they have one clock"


@pytest.fixture(scope="module")
def on_ray(hosts: list[Namespace], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep of Ray's in which a host is cut off, and goes on writing."""
    here = tmp_path_factory.mktemp("ray")
    up(hosts[1])
    dies = ("scenario=dies", "scenario.options.rank=3", "scenario.options.phase=save", "world_size=4")
    cells = (*dies, "scenario.options.how=not,writes_late", "scenario.options.once=true", "retry=1")
    with ray_in(hosts, here) as words:
        line = [*hosts[0].prefix, *command(here / "sweep", "-m", *ASKED, *cells, *words)]
        run = subprocess.run(line, capture_output=True, text=True, check=False, env=environment(), cwd=here)
    return Finished(run.returncode, run.stdout, run.stderr, here / "sweep")


def test_a_cell_across_hosts_of_ray_passes(on_ray: Finished, hosts: list[Namespace]) -> None:
    row = _row(on_ray, "not", "")
    assert row["status"] == "pass", row["reason"]
    used = {host["name"]: host["ranks"] for host in row["details"]["hosts"]}
    assert used == {hosts[0].address: [0, 1], hosts[1].address: [2, 3]}


def test_what_a_host_of_ray_writes_that_was_cut_off_is_none_of_the_second_try(
    on_ray: Finished, hosts: list[Namespace]
) -> None:
    row = _row(on_ray, "writes_late", "")
    assert (row["status"], row["flaky"]) == ("pass", True), row["reason"]
    where = rf"rank 2 \(local rank 0 of host {re.escape(hosts[1].address)}\)"
    given_up = rf"crash: {where} was given up with its host, which did not answer within 5 s, last .*"
    assert re.fullmatch(f"flaky: the first try ended as {given_up}", str(row["reason"])), row["reason"]
    assert (on_ray.folder / row["cell"] / "late").exists(), "it wrote while the second try ran"
    assert {host["name"] for host in row["details"]["hosts"]} == {hosts[0].address}
