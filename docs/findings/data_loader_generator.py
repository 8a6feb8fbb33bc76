"""A StatefulDataLoader of torchdata that is stopped in an epoch, saved, loaded into a new one, and goes on:
which samples come then, in that epoch and in the next one, with `generator=` and without.

python data_loader_generator.py
"""

import sys

import torch
import torchdata
from torchdata.stateful_dataloader import StatefulDataLoader


def made(given: bool) -> StatefulDataLoader:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0) if given else None
    return StatefulDataLoader(range(6), batch_size=None, shuffle=True, generator=generator)


print(f"torch {torch.__version__}, torchdata {torchdata.__version__}")
wrong = False
for given in (False, True):
    one, other = made(given), made(given)
    epoch = iter(one)
    next(epoch)
    other.load_state_dict(one.state_dict())
    rest, again = [list(epoch), list(one)], [list(other), list(other)]
    print("  with generator=" if given else "  without generator=")
    for what, mine, theirs in zip(("the rest of the epoch", "the next epoch"), rest, again, strict=True):
        print(f"    {what}: uninterrupted {mine}, resumed {theirs}{'' if mine == theirs else '  <- differs'}")
        wrong |= mine != theirs
sys.exit(wrong)
