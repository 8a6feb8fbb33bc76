"""Asking DCP for an optimizer's state before its first step changes how training goes on.

    python save_before_first_step.py

Trains a small model twice from the same seed, for three steps with Adam. The second time
get_optimizer_state_dict is called before the first step, as a save at step 0 does. Prints the losses and
the optimizer's step counter before the first step. Exit status 1 if the losses differ.
"""

import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def losses(asked: bool) -> tuple[list[float], object]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if asked:
        get_optimizer_state_dict(model, optimizer)
    counters = [state["step"].item() for state in optimizer.state.values()]
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8) * (step + 1)).square().sum()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, counters


def main() -> int:
    plain, asked = losses(False), losses(True)
    print(f"torch {torch.__version__}")
    print(f"never asked:            losses {plain[0]}, step counters before the first step {plain[1]}")
    print(f"asked before step one:  losses {asked[0]}, step counters before the first step {asked[1]}")
    return int(plain[0] != asked[0])


if __name__ == "__main__":
    sys.exit(main())
