"""Rows in, tables and pictures out; needs pandas, and no torch. Plug-ins are loaded for their columns.

from dcpbench.report import read_sweeps

frame = read_sweeps("outputs/nightly").frame
"""

TYPE_CHECKING = False  # that of `typing`, which `python -m` would import from the current folder
if TYPE_CHECKING:
    from dcpbench.analysis.frame import Sweeps, read_sweeps

__all__ = ["Sweeps", "read_sweeps"]


def __getattr__(name: str) -> object:
    # The driver takes its colours from here and must not wait for pandas.
    if name in __all__:
        from dcpbench.analysis import frame
        from dcpbench.core.plugins import load_plugins

        load_plugins()
        return getattr(frame, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
