"""The recording layer misses no file operation of a writer."""

import os
import shutil
from pathlib import Path

import pytest

from dcpbench.plugins.crash.disk_states import after
from dcpbench.plugins.crash.operations import Kind, tree_of
from dcpbench.plugins.crash.recording import read_record, recording
from plugins.crash.crashes import recorded
from plugins.crash.durable_writer import DurableWriter
from plugins.crash.strace import STRACE, recorded_calls, traced

_SAVES = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from dcpbench.plugins.crash.recording import recording

folder, logs = map(Path, sys.argv[1:])
state = {"a": torch.ones(5000), "b": torch.zeros(3), "n": 1}


def save_all():
    with recording(folder, logs, 0):
        for number, options in enumerate(({}, {"thread_count": 3}, {"single_file_per_rank": False})):
            for _ in range(2):
                writer = dcp.FileSystemWriter(folder / str(number), **options)
                dcp.save(state, storage_writer=writer, no_dist=True)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dcp.async_save(state, checkpoint_id=folder / "async").result()
        in_process = AsyncCheckpointerType.PROCESS
        dcp.async_save(state, checkpoint_id=folder / "process", async_checkpointer_type=in_process).result()


if __name__ == "__main__":
    save_all()
"""


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_record_equals_strace(tmp_path: Path) -> None:
    folder, logs = tmp_path / "saved", tmp_path / "logs"
    folder.mkdir()
    logs.mkdir()
    calls = traced(_SAVES, folder, str(folder), str(logs))
    (tmp_path / "before").mkdir()
    record = read_record(tmp_path / "before", logs, 1)
    assert recorded_calls(record.ranks[0]) == calls
    assert {path.split("/")[0] for path in calls} == {"0", "1", "2", "async", "process"}
    assert after(record) == tree_of(folder)


def test_every_kind_of_write_is_recorded(tmp_path: Path) -> None:
    folder, logs, before = (tmp_path / name for name in ("saved", "logs", "before"))
    for path in (folder, logs):
        path.mkdir()
    (folder / "there").write_bytes(b"0123456789")
    shutil.copytree(folder, before)
    with recording(folder, logs, 0):
        (folder / "text").write_text("ä\n")
        with (folder / "there").open("r+b") as file:
            file.seek(4)
            file.write(b"xyz")
        with (folder / "text").open("a") as text:
            text.write("more")
        with (folder / "raw").open("wb", buffering=0) as raw:
            raw.write(b"raw")
            raw.truncate(2)
        descriptor = os.open(folder / "os", os.O_CREAT | os.O_RDWR)
        os.write(descriptor, b"abcdef")
        os.pwrite(descriptor, b"XY", 1)
        os.ftruncate(descriptor, 4)
        os.fsync(descriptor)
        os.close(descriptor)
        os.truncate(folder / "there", 6)
        (folder / "a" / "b").mkdir(parents=True)
        shutil.copyfile(folder / "os", folder / "a" / "copy")
        (folder / "a" / "b").rmdir()
        (folder / "raw").rename(folder / "renamed")
        (folder / "renamed").replace(folder / "text")
        (folder / "os").unlink()
        (tmp_path / "elsewhere").write_text("not recorded")
    record = read_record(before, logs, 1)
    assert after(record) == tree_of(folder)
    assert {step.kind for step in record.ranks[0]} == {*Kind} - {
        Kind.read,
        Kind.sync,
        Kind.signal,
        Kind.wait,
        Kind.success,
    }


def test_buffered_data_is_not_recorded_as_written() -> None:
    record = recorded(DurableWriter, same_folder=False)
    kinds = [step.kind for step in record.ranks[0] if step.path.endswith(".metadata.tmp")]
    assert kinds == [Kind.open, Kind.write, Kind.fsync, Kind.rename]
