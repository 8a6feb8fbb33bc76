"""Writers of checkpoints that survive every crash."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class DurableWriter(FileSystemWriter):
    """Writes data to new files, syncs them and their names before the metadata refers to them, replaces the
    metadata atomically, and then removes files of earlier saves."""

    is_first = True
    """True on the first of the ranks that save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_first = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.path.mkdir(exist_ok=True)
        self.sync_folder(self.path.parent)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number in range(2):
            results += self.write_file(self.data_name(number), plan.items[number::2], planner)
        self.sync_folder(self.path)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def data_name(self, number: int) -> str:
        return f"{self.save_id}_{number}.distcp"

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with (self.path / name).open("wb") as file:
            results = [self.write_item(file, name, item, planner) for item in items]
            self.sync_data(file)
        return results

    def write_item(self, file: Any, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        offset, data = file.tell(), planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            file.write(data.getbuffer())
        else:
            torch.save(data, file)
        length = file.tell() - offset
        return WriteResult(item.index, length, _StorageInfo(name, offset, length))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        metadata.storage_meta = self.storage_meta()
        self.named = {place.relative_path for place in metadata.storage_data.values()}
        self.publish(pickle.dumps(metadata))
        self.remove_others()

    def publish(self, metadata: bytes) -> None:
        self.write_metadata(metadata)
        self.rename_metadata()
        self.sync_folder(self.path)

    def write_metadata(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            self.sync_data(file)

    def rename_metadata(self) -> None:
        (self.path / ".metadata.tmp").replace(self.path / ".metadata")

    def remove_others(self) -> None:
        for path in self.path.glob("*.distcp"):
            if path.name not in self.named:
                path.unlink()

    def sync_data(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class SyncedAfterwards(FileSystemWriter):
    """FileSystemWriter, with what its users can sync afterwards."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for path in (*self.path.iterdir(), self.path, self.path.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
