"""Mutants of the durable writer, each with one changed step that the enumeration of crash states has to
detect. That each sync is needed is tested without them."""

import os
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
    """The durable writer with one changed method. `breaks` is the check to be violated, with saves to the
    `same_folder` or not."""

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


@_mutant("durable")
class SyncedBeforeTheLastItem(Mutant):
    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with (self.path / name).open("wb") as file:
            results = [self.write_item(file, name, item, planner) for item in items[:-1]]
            self.sync_data(file)
            return results + [self.write_item(file, name, item, planner) for item in items[-1:]]


@_mutant("durable")
class RenameNotSynced(Mutant):
    def publish(self, metadata: bytes) -> None:
        self.write_metadata(metadata)
        self.rename_metadata()


@_mutant("recoverable", same_folder=True)
class RenamedBeforeClosed(Mutant):
    def publish(self, metadata: bytes) -> None:
        with (self.path / ".metadata.tmp").open("wb") as file:
            file.write(metadata)
            self.rename_metadata()
            self.sync_metadata(file)
        self.sync_folder(self.path)


@_mutant("recoverable", same_folder=True)
class MetadataWrittenInPlace(Mutant):
    def publish(self, metadata: bytes) -> None:
        self.write_metadata(metadata, ".metadata")
        self.sync_folder(self.path)


@_mutant("recoverable", same_folder=True)
class OldMetadataRemovedFirst(Mutant):
    def publish(self, metadata: bytes) -> None:
        (self.path / ".metadata").unlink(missing_ok=True)
        super().publish(metadata)


@_mutant("recoverable", same_folder=True)
class MetadataPublishedBeforeData(Mutant):
    """Write the data after the metadata that refers to it."""

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
        self.write_metadata(metadata)
        self.rename_metadata()
        self.remove_others()
        self.sync_folder(self.path)


@_mutant("consistent", same_folder=True)
class DataOverOldData(Mutant):
    def data_name(self, number: int) -> str:
        return f"__0_{number}.distcp"


@_mutant("consistent", same_folder=True)
class DataRenamedOverOldData(Mutant):
    """Replace each file atomically, but not all of them at once."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = f"__0{name[-len('_0.distcp') :]}"
        results = super().write_file(f"{name}.tmp", items, planner)
        (self.path / f"{name}.tmp").replace(self.path / name)
        for result in results:
            result.storage_data.relative_path = name
        return results


@_mutant("durable")
class ExceptionOfAWriterSwallowed(Mutant):
    """Cut off the second file without an error."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = super().write_file(name, items, planner)
        if "_1.distcp" in name:
            os.truncate(self.path / name, 100)
        return results


@_mutant("durable")
class SuccessBeforeTheEnd(Mutant):
    """Report success before `finish` has published the metadata."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish nothing."""


@_mutant("durable")
class LengthBeforeTheBytes(Mutant):
    """Sync the length of a file before its bytes."""

    def write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        with (self.path / name).open("wb") as file:
            file.truncate(16384)
            self.sync_data(file)
            results = [self.write_item(file, name, item, planner) for item in items]
        return results


@_mutant("durable")
class SecondFileBehindTheMetadata(Mutant):
    """Rename the second file to its final name after publishing the metadata, without a sync."""

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


@_mutant("recoverable", same_folder=True, on_ranks=True)
class SecondRankRemovesOldData(Mutant):
    """Remove old data before the metadata of the new data exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for path in [] if self.is_first else self.path.glob("*.distcp"):
            path.unlink()
        return super().prepare_local_plan(plan)


def storage(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Return a storage that this writer, or the mutant `options.mutant`, writes."""
    named = {mutant.__name__: mutant for mutant in MUTANTS}
    writer = named.get(config.options.get("mutant", ""), DurableWriter)
    return Storage(writer(folder), FileSystemReader)
