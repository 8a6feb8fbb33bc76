"""The executor of one host: ranks forked from a server that has torch imported, with GPUs of their own."""

from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path

from dcpbench.config.groups import TimeoutsConfig
from dcpbench.executors.base import Executor, OnPhase, Outcome, WorldKind
from dcpbench.executors.rank_group import RankGroup
from dcpbench.worker.messages import CellSpec


@dataclass
class LocalExecutor(Executor):
    """Ranks of this host; on a device of their own out of `gpus` each, if they use any.

    Groups of several kinds stay up side by side, so that the stages of a cell need not start them anew.
    """

    context: ForkServerContext
    gpus: tuple[int, ...] = ()
    _groups: dict[WorldKind, RankGroup] = field(default_factory=dict)
    _leaving: list[RankGroup] = field(default_factory=list)

    def start(self, kind: WorldKind, log_folder: Path) -> None:
        """As for every executor; ranks that died since their last stage are replaced."""
        if kind in self._groups and not self._groups[kind].usable():
            self._groups.pop(kind).kill()
        if kind not in self._groups:
            self._groups[kind] = RankGroup.start(self.context, kind, log_folder, self.gpus)

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> Outcome:
        """Run a stage; ranks of which one did not report are ended."""
        outcome = self._groups[kind].run(spec, timeouts, on_phase)
        if outcome.status:
            self._groups.pop(kind).kill()
        for leaving in [group for group in self._leaving if group.left()]:
            leaving.kill()
            self._leaving.remove(leaving)
        return outcome

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """As for every executor; does not wait for those that leave."""
        for kind in self._groups.keys() - kinds:
            group = self._groups.pop(kind)
            group.close()
            self._leaving.append(group)

    def interrupt(self) -> None:
        """End what runs in another thread: its stage ends at once."""
        for group in list(self._groups.values()):
            group.end()

    def end(self) -> None:
        """End the ranks, and wait for those that are leaving."""
        while self._groups:
            self._groups.popitem()[1].kill()
        while self._leaving:
            self._leaving.pop().join()
