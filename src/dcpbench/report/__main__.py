"""`python -m dcpbench.report <sweep>...`: the tables of sweeps, or what its first word names."""

import importlib
import sys

from dcpbench.records.files import open_standard_streams
from dcpbench.records.plugins import PluginError, load_plugins
from dcpbench.records.store import ResultsError
from dcpbench.report.styles import complain

_COMMANDS = {
    "compare": "dcpbench.report.compare",
    "history": "dcpbench.report.history",
    "log": "dcpbench.report.trackers",
    "thin": "dcpbench.sweep.folder.prune",
}
"""Modules with a `main(arguments) -> int` of their own, each imported only when it is asked for."""


def main(arguments: list[str]) -> int:
    """Run what the first word names, else the tables of the sweeps; 2 for what cannot be read."""
    open_standard_streams()
    named = bool(arguments) and arguments[0] in _COMMANDS
    module = importlib.import_module(_COMMANDS[arguments[0]] if named else "dcpbench.report.show")
    try:
        load_plugins()
        return int(module.main(arguments[named:]))
    except (PluginError, ResultsError) as error:
        complain(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
