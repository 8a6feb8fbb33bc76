"""Start the recorder in a process of the script, then run the sitecustomize that this one hides.

Python imports this module before the script, because its folder is first in PYTHONPATH. It never breaks the
script: an error is printed, and nothing is recorded.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _start() -> None:
    package = _HERE.parent
    spec = importlib.util.spec_from_file_location(
        "_dcpbench_recorder", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec
    assert spec.loader
    recorder = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recorder
    spec.loader.exec_module(recorder)
    recorder.start(os.environ["DCPBENCH_SCRIPT"])


def _run_hidden() -> None:
    others = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("DCPBENCH_SCRIPT"):
    try:
        _start()
    except Exception as error:  # noqa: BLE001 - the script runs on unrecorded, which dcpbench reports
        sys.stderr.write(f"dcpbench: this process is not recorded: {error!r}\n")
_run_hidden()
