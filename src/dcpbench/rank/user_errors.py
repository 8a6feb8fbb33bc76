"""Read exceptions of a user's code: their message, and the line that they come from."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

import dcpbench

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD_LIBRARY = ("stdlib", "platstdlib")
_JOINED = (
    " Ranks have a process group before they import your code: leave out init_process_group, or call it only "
    "if not torch.distributed.is_initialized()"
)
_EXITED = ": your code ended the process; it has no command line to parse, so pass workload.options"


def _below(*folders: str) -> tuple[str, ...]:
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)


_OWN = _below(*dcpbench.__path__)
_NOT_THE_USERS = (*_OWN, *_below(*torch.__path__, *map(sysconfig.get_path, _STANDARD_LIBRARY)))


def user_line(error: BaseException, frames: Iterable[FrameSummary] = ()) -> str | None:
    """Return the innermost line of an exception that is not of dcpbench, torch, an installed package or
    Python's library, as `my_model.py:31`; None if there is none.

    Args:
        frames: of an exception of another process, which has no traceback here.
    """
    for frame in reversed([*(traceback.extract_tb(error.__traceback__) or frames)]):
        if is_users(frame.filename):
            return f"{_short(frame.filename)}:{frame.lineno}"
    return user_line(error.__cause__) if error.__cause__ else None


def message_of(error: BaseException) -> tuple[str, str | None]:
    """Return an exception's text on one line, or why there is none: a custom `__str__` can raise. The
    errors of `init_process_group` where a group exists, and of wrong arguments, also say what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    again = dist.is_initialized() and frames and frames[-1].name == dist.init_process_group.__name__
    is_usage = isinstance(error, SystemExit) and error.code == 2  # of argparse, and by convention
    fix = _JOINED if again else _EXITED if is_usage else ""
    try:
        return " ".join(str(error).split()) + fix, None
    except Exception as broken:  # noqa: BLE001
        return "", f"its __str__ raised {type(broken).__name__}"


def needs_closure(error: BaseException) -> Optimizer | None:
    """Return the optimizer whose `step` has raised, if it raises only without a closure."""
    variables = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    steps = [one["self"] for one in variables if "closure" in one and isinstance(one.get("self"), Optimizer)]
    if not steps:
        return None
    optimizer = steps[-1]

    def raised(*closure: Any) -> str | None:
        try:
            optimizer.step(*closure)
        except Exception as other:  # noqa: BLE001 - of any class
            return repr(other)
        return None

    again = raised()
    return optimizer if again == repr(error) != raised(lambda: torch.zeros(())) else None


def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package."""
    return not _INSTALLED.isdisjoint(Path(file).parts)


def is_users(file: str) -> bool:
    """Return whether a file is a user's; code that the compiler has generated is not."""
    if file.startswith("<") or "torchinductor_" in file:
        return False
    return not is_installed(file) and not os.path.realpath(file).startswith(_NOT_THE_USERS)


def _short(file: str) -> str:
    """Return a path below the folder that its module was imported from."""
    folders = (folder for folder in map(Path, sys.path) if folder.is_absolute())
    below = [Path(file).relative_to(folder) for folder in folders if Path(file).is_relative_to(folder)]
    return str(min(below, key=lambda path: len(path.parts), default=Path(file)))
