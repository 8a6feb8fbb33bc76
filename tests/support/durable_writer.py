"""A writer of checkpoints of which no crash makes anything wrong, and what becomes of it where a step is left
out: mutants, each of which an enumeration of crash states has to catch."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpbench.checkpointers.storage import Storage
from dcpbench.config.groups import SaveConfig, StorageConfig


class DurableWriter(FileSystemWriter):
    """Data in files that no other save has; synced, and their names, before metadata name them; metadata
    that are whole before they take the place of those before; files of earlier saves removed last."""

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
        self.publish(pickle.dumps(metadata))
        self.remove_others()

    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            self.sync_metadata(file)
        (self.path / ".metadata.tmp").replace(self.path / ".metadata")
        self.sync_folder(self.path)

    def remove_others(self) -> None:
        for path in self.path.glob("*.distcp"):
            if not path.name.startswith(self.save_id):
                path.unlink()

    def sync_data(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())

    def sync_metadata(self, file: Any) -> None:
        self.sync_data(file)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Mutant(DurableWriter):
    """One step otherwise. `breaks` is the check that must be broken, in the `same_folder` or not."""

    breaks: ClassVar[str]
    same_folder: ClassVar[bool] = False


MUTANTS: list[type[Mutant]] = []


def _mutant(breaks: str, same_folder: bool = False) -> Callable[[type[Mutant]], type[Mutant]]:
    def declare(mutant: type[Mutant]) -> type[Mutant]:
        mutant.breaks, mutant.same_folder = f"crash_{breaks}", same_folder
        MUTANTS.append(mutant)
        return mutant

    return declare


def _nothing(*_: Any) -> None:
    """What is left out."""


@_mutant("durable")
class DataNotFlushed(Mutant):
    def sync_data(self, file: Any) -> None:
        os.fsync(file.fileno())


@_mutant("durable")
class DataNotSynced(Mutant):
    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with (self.path / name).open("wb") as file:
            return [self.write_item(file, name, item, planner) for item in items]


@_mutant("durable")
class SecondFileNotSynced(Mutant):
    def sync_data(self, file: Any) -> None:
        if "_1.distcp" not in str(file.name):
            super().sync_data(file)


@_mutant("durable")
class SyncedBeforeTheLastItem(Mutant):
    def write_item(self, file: Any, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        DurableWriter.sync_data(self, file)
        return super().write_item(file, name, item, planner)

    def sync_data(self, file: Any) -> None:
        if ".metadata" in str(file.name):
            super().sync_data(file)


@_mutant("durable")
class OtherFileSynced(Mutant):
    def sync_data(self, file: Any) -> None:
        file.flush()
        with (self.path / "other").open("wb") as other:
            os.fsync(other.fileno())


@_mutant("durable")
class FolderNeverSynced(Mutant):
    sync_folder = _nothing


@_mutant("durable")
class ParentNotSynced(Mutant):
    def sync_folder(self, folder: Path) -> None:
        if folder == self.path:
            super().sync_folder(folder)


@_mutant("durable")
class FolderSyncedBeforeItIsMade(Mutant):
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.sync_folder(self.path.parent)
        self.path.mkdir(exist_ok=True)
        return plan


@_mutant("durable")
class MetadataNotFlushed(Mutant):
    def sync_metadata(self, file: Any) -> None:
        os.fsync(file.fileno())


@_mutant("durable")
class MetadataNotSynced(Mutant):
    sync_metadata = _nothing


@_mutant("durable")
class RenameNotSynced(Mutant):
    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            self.sync_metadata(file)
        (self.path / ".metadata.tmp").replace(self.path / ".metadata")


@_mutant("durable")
class FolderSyncedBeforeTheRename(Mutant):
    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            self.sync_metadata(file)
        self.sync_folder(self.path)
        (self.path / ".metadata.tmp").replace(self.path / ".metadata")


@_mutant("recoverable", same_folder=True)
class RenamedBeforeClosed(Mutant):
    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            (self.path / ".metadata.tmp").replace(self.path / ".metadata")
            self.sync_metadata(file)
        self.sync_folder(self.path)


@_mutant("recoverable", same_folder=True)
class MetadataWrittenInPlace(Mutant):
    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata").open("wb") as file:
            file.write(metadata)
            self.sync_metadata(file)
        self.sync_folder(self.path)


@_mutant("recoverable", same_folder=True)
class OldMetadataRemovedFirst(Mutant):
    def publish(self, metadata: bytes) -> None:
        (self.path / ".metadata").unlink(missing_ok=True)
        super().publish(metadata)


@_mutant("recoverable", same_folder=True)
class OldMetadataCopied(Mutant):
    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            self.sync_metadata(file)
        shutil.copyfile(self.path / ".metadata.tmp", self.path / ".metadata")
        self.sync_folder(self.path)


@_mutant("durable", same_folder=True)
class StaleMetadataKept(Mutant):
    def publish(self, metadata: bytes) -> None:
        if not (self.path / ".metadata").exists():
            super().publish(metadata)


@_mutant("recoverable", same_folder=True)
class MetadataPublishedBeforeData(Mutant):
    """What it names is written afterwards."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.later = plan, planner
        paths = [*self.path.glob("*.distcp")]
        written: Future[list[WriteResult]] = super().write_data(plan, planner)
        for path in {*self.path.glob("*.distcp")} - {*paths}:
            path.unlink()
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        super().write_data(*self.later)


