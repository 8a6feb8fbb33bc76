"""Faults: bugs injected into cells, each of which a check has to detect."""

from pathlib import Path

from dcpbench.core.plugins import API, Plugin

_HERE = "dcpbench.plugins.faults"

plugin = Plugin(
    name="faults",
    api=API,
    conf=Path(__file__).parent / "conf",
    values={"fault": f"{_HERE}.registry:load_faults"},
    hooks={
        "run": f"{_HERE}.inject:inject_in_training",
        "checkpointer": f"{_HERE}.inject:inject_in_saves",
        "verdict": f"{_HERE}.expected:judge_fault",
    },
    preload=(f"{_HERE}.inject",),
    public={"fault": f"{_HERE}.registry:fault", "faults": f"{_HERE}.registry:faults"},
)
