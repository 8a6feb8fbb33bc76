"""What a healthy cell has to have looked at, on one rank that is this process: by each check, at which
places, and of what there each name."""

from dataclasses import replace
from typing import Any
from unittest import mock

from dcpbench.cell import steps
from dcpbench.cell.cell import Cell
from dcpbench.compare.controls import names_of_control
from dcpbench.config.schema import Config
from dcpbench.core.rank_report import RankReport
from dcpbench.core.state import CHECK_OF, text_of
from dcpbench.formats.audit import Chunk, Entry, Manifest, controls
from dcpbench.runs.build_run import build
from dcpbench.runs.own_run import OwnRun
from dcpbench.scenarios import fine_tune
from dcpbench.state.flags import HOOKS
from dcpbench.state.process_state import ProcessState
from dcpbench.twin.lockstep import REPLICAS, TRAINING_CHECKS
from dcpbench.workloads.generators import states_of_generators
from dcpbench.workloads.workload import batches_of
from support.alone import TWICE, Ran, config, run_alone, world

Places = dict[tuple[str, str], set[str]]
"""The names that are compared, by check and place."""

OPEN = {"process.open_files", "process.threads", "process.descriptors"}
STORED = {".metadata", "__0_0.distcp"}
FILES = {*STORED, "a file that went", "a file that came"}

ONE = Manifest({"key": Entry((2,), "float32", (Chunk((0,), (2,), "file"),))}, {"file": 1}, {"file": 1})
DAMAGES = {*controls(ONE, {}), "bytes of two entries", "files that were not synced"}
PROCESS = {*map(text_of, ProcessState.leaves(states_of_generators(world().device), world().device))}


def trained(given: Config) -> OwnRun:
    run = build(given, world(), given.seed)
    run.train(batches_of(given, world().device), 1)
    run.exclusions = replace(run.exclusions, generators=run.random.needed)
    return run


class Looked:
    """The comparisons of a cell with this configuration."""

    def __init__(self, given: Config) -> None:
        self.names: dict[str, set[str]] = {}
        for part, leaves in trained(given).live_state().items():
            self.names.setdefault(CHECK_OF[part], set()).update(names_of_control(leaves))
        self.all = set.union(*self.names.values())
        self.restored = self.all - self.names["flags_equal"]
        self.state = {name for name in self.names["optim_equal"] if name.startswith("state.")}
        self.keys = {f"model.{name}" for name in self.names["model_equal"] if not self._is_frozen(name)}
        self.keys |= {f"optimizer.{name}" for name in self.state}
        self.keys |= {
            name for name in self.names["extra_equal"] if name.startswith(("noise.", "tensor_object."))
        }
        self.keys |= self.names["random_equal"]

    def _is_frozen(self, name: str) -> bool:
        return name.startswith(fine_tune.FROZEN)

    def saved(self, *steps: int, first: bool = True) -> Places:
        """In saves of these steps; with the first one of a cell nothing is counted."""
        places: Places = {}
        for number, step in enumerate(steps):
            where = f"in the checkpoint of step {step}"
            places |= {
                ("side_effect_free", f"after the save of step {step}"): self.all | PROCESS,
                ("side_effect_free", f"once the save of step {step} had ended"): opened(number or not first),
                ("checkpoint_whole", where): DAMAGES,
                ("files_equal", where): self.keys,
                ("files_unchanged", where): FILES,
            }
        return places

    def loaded(self, *steps: int, again: bool, source: bool = True) -> Places:
        """In loads of these steps, whose run is in this process; the first one of the cell, or `again`."""
        return {
            ("side_effect_free", f"after the load of step {step}"): opened(again or number)
            | PROCESS
            | (self.all if source else set())
            for number, step in enumerate(steps)
        }

    def equal(self, where: str) -> Places:
        """Hooks of the model are compared after the resume."""
        return {
            (check, where): names - {text_of(HOOKS)} if check == "flags_equal" else names
            for check, names in self.names.items()
        }

    def resumed(self, step: int, exactly: bool = True) -> Places:
        where = f"after the checkpoint of step {step}"
        loss = {f"loss of step {step + 1}"}
        places: Places = {("flags_equal", f"{where}, resumed"): self.names["flags_equal"]}
        if exactly:
            exact = {("loss_resume_equal", where): loss, ("state_resume_equal", where): self.restored}
            return places | exact
        return places | self.trained(where, step + 1) | {("loss_resume_close", where): loss}

    def trained(self, where: str, *steps: int) -> Places:
        """Steps compared with a twin, on a rank that has no replica."""
        parameters = {name for name in self.names["model_equal"] if not self._is_frozen(name)}
        groups = {name for name in self.names["optim_equal"] if not name.endswith(".params")}
        return {
            ("gradient_close", where): parameters,
            ("step_equal", where): self.names["model_equal"] | groups,
            ("batch_loss_close", where): {f"loss of step {step}" for step in steps},
        }

    def twin(self) -> Places:
        """A run that never saves, compared with its twin."""
        unsaved = {("save_harmless", "in the run that saved"): self.all}
        return self.trained("in the uninterrupted run", 1, 2, 3) | unsaved

    def restart(self, *steps: int) -> Places:
        """Loads of these steps, the first in the cell, each with all that follows."""
        places = self.loaded(*steps, again=False) | absent_key(steps[0])
        for step in steps:
            places |= self.equal(f"in the checkpoint of step {step}") | self.resumed(step)
        return places


def opened(counted: object) -> set[str]:
    return OPEN if counted else {"process.open_files"}


def absent_key(step: int) -> Places:
    where = f"of a load of an absent key in the checkpoint of step {step}"
    return {("contract_held", where): {"refusal"}}


def places_of(report: RankReport) -> Places:
    """The names compared on this rank."""
    return {
        (check, str(where)): set(names)
        for check, seen in report.checks.items()
        for where, names in seen.compared.items()
    }


SHORT = Looked(config(**TWICE))


def save_load(looked: Looked = SHORT) -> Places:
    again = "in the checkpoint of step 2, saved again"
    return {
        **looked.saved(1, 2),
        **looked.twin(),
        **looked.restart(2, 1),
        **looked.equal(again),
        **looked.loaded(2, again=True),
    }


def passed(ran: Ran) -> Ran:
    assert ran.verdict.status == "pass", ran.verdict.reason
    return ran


def passing(**values: Any) -> Ran:
    """Run a small cell that passes. Its training has a verdict before the first save."""
    judged, honest = list[bool](), steps.save

    def save(cell: Cell, *arguments: Any, **options: Any) -> Any:
        judged.append({*TRAINING_CHECKS} - {REPLICAS} <= cell.report.checks.keys())
        return honest(cell, *arguments, **options)

    with mock.patch.object(steps, "save", save):
        ran = passed(run_alone(**{**TWICE, **values}))
    assert judged
    assert all(judged), "a save came before the verdict of the training"
    return ran


def once(step: int, looked: Looked = SHORT) -> Places:
    """A scenario that saves twice and loads once."""
    return looked.saved(1, 2) | looked.twin() | looked.restart(step)
