"""Models with what users have in theirs: constant, odd, shared and narrow tensors."""

import math

import torch

from dcpbench.workloads.models import Mlp


class Adversarial(Mlp):
    """An `Mlp` with the persistent buffers of a transformer, which training leaves alone: masks, tables, an
    int64 above 2**53; and values that a detour through another dtype or through arithmetic loses. One of them
    counts batches."""

    seen: torch.Tensor

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        side = torch.arange(8)
        angles = torch.outer(side, 10000.0 ** (-side[:4] / 4))
        odd = [0x00000001, 0x007FFFFF, 0x7FC12345, 0x7F800001, -0x3DCBB, -0x80000000, 0x7F800000, 0]
        buffers = {
            "causal": torch.ones(8, 8, dtype=torch.bool).tril(),
            "bias": torch.full((8, 8), -math.inf).triu(1),
            "rope": torch.polar(torch.ones_like(angles), angles),
            "positions": side.unsqueeze(0),
            "large": torch.tensor([2**53 + 1, 2**62 + 1, -(2**63)]),
            "odd": torch.tensor(odd, dtype=torch.int32).view(torch.float32),
            "narrow": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
            "seen": torch.tensor(2**53, dtype=torch.int64),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch of shape (batch, sizes[0]) to (batch, sizes[-1])."""
        if self.training and torch.is_grad_enabled():
            self.seen += 1
        return super().forward(x)
