"""dcpbench checks that training resumes exactly from a PyTorch Distributed Checkpoint, and what that
costs."""

import sys

__version__ = "0.1.0"

SAFE_PATH = ("PYTHONSAFEPATH", "dcpbench")
"""An environment variable and its value for every Python that dcpbench starts, so that it imports nothing
from the current folder. Ranks search that folder later (`dcpbench.code.provenance`), unless the user has
set another value."""


def leave_out_current_folder() -> None:
    """Remove the folder that `python -m` puts first from `sys.path`, before anything else is imported."""
    import os

    if not sys.flags.safe_path:
        try:
            if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib would be imported from there
                del sys.path[0]
        except OSError:  # it was removed
            pass
    os.environ.setdefault(SAFE_PATH[0], "1" if sys.flags.safe_path else SAFE_PATH[1])
