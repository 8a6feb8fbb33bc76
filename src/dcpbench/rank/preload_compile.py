"""Modules that an agent also imports if a sweep compiles. Otherwise every new rank spends seconds on
them before its first graph. Nothing here may start CUDA or leak a thread."""

import threading
from contextlib import suppress

import torch
from torch._inductor import cpu_vec_isa


def _try_vector_instructions() -> None:
    with suppress(AttributeError):  # private to torch, and only saves time
        cpu_vec_isa.pick_vec_isa()


# It waits for subprocesses for most of its two seconds, so the imports run in parallel.
probing = threading.Thread(target=_try_vector_instructions)
if not torch.cuda.is_available():
    probing.start()

import torch._dynamo.backends.inductor  # noqa: E402
import torch._functorch.aot_autograd  # noqa: E402
import torch._inductor.codegen.cpp_wrapper_cpu  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
from torch._dynamo import mutation_guard  # noqa: E402
from torch._inductor import codecache  # noqa: E402

with suppress(AttributeError):
    codecache.torch_key()  # hashes torch's sources, once per process
with suppress(AttributeError):  # otherwise the first graph would patch nn.Module
    mutation_guard.install_generation_tagging_init()
if probing.ident is not None:
    probing.join()
