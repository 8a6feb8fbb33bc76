"""Modules that an agent also imports if a sweep compiles. Otherwise every new rank spends seconds on
them before its first graph. Nothing here may start CUDA or leak a thread."""

import threading
from contextlib import suppress
from importlib import import_module

import torch

from dcpbench.torch_private import COMPILER_MODULES, TAG_GENERATIONS, TORCH_KEY, VECTOR_INSTRUCTIONS

_vector_instructions = VECTOR_INSTRUCTIONS.owner


def _try_vector_instructions() -> None:
    with suppress(AttributeError):  # it only saves time
        VECTOR_INSTRUCTIONS.of(_vector_instructions)()


# It waits for subprocesses for most of its two seconds, so the imports run in parallel.
probing = threading.Thread(target=_try_vector_instructions)
if not torch.cuda.is_available():
    probing.start()
for module in COMPILER_MODULES:
    import_module(module.path)
for once in (TORCH_KEY, TAG_GENERATIONS):
    with suppress(AttributeError):
        once.value()
if probing.ident is not None:
    probing.join()
