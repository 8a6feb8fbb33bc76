"""Read exceptions of a user's code: their message, and the line that they come from."""

import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dcpbench.code.provenance import owner_of
from dcpbench.state.snapshot import plain_fqn

_JOINED = (
    " Ranks have a process group before they import your code: leave out init_process_group, or call it only "
    "if not torch.distributed.is_initialized()"
)
_EXITED = ": your code ended the process; it has no command line to parse, so pass workload.options"


def user_line(error: BaseException, frames: Iterable[FrameSummary] = ()) -> str | None:
    """Return the innermost line of an exception that is of a user's code, as `my_model.py:31`, if there is
    one. An exception of another process has no traceback here, but `frames`."""
    frame = _user_frame(error, frames)
    return f"{_short(frame.filename)}:{frame.lineno}" if frame else None


def user_code(error: BaseException, frames: Iterable[FrameSummary] = ()) -> str | None:
    """Return the code of that line and those that it continues on, or its place if that cannot be read."""
    frame = _user_frame(error, frames)
    numbers = range(frame.lineno or 0, (frame.end_lineno or 0) + 1) if frame else ()
    lines = [linecache.getline(frame.filename, number).strip() for number in numbers] if frame else []
    return " ".join(lines).strip() or user_line(error, frames)


def _user_frame(error: BaseException, frames: Iterable[FrameSummary]) -> FrameSummary | None:
    users = [frame for frame in _frames_of(error, frames) if owner_of(frame.filename) == "user"]
    return users[-1] if users else _user_frame(error.__cause__, ()) if error.__cause__ else None


def _frames_of(error: BaseException, frames: Iterable[FrameSummary]) -> Iterable[FrameSummary]:
    return traceback.extract_tb(error.__traceback__) or frames


def is_raised_in_torch(error: BaseException, frames: Iterable[FrameSummary] = ()) -> bool:
    """Return whether the innermost frame of an exception is torch's, apart from those of Python's library."""
    owners = [owner_of(frame.filename) for frame in _frames_of(error, frames)]
    return [owner for owner in owners if owner != "library"][-1:] == ["torch"]


def subjects(error: BaseException) -> tuple[str, ...]:
    """Return what the innermost module and optimizer are that are variables of torch or Python's library in
    the traceback of an exception, as in `RaisedError.of`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_torch = [frame for frame in frames if owner_of(frame.f_code.co_filename) in ("torch", "library")]
    variables = [value for frame in reversed(of_torch) for value in frame.f_locals.values()]
    names: list[str] = []
    for kind, facts in ((nn.Module, _of_module), (Optimizer, _of_optimizer)):
        innermost = next((value for value in variables if issubclass(type(value), kind)), None)
        if innermost is not None:
            names += [base.__name__ for base in type(innermost).__mro__]
            with suppress(Exception):  # its constructor may have raised
                names += facts(innermost)
    return tuple(names)


def _of_module(module: nn.Module) -> list[str]:
    named = [*module.named_modules(remove_duplicate=False)]
    counts = Counter(submodule for _, submodule in named)
    return [plain_fqn(module, name) for name, submodule in named if counts[submodule] > 1]


def _of_optimizer(optimizer: Optimizer) -> list[str]:
    state, groups = optimizer.state, optimizer.param_groups
    facts = [f"state[{type(key).__name__}]" for key in state if not isinstance(key, torch.Tensor)]
    if any(
        parameter.requires_grad and not state.get(parameter)
        for group in groups
        for parameter in group["params"]
    ):
        facts.append("parameter without state")
    return facts


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


def _short(file: str) -> str:
    """Return a path below the folder that its module was imported from."""
    folders = (folder for folder in map(Path, sys.path) if folder.is_absolute())
    below = [Path(file).relative_to(folder) for folder in folders if Path(file).is_relative_to(folder)]
    return str(min(below, key=lambda path: len(path.parts), default=Path(file)))
