"""Mutants of the durable writer, each with one changed step that the enumeration of crash states has to
detect: one for each check, and what only several ranks can do. That each sync is needed is tested without
them."""

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpbench.checkpointers.storage import Storage
from dcpbench.config.groups import SaveConfig, StorageConfig
from plugins.crash.durable_writer import DurableWriter


class RenameNotSynced(DurableWriter):
    def publish(self, metadata: bytes) -> None:
        self.write_metadata(metadata)
        self.rename_metadata()


class MetadataPublishedBeforeData(DurableWriter):
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


class OldDataRemovedBeforeTheRenameIsSynced(DurableWriter):
    def publish(self, metadata: bytes) -> None:
        self.write_metadata(metadata)
        self.rename_metadata()
        self.remove_others()
        self.sync_folder(self.path)


class DataOverOldData(DurableWriter):
    def data_name(self, number: int) -> str:
        return f"__0_{number}.distcp"


class MetadataOfOneRankOnly(DurableWriter):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results[:1])


class SecondRankRemovesOldData(DurableWriter):
    """Remove old data before the metadata of the new data exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for path in [] if self.is_first else self.path.glob("*.distcp"):
            path.unlink()
        return super().prepare_local_plan(plan)


def storage(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Return a storage that the durable writer, or the mutant `options.mutant`, writes."""
    writers = {one.__name__: one for one in (DurableWriter, RenameNotSynced, DataOverOldData)}
    writer = writers[config.options.get("mutant", "DurableWriter")]
    return Storage(writer(folder), FileSystemReader)
