"""The state of parameters that are frozen at a load is dropped (docs/findings/state-of-frozen.md). A resumed
run lacks it for as long as they are frozen."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp1_sizes
from dcpbench.plugins.defects._loads import names_by
from dcpbench.verify.compare import ABSENT
from dcpbench.verify.snapshot import Idle, Leaves
from dcpbench.workloads.run_state import FLAGS, State

_BY, _CHECK = "state_of_frozen", "optim_equal"


def _applies(config: Config) -> bool:
    return not config.own_trainer and not config.optimizer_state


def _expected(cell: Cell, moment: Moment, reference: Restored | Resumed) -> Iterator[State]:
    if isinstance(reference, Restored):
        yield {_CHECK: without_frozen(reference.checkpoint.state.get(_CHECK, {}), reference.actual)}
        return
    dropped = names_by(cell, _CHECK, _BY)
    expected = reference.expected.get(_CHECK, {})
    still = without_frozen(expected, {FLAGS: reference.expected.get(FLAGS, {})})
    absent = {name: leaf for name, leaf in still.items() if name in dropped}
    yield {_CHECK: absent | (stepped_by_save(expected, absent) if fsdp1_sizes(cell.config) else {})}


def without_frozen(saved: Leaves, actual: Mapping[str, Leaves]) -> Leaves:
    """Return the names of saved state of frozen parameters as absent. A parameter with some restored
    state is left out.

    Args:
        actual: by check, the state of the run that loaded, with its flags.
    """
    absent = Leaves()
    for name, requires_grad in actual.get(FLAGS, {}).items():
        flag, _, fqn = name.partition(".")
        below = f"state.{fqn}."
        if flag != "requires_grad" or requires_grad is not False:
            continue
        present = (leaf for key, leaf in actual.get(_CHECK, {}).items() if key.startswith(below))
        if all(isinstance(leaf, Idle) for leaf in present):
            absent |= {key: ABSENT for key in saved if key.startswith(below)}
    return absent


def stepped_by_save(expected: Leaves, absent: Leaves) -> Leaves:
    """Return the counters of an optimizer on a rank that has elements of frozen parameters only. Without any
    state left, it takes a step in the next save under FSDP1."""
    idle = {name: leaf.leaf for name, leaf in expected.items() if isinstance(leaf, Idle)}
    if any(name.startswith("state.") and name not in {*idle, *absent} for name in expected):
        return {}
    counters = {name: leaf for name, leaf in idle.items() if name.endswith(".step")}
    return {name: Idle(replace(leaf, local=leaf.local + 1)) for name, leaf in counters.items()}


defect = Defect(("restored", "resumed"), _applies, _expected, from_before=False)
