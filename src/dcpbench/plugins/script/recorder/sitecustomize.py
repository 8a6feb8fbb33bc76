"""Start the recorder in a process of the script, then run the sitecustomize that this one hides.

Its folder is first in PYTHONPATH. It never breaks the script: an error is printed, and nothing is recorded.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))

if settings := os.environ.get("DCPBENCH_SCRIPT"):
    try:
        import dcpbench_recorder  # type: ignore[import-not-found]

        dcpbench_recorder.start(settings)
    except Exception as error:  # noqa: BLE001 - the script runs on unrecorded, which dcpbench reports
        sys.stderr.write(f"dcpbench: this process is not recorded: {error!r}\n")
hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE])
if hidden and hidden.loader:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
