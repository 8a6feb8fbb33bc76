"""What the fork server imports besides where a sweep compiles: else every fresh rank spends two
seconds on it before its first graph. Nothing here may touch CUDA or start a thread."""

from contextlib import suppress

from torch._inductor import codecache, cpu_vec_isa

with suppress(AttributeError):  # private to torch, and only a matter of time if they are gone
    # Each tries its vector instructions in subprocesses, or hashes torch's sources, once a process.
    cpu_vec_isa.pick_vec_isa()
    codecache.torch_key()
