"""The group `save`: how DCP is called to save, and with which writer, stager and planner."""

from dataclasses import dataclass
from enum import StrEnum

from dcpbench.config.groups import Group


class Kept(StrEnum):
    """Whether all saves of a cell that do not overlap are given one object, or all of them (`shared`), each a
    new one, or none, so that DCP makes its own."""

    kept = "kept"
    shared = "shared"
    new = "new"
    none = "none"


class Uploader(StrEnum):
    """What uploads in the background: DCP's `AsyncCheckpointerType`."""

    thread = "thread"
    process = "process"


@dataclass
class StagerConfig:
    """The options of DCP's `DefaultStager`, and which saves are given the same one."""

    instance: Kept = Kept.new
    use_pinned_memory: bool = False
    use_shared_memory: bool = False
    use_async_staging: bool = False
    use_non_blocking_copy: bool = False


@dataclass
class PlannerConfig:
    """The options of DCP's `DefaultSavePlanner`, and which saves are given the same one."""

    instance: Kept = Kept.new
    dedup_save_to_lowest_rank: bool = False
    enable_plan_caching: bool = False


@dataclass
class SaveConfig(Group):
    """How DCP is called to save: `target(state_dict, checkpoint_id, writer, process_group, **options)`; see
    `dcpbench.checkpointers.dcp`. Other checkpointers look at the flags alone.

    `asynchronous` says that training may go on before the checkpoint is complete. Without a `stager` the
    writer stages, or what DCP makes where it has none; without a `planner` DCP makes one.
    """

    asynchronous: bool = False
    cache_staged_state_dict: bool = False
    requires_accelerator: bool = False
    writer: Kept = Kept.kept
    stager: StagerConfig | None = None
    planner: PlannerConfig | None = None
    uploader: Uploader = Uploader.thread

    @property
    def shares_memory(self) -> bool:
        """Whether what is staged lies in memory that another process may have too."""
        return bool(self.stager and self.stager.use_shared_memory)

    @property
    def uses_collectives(self) -> bool:
        """Whether the ranks plan together and have one file of metadata; else each has its own."""
        return bool(self.options.get("use_collectives", True))
