"""Check a user's `workload.target` in a process like a rank's, before a cell starts."""

import inspect
import os
import pkgutil
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch.distributed as dist

from dcpbench.code.provenance import import_from_current_folder
from dcpbench.config.groups import Device
from dcpbench.config.schema import Config
from dcpbench.config.text import did_you_mean
from dcpbench.rank.agent import redirect
from dcpbench.rank.messages import StoreAddress, torchrun_variables
from dcpbench.rank.user_errors import message_of
from dcpbench.torch_private import FAKE_STORE
from dcpbench.workloads.workload import Workload, is_trainer

_NO_TRAINER = (
    "if it returns a Workload, leave out checkpointer=trainer; a trainer is a class with step, save and load "
    "(docs/tutorials/own-trainer.md, also from a train.py)"
)


def main(connection: Connection, configs: Sequence[Config]) -> None:
    """Send why no cell can use the target that these configurations have, or None. Then exit. The target is
    imported as on rank 0, in a process group in which no other rank exists."""
    for stream in (1, 2):  # user code can print
        redirect(stream, os.O_WRONLY)
    if all(config.device is Device.cpu for config in configs):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as for ranks: a GPU would take seconds to start
    size = configs[0].most_ranks
    os.environ.update(torchrun_variables(0, size, 0, size, StoreAddress.unused()))
    if configs[0].scenario.process_group:
        dist.init_process_group("fake", store=FAKE_STORE.value(), rank=0, world_size=size)
    import_from_current_folder()
    errors = (why_unusable(str(c.workload.target), c.workload.options, c.own_trainer) for c in configs)
    connection.send(next(filter(None, errors), None))
    connection.close()
    os._exit(0)  # user code can have started threads


def why_unusable(target: str, options: Mapping[str, Any], own_trainer: bool) -> str | None:
    """Import a target, without calling it. Return why a cell cannot use it, or None if it can.

    Args:
        options: the keyword arguments that it is called with.
        own_trainer: whether it must build a trainer, and is called with a setup first.
    """
    try:
        build = pkgutil.resolve_name(target)
    except BaseException as error:  # noqa: BLE001 - user code can raise anything
        near = ""
        if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType) and error.name:
            near = did_you_mean(error.name, vars(error.obj))
        message, _ = message_of(error)
        return f"cannot be imported: {type(error).__name__}: {message}{near}"
    if isinstance(build, ModuleType):
        return f"is a module; name a function in it, such as {target}.{_function_of(build)}"
    if not callable(build):
        return f"is of type {type(build).__name__}; name a function"
    if isinstance(build, type) and not own_trainer:
        if is_trainer(build):
            return "is a trainer; add checkpointer=trainer"
        if not issubclass(build, Workload) and build.__new__ is object.__new__:
            return f"returns a {build.__name__}; must return a dcpbench.api.Workload"
    return _why_not_called(build, options, own_trainer)


def _function_of(module: ModuleType) -> str:
    """Return the name of a function of a module; `build` if it has none."""
    functions = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and value.__name__[0] != "_"
    ]
    return "build" if "build" in functions or not functions else functions[0]


def _why_not_called(build: Any, options: Mapping[str, Any], own_trainer: bool) -> str | None:
    """Return why the signature of a function does not fit the call; None if it fits, or is not known."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return None
    why = _refused(signature, options, own_trainer)
    if why is None:
        return None
    arguments = [*(["setup"] if own_trainer else []), *(f"{name}=..." for name in options)]
    call = f"{getattr(build, '__name__', 'it')}({', '.join(arguments)})"
    fix = "set its arguments in workload.options"
    if _refused(signature, options, not own_trainer) is None:
        fix = _NO_TRAINER if own_trainer else "if it is a trainer, add checkpointer=trainer"
    return f"cannot be called as {call}: {why}; {fix}"


def _refused(signature: inspect.Signature, options: Mapping[str, Any], with_setup: bool) -> str | None:
    """Return why a signature does not take these arguments, or None if it does."""
    try:
        signature.bind(*(["setup"] if with_setup else []), **options)
    except TypeError as error:
        return str(error)
    return None
