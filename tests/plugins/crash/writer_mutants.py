"""What becomes of a writer that no crash harms where one of its steps is otherwise: mutants, each of which an
enumeration of crash states has to catch."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpbench.checkpointers.storage import Storage
from dcpbench.config.groups import SaveConfig, StorageConfig
from plugins.crash.durable_writer import DurableWriter


class Mutant(DurableWriter):
    """One method otherwise. `breaks` is the check that must be broken, in the `same_folder` or not, by one
    rank or, of those `on_ranks`, by two."""

    breaks: ClassVar[str]
    same_folder: ClassVar[bool] = False


MUTANTS: list[type[Mutant]] = []
MUTANTS_ON_RANKS: list[type[Mutant]] = []


def _mutant(
    breaks: str, same_folder: bool = False, on_ranks: bool = False
) -> Callable[[type[Mutant]], type[Mutant]]:
    def declare(mutant: type[Mutant]) -> type[Mutant]:
        mutant.breaks, mutant.same_folder = f"crash_{breaks}", same_folder
        (MUTANTS_ON_RANKS if on_ranks else MUTANTS).append(mutant)
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
    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with (self.path / name).open("wb") as file:
            results = [self.write_item(file, name, item, planner) for item in items[:-1]]
            self.sync_data(file)
            return results + [self.write_item(file, name, item, planner) for item in items[-1:]]


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
    def publish(self, metadata: bytes) -> None:
        self.remove_others()
        super().publish(metadata)


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


@_mutant("consistent", same_folder=True)
class DataOverOldDataInPlace(Mutant):
    """The files of the last save are not emptied first."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = f"__0{name[-len('_0.distcp') :]}"
        (self.path / name).touch()
        with (self.path / name).open("r+b") as file:
            results = [self.write_item(file, name, item, planner) for item in items]
            self.sync_data(file)
        return results


@_mutant("consistent", same_folder=True)
class DataRenamedOverOldData(Mutant):
    """Each file is whole, but not all of them at once."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = f"__0{name[-len('_0.distcp') :]}"
        results = super().write_file(f"{name}.tmp", items, planner)
        (self.path / f"{name}.tmp").replace(self.path / name)
        for result in results:
            result.storage_data.relative_path = name
        return results


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


@_mutant("consistent", same_folder=True)
class OneOfTwoFilesOverOldData(Mutant):
    """What one file holds is new before the metadata are, the other one is kept beside."""

    def data_name(self, number: int) -> str:
        return "__0_1.distcp" if number else super().data_name(number)


@_mutant("durable")
class SecondFileBehindTheMetadata(Mutant):
    """It is renamed to what the metadata name it once they are there, and nobody syncs that."""

    def publish(self, metadata: bytes) -> None:
        last = max(self.named)
        (self.path / last).rename(self.path / "later")
        super().publish(metadata)
        (self.path / "later").rename(self.path / last)


@_mutant("durable", on_ranks=True)
class MetadataOfOneRankOnly(Mutant):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results[:1])


@_mutant("durable", on_ranks=True)
class SecondRankNotSynced(Mutant):
    def sync_data(self, file: Any) -> None:
        if self.is_first:
            super().sync_data(file)


@_mutant("recoverable", same_folder=True, on_ranks=True)
class NamesOfTheSecondRankNotSynced(Mutant):
    def sync_folder(self, folder: Path) -> None:
        if self.is_first:
            super().sync_folder(folder)


@_mutant("durable", on_ranks=True)
class ExceptionOfTheSecondRankSwallowed(Mutant):
    """Its files end before their data, and the first rank is told that all is well."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = super().write_file(name, items, planner)
        if not self.is_first:
            os.truncate(self.path / name, 0)
        return results


@_mutant("recoverable", same_folder=True, on_ranks=True)
class SecondRankRemovesOldData(Mutant):
    """Before the metadata that name the new ones are there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for path in [] if self.is_first else self.path.glob("*.distcp"):
            path.unlink()
        return super().prepare_local_plan(plan)


def storage(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Of checkpoints that this writer, or the mutant `options.mutant`, has written."""
    named = {mutant.__name__: mutant for mutant in MUTANTS}
    writer = named.get(config.options.get("mutant", ""), DurableWriter)
    return Storage(writer(folder), FileSystemReader)
