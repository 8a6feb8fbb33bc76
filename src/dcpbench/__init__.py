"""dcpbench: an experiment matrix for PyTorch Distributed Checkpoint, one trustworthy row per cell."""

import sys

__version__ = "0.1.0"

SAFE_PATH = ("PYTHONSAFEPATH", "dcpbench")
"""A variable and its value in the environment of every Python that dcpbench starts: it imports nothing from
the current folder. Ranks alone do, later (`dcpbench.records.installation`). Another value is the user's, and
stays."""


class _Moved:
    """Finds modules by the names that they had before they moved; asked where nothing else finds one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        if not name.startswith("dcpbench."):
            return None
        from dcpbench.core.moved import spec_of

        return spec_of(name)


sys.meta_path.append(_Moved)  # type: ignore[arg-type]


def leave_out_current_folder() -> None:
    """Take the folder that `python -m` puts first off `sys.path`; called before anything else is imported."""
    import os

    if not sys.flags.safe_path:
        try:
            if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib would be imported from there
                del sys.path[0]
        except OSError:  # it was removed
            pass
    os.environ.setdefault(SAFE_PATH[0], "1" if sys.flags.safe_path else SAFE_PATH[1])
