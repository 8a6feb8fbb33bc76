"""The executor of one host: ranks forked from a server that has torch imported, with GPUs of their own."""

from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path

from dcpbench.config.groups import TimeoutsConfig
from dcpbench.executors.base import OnPhase, Outcome, WorldKind
from dcpbench.executors.rank_group import RankGroup
from dcpbench.worker.messages import CellSpec


@dataclass
class LocalExecutor:
    """Ranks of this host; on a device of their own out of `gpus` each, if they use any.

    Groups of several kinds stay up side by side, so that the stages of a cell need not start them anew.
    """

    context: ForkServerContext
    gpus: tuple[int, ...] = ()
    _groups: dict[WorldKind, RankGroup] = field(default_factory=dict)
    _leaving: list[RankGroup] = field(default_factory=list)

    def start(self, kind: WorldKind, log_folder: Path) -> None:
        """Have ranks of this kind; those that died since their last stage are replaced.

        Raises:
            OSError, EOFError: they could not be started; none is left behind.
        """
        group = self._groups.get(kind)
        if group and not group.usable():
            self._groups.pop(kind).kill()
            group = None
        if group is None:
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
        """Let the ranks of other kinds leave, which would only take up room."""
        for kind in self._groups.keys() - kinds:
            self._leave(kind)

    def release(self) -> None:
        """Let all ranks leave; does not wait for them."""
        self.keep_only(set())

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

    def _leave(self, kind: WorldKind) -> None:
        group = self._groups.pop(kind)
        group.close()
        self._leaving.append(group)
