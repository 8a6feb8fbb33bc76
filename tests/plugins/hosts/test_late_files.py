"""Cells on two hosts, on each of which files of the other appear late, or are empty at first."""

import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, Finished, blocks, run, words_of
from plugins.hosts.hosts import ray_in
from plugins.hosts.late_files import WAITS_S, late_hosts
from plugins.hosts.namespaces import namespaces, not_here
from support.notes import texts

pytest.importorskip("ray", reason="make test-multinode installs it")

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(600)]

LATE_S = 1.0
RULES = {"absent": f"* {LATE_S} 0", "empty": f"* {LATE_S} 1", "never": ".metadata 3600 0"}
"""Folders for checkpoints, and the files that are late there; see `plugins/hosts/late_files.c`."""
ON_CPU = (*SMALL, "device=cpu", "saves=1", "parallel=fsdp2", "retry=0")
MISSING = ("file_missing", "metadata_missing", "fsync_left_out", "file_overwritten_later")


def _ended(here: Path, names: list[str], *asked: str) -> Finished:
    """A sweep with a cell in each of these folders."""
    if not shutil.which("cc"):
        not_here("cc is needed")
    for name in names:
        (here / name).mkdir()
    cells = blocks({"seed": seed, "storage.root": str(here / name)} for seed, name in enumerate(names))
    words = words_of(here / "sweep", "-m", *ON_CPU, "world_size=4", *asked, *cells)
    with namespaces() as hosts:
        late = late_hosts(hosts, {here / name: rule for name, rule in RULES.items()}, here)
        with ray_in(late, here) as ray:
            return ray.run(here / "sweep", *words)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    here = tmp_path_factory.mktemp("late")
    return _ended(here, [*RULES, "sound"], "scenario=late", "load_parallel=ddp", "load_world_size=4")


def _row(ended: Finished, name: str) -> dict[str, Any]:
    found = [row for row in ended.rows if f"/{name}" in row["overrides"]]
    assert len(found) == 1, ended.err
    return found[0]


def _late(row: dict[str, Any]) -> list[dict[str, set[str]]]:
    """Return the files that each rank reports as late, by check."""
    reported: list[dict[str, set[str]]] = [defaultdict(set) for _ in range(4)]
    for rank in row["details"]["ranks"]:
        for text in texts(rank, "late_files"):
            path, where = text.partition(": host ")[0].split(" ", 1)
            reported[rank["rank"]][where].add(path)
    return reported


@pytest.mark.parametrize(("name", "seen"), {"absent": "no such file", "empty": "0 bytes"}.items())
def test_late_files_are_awaited_and_reported(ended: Finished, name: str, seen: str) -> None:
    row = _row(ended, name)
    assert row["status"] == "pass", row["reason"]
    of_first, of_second = (
        [{f"{folder}{path}" for path in paths} for folder in ("", "step-0001/")]
        for paths in ((".metadata", "__0_0.distcp", "__1_0.distcp"), ("__2_0.distcp", "__3_0.distcp"))
    )
    for rank, reported in enumerate(_late(row)):
        own, handover = (of_second, set()) if rank < 2 else (of_first, {"handover.pt"})
        seen_late = reported["in the checkpoint of step 1"]
        # Rank 0 has looked before, when the save reported success: it may have been long ago.
        assert seen_late == own[0] if rank else seen_late <= own[0], rank
        assert reported["of this stage"] == handover, rank
        assert reported["of the stage before"] == own[1] | handover, "to other processes they are late again"
    reports = [text for rank in row["details"]["ranks"] for text in texts(rank, "late_files")]
    sentence = rf"\S+ .*: host 10\.77\.0\.[12] saw \d+ bytes, this one {seen}, for (\d+\.\d) s"
    assert all(re.fullmatch(sentence, text) for text in reports), reports


def test_missing_file_is_reported_with_host_and_wait(ended: Finished) -> None:
    row = _row(ended, "never")
    rank = r"rank [23] \(local rank [01] of host 10\.77\.0\.2\)"
    error = r"UnseenFileError: \.metadata in the checkpoint of step 1: host 10\.77\.0\.1 saw \d+ bytes, "
    error += r"this one no such file, also after (\d+) s"
    reported = re.fullmatch(rf"{rank} in verify: {error}.*", row["reason"])
    assert reported, row["reason"]
    assert int(reported[1]) >= WAITS_S
    assert row["status"] == "error"


def test_no_late_file_is_reported_without_one(ended: Finished) -> None:
    row = _row(ended, "sound")
    assert row["status"] == "pass", row["reason"]
    assert not any(_late(row))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Finished]:
    """Sweeps with faults, with late files and on one host."""
    here, faults = tmp_path_factory.mktemp("planted"), f"fault={','.join(MISSING)}"
    late = _ended(here, ["absent"], faults)
    return late, run(here / "local", "-m", *ON_CPU, "world_size=4", faults)


@pytest.mark.parametrize("fault", MISSING)
def test_faults_have_the_same_verdict_with_late_files(planted: tuple[Finished, Finished], fault: str) -> None:
    row, local = (ended.row(fault=fault) for ended in planted)
    assert row["fault_seen"] is local["fault_seen"] is True, row["reason"]
    assert row["status"] == local["status"], row["reason"]
    if row["status"] == "error":
        assert row["details"]["late_files"], "in its details, though it has come to no verdict"
        return
    failed, of_local = (
        {name for name, check in one["details"]["checks"].items() if check["held"] is False}
        for one in (row, local)
    )
    assert failed == of_local, row["reason"]
