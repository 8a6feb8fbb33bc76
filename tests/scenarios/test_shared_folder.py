"""Waiting for files in a folder that hosts share, on real ranks: each pretends to be on a host that shows
files late."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from dcpbench.cell import checkpoint_files
from dcpbench.cell.checkpoint_files import UnseenFileError, wait_until_seen
from dcpbench.records.files import file_lengths
from support.alone import bare_cell, world
from support.gloo_ranks import Ask

pytestmark = pytest.mark.cell

TWO_HOSTS = ("one", "one", "other", "other")
ALWAYS = 10**9
Late = dict[str, dict[str, tuple[int, int | None]]]
"""By host, and file, how many looks find it with another length, or not at all."""


def wait(folder: Path, hosts: Sequence[str], late: Late, limit_s: float = 60.0) -> Any:
    """On a rank, return the answer or the error; the files that were late; and how often it looked."""
    rank, looks = dist.get_rank(), 0
    cell = bare_cell(folder, seen_by=world(rank, dist.get_world_size(), dist.group.WORLD))
    cell.report.host = hosts[rank]

    def lengths(of: str) -> dict[str, int]:
        nonlocal looks
        looks += 1
        seen = file_lengths(of)
        for name, (until, length) in late.get(hosts[rank], {}).items():
            if looks <= until and name in seen:
                del seen[name]
                seen |= {} if length is None else {name: length}
        return seen

    limit = mock.patch.object(checkpoint_files, "SHOWS_S", limit_s)
    with mock.patch.object(checkpoint_files, "file_lengths", lengths), limit:
        try:
            answer: Any = wait_until_seen(cell, folder, "here")
        except UnseenFileError as error:
            answer = str(error)
    return answer, cell.report.texts("late_files"), looks


def wait_on_one(folder: Path) -> Any:
    """Wait on one host, of which one rank does not see a file."""
    late = {"only": {"data": (ALWAYS, None)}} if dist.get_rank() == 1 else {}
    return wait(folder, ("only",) * 4, late)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    for name in ("data", "below/more"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(("length", "seen"), [(None, "no such file"), (0, "0 bytes"), (3, "3 bytes")])
def test_ranks_wait_until_all_see_the_same_files(
    ask: Ask, folder: Path, length: int | None, seen: str
) -> None:
    late = {"one": {"data": (2, length)}, "other": {"below/more": (3, length)}}
    answers = ask(wait, folder, TWO_HOSTS, late)
    assert [(answer, looks) for answer, _, looks in answers] == [(True, 4)] * 4
    texts = [rank for _, rank, _ in answers]
    assert [len(rank) for rank in texts] == [1] * 4
    told = rf"data here: host other saw 4 bytes, this one {seen}, for \d+\.\d s"
    assert re.fullmatch(told, texts[0][0]), texts
    assert texts[3][0].startswith(f"below/more here: host one saw 10 bytes, this one {seen}, for ")


def test_file_that_a_host_never_sees_is_an_error(ask: Ask, folder: Path) -> None:
    answers = ask(wait, folder, TWO_HOSTS, {"other": {"data": (ALWAYS, None)}}, 0.5)
    assert [answer for answer, _, _ in answers[:2]] == [True, True]
    for answer, texts, _ in answers[2:]:
        assert texts == ["data here: host one saw 4 bytes, this one no such file"]
        assert re.fullmatch(rf"{texts[0]}, also after \d+ s", answer)


def test_file_that_no_host_sees_is_not_waited_for(ask: Ask, folder: Path) -> None:
    late = {host: {"data": (ALWAYS, None)} for host in TWO_HOSTS}
    assert ask(wait, folder, TWO_HOSTS, late) == [(True, [], 1)] * 4


def test_ranks_on_one_host_do_not_wait(ask: Ask, folder: Path) -> None:
    assert ask(wait_on_one, folder) == [(False, [], 0)] * 4