@_mutant("recoverable", same_folder=True)
class OldDataRemovedFirst(Mutant):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.remove_others()
        super().finish(metadata, results)


@_mutant("recoverable", same_folder=True)
class OldDataRemovedBeforeTheRenameIsSynced(Mutant):
    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            self.sync_metadata(file)
        (self.path / ".metadata.tmp").replace(self.path / ".metadata")
        self.remove_others()
        self.sync_folder(self.path)


@_mutant("consistent", same_folder=True)
class DataOverOldData(Mutant):
    def data_name(self, number: int) -> str:
        return f"__0_{number}.distcp"

    remove_others = _nothing


@_mutant("consistent", same_folder=True)
class DataOverOldDataInPlace(Mutant):
    """The files of the last save are not emptied first."""

    def data_name(self, number: int) -> str:
        return f"__0_{number}.distcp"

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        (self.path / name).touch()
        with (self.path / name).open("r+b") as file:
            results = [self.write_item(file, name, item, planner) for item in items]
            self.sync_data(file)
        return results

    remove_others = _nothing


@_mutant("consistent", same_folder=True)
class DataRenamedOverOldData(Mutant):
    """Each file is whole, but not all of them at once."""

    def data_name(self, number: int) -> str:
        return f"__0_{number}.distcp"

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = super().write_file(f"{name}.tmp", items, planner)
        (self.path / f"{name}.tmp").replace(self.path / name)
        for result in results:
            result.storage_data.relative_path = name
        return results

    remove_others = _nothing


@_mutant("durable")
class ExceptionOfAWriterSwallowed(Mutant):
    """The second file is not written to its end, and nobody is told."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = super().write_file(name, items, planner)
        if "_1.distcp" in name:
            os.truncate(self.path / name, 100)
        return results


@_mutant("durable")
class ResultsOfAWriterLost(Mutant):
    """The second file's items are in no metadata."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = super().write_file(name, items, planner)
        return [] if "_1.distcp" in name else results


@_mutant("durable")
class SuccessBeforeTheEnd(Mutant):
    """What `finish` has to do is done by the next call, which is none."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing yet."""


@_mutant("durable")
class LengthBeforeTheBytes(Mutant):
    """Space is reserved and synced, the bytes are not."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with (self.path / name).open("wb") as file:
            file.truncate(16384)
            self.sync_data(file)
            results = [self.write_item(file, name, item, planner) for item in items]
        return results


def storage(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Of checkpoints that this writer, or the mutant `options.mutant`, has written."""
    named = {mutant.__name__: mutant for mutant in MUTANTS}
    writer = named.get(config.options.get("mutant", ""), DurableWriter)
    return Storage(writer(folder), FileSystemReader)


class SyncedAfterwards(FileSystemWriter):
    """Torch's own, and what its users can do after it."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for path in (*self.path.iterdir(), self.path, self.path.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
