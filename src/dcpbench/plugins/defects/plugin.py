"""The plug-in of known defects of torch: each file in this folder recomputes one."""

from pathlib import Path

from dcpbench.core.plugins import Plugin

_HERE = Path(__file__).parent
_NAMES = sorted(path.stem for path in _HERE.glob("[!_]*.py") if path.stem != "plugin")

plugin = Plugin(
    name="defects",
    api=1,
    defects={name: f"{__package__}.{name}:defect" for name in _NAMES},
    preload=tuple(f"{__package__}.{name}" for name in _NAMES),
)
