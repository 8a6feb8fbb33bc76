"""What the fork server imports besides where a sweep compiles: else every fresh rank spends seconds
on it before its first graph. Nothing here may touch CUDA or leave a thread behind."""

import threading
from contextlib import suppress

import torch
from torch._inductor import cpu_vec_isa


def _try_vector_instructions() -> None:
    with suppress(AttributeError):  # private to torch, and only a matter of time if it is gone
        cpu_vec_isa.pick_vec_isa()


# It waits for subprocesses most of its two seconds, so the imports go on meanwhile.
waiting = threading.Thread(target=_try_vector_instructions)
if not torch.cuda.is_available():
    waiting.start()

import torch._dynamo.backends.inductor  # noqa: E402
import torch._functorch.aot_autograd  # noqa: E402
import torch._inductor.codegen.cpp_wrapper_cpu  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
from torch._dynamo import mutation_guard  # noqa: E402
from torch._inductor import codecache  # noqa: E402

with suppress(AttributeError):
    codecache.torch_key()  # hashes torch's sources, once a process
with suppress(AttributeError):  # the first graph would replace methods of nn.Module, as a patch does
    mutation_guard.install_generation_tagging_init()
if waiting.ident is not None:
    waiting.join()
