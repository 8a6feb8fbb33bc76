"""Under torch.compile, a buffer that the forward pass updates and then uses gives wrong gradients.

    python compiled_mutated_buffer.py

One linear layer, whose output is scaled by a buffer that each forward pass doubles first. The gradient of the
compiled model is set beside that of the uncompiled one. Exit status 1 if they differ for any backend.
"""

import sys

import torch
from torch import nn

BACKENDS = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")


class Scaled(nn.Module):
    gain: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain *= 2.0
        return self.linear(x) * self.gain


def gradient(backend: str | None, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the weight after one step, and the output."""
    torch.manual_seed(0)
    model = Scaled().to(device)
    run = torch.compile(model, backend=backend) if backend else model
    out = run(torch.ones(4, 8, device=device))
    out.sum().backward()
    assert model.linear.weight.grad is not None
    return model.linear.weight.grad, out.detach()


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    right, right_out = gradient(None, device)
    wrong = False
    for backend in BACKENDS:
        found, out = gradient(backend, device)
        factor = (found / right).mean().item()
        same = torch.allclose(out, right_out)
        wrong |= factor != 1.0
        print(f"torch {torch.__version__}, {backend}: output {same}, gradient {factor:g} times the right one")
        torch._dynamo.reset()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
