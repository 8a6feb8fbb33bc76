"""What the fork server imports besides where a sweep compiles: else every fresh rank spends two
seconds on it before its first graph. Nothing here may touch CUDA or start a thread."""

from contextlib import suppress

import torch._dynamo.backends.inductor
import torch._functorch.aot_autograd
import torch._inductor.codegen.cpp_wrapper_cpu
import torch._inductor.compile_fx
from torch._inductor import codecache, cpu_vec_isa

with suppress(AttributeError):  # private to torch, and only a matter of time if they are gone
    codecache.torch_key()  # hashes torch's sources, once a process
    if not torch.cuda.is_available():
        cpu_vec_isa.pick_vec_isa()  # tries vector instructions in subprocesses, once a process
