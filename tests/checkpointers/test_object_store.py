"""Checkpoints in a store with S3's interface: saved, read without DCP, damaged, removed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, run
from dcpbench.checkpointers.object_store import ObjectStore
from dcpbench.compose import limits
from dcpbench.config.errors import ConfigError
from dcpbench.formats.files import digest_files
from support.alone import ONCE, alone, config, run_alone
from support.notes import texts
from support.s3 import CREDENTIALS, Server, s3_server

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server("tests") as one:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": one.endpoint}.items():
            patch.setenv(name, value)
        yield one


@pytest.mark.cell
def test_complete_run_is_restored(server: Server) -> None:
    ran = run_alone(storage="s3_of_tests", **ONCE)
    assert ran.verdict.status == "pass", ran.verdict.reason
    assert ran.reports[0].checks.keys() >= {"checkpoint_whole", "files_equal", "files_unchanged"}
    assert ran.left == [], "nothing is on the disk"
    assert {Path(name).name for name in server.objects()} == {".metadata", "__0_0.distcp"}


@pytest.mark.cell
@pytest.mark.parametrize("fault", ["file_bit", "file_stray"])
def test_damage_in_the_store_is_detected(server: Server, fault: str) -> None:
    verdict, _ = alone(fault, storage="s3_of_tests", **ONCE)
    assert (verdict.status, verdict.fault_seen) == ("fail", True), verdict.reason


@pytest.mark.cell
def test_objects_are_copied_read_in_part_and_replaced(server: Server, tmp_path: Path) -> None:
    store, other = (ObjectStore("s3://tests", {"endpoint_url": server.endpoint}) for _ in range(2))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"0123456789")
    (tmp_path / "c").write_bytes(b"")
    assert store.lengths("/one") == {}
    store.put_back("/one", tmp_path)
    assert other.lengths("/one") == store.lengths("/one") == {"a/b": 10, "c": 0}, "no listing is cached"
    with store.part("/one", "a/b", 2, 5) as file:
        assert file.read_bytes() == b"23456"
    with store.files("/one") as copies:
        assert digest_files(copies) == digest_files(tmp_path)
        written = (copies / "c").stat().st_mtime
    with other.files("/one") as copies:
        assert (copies / "c").stat().st_mtime == written
        (copies / "c").unlink()
        store.put_back("/one", copies)
    assert other.lengths("/one") == {"a/b": 10}
    store.remove("/one")
    store.remove("/one")
    assert other.lengths("/one") == {}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": None}, "storage.options.url=null: must be the place of the objects"),
        ({"url": "s3://one", "file_system": {"secret": "hidden"}}, "file_system.secret: is refused"),
    ],
)
def test_invalid_store_is_refused(options: dict[str, Any], told: str) -> None:
    asked = config(storage="fsspec_s3")
    asked.storage.options = options
    with pytest.raises(ConfigError) as raised:
        limits.refuse_impossible(asked)
    assert told in str(raised.value)
    assert "hidden" not in str(raised.value)


@pytest.mark.slow
def test_every_check_passes_on_ranks(server: Server, tmp_path: Path) -> None:
    words = ("storage=fsspec_s3", "verify=deep", "parallel=fsdp2", "device=cpu", "world_size=2", "saves=1")
    before = server.objects().keys()
    ended = run(tmp_path / "sweep", *words, *server.words, *SMALL)
    (row,) = ended.rows
    assert row["status"] == "pass", row["reason"]
    assert row["checkpoint_bytes"] > 0
    assert all(row[check] for check in ("checkpoint_whole", "files_equal", "files_unchanged"))
    assert [texts(rank, "left_behind") for rank in row["details"]["ranks"]] == [[]] * 6
    assert server.objects().keys() == before
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert server.endpoint.encode() in written
    assert not [value for value in CREDENTIALS.values() if value.encode() in written]
