"""What the fork server imports once, so that a rank is born with it. Nothing here may touch CUDA."""

import torch._dynamo
import torch._inductor.config
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401
