"""The models of the matrix."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Mlp(nn.Module):
    """Linear layers `net1`, `net2`, … with a ReLU after each, as in PyTorch's own checkpoint tests.

    With a ReLU at the end such a net can die (loss and gradients 0.0, whatever was restored). Here
    targets above zero and small learning rates keep it alive, and the verdict checks that they did.

    Args:
        sizes: widths, input first; layer i maps `sizes[i - 1]` to `sizes[i]`.
    """

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.input_size = sizes[0]
        self.output_size = sizes[-1]
        for index, (width_in, width_out) in enumerate(itertools.pairwise(sizes), start=1):
            self.add_module(f"net{index}", nn.Linear(width_in, width_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch of shape (batch, sizes[0]) to (batch, sizes[-1])."""
        for layer in self.children():
            x = F.relu(layer(x))
        return x
