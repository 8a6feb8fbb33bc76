"""An optimizer that looks up the state of its parameters before its first step, as Schedule-Free does.

python touched_optimizer_state.py
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


class Averaging(torch.optim.SGD):
    """SGD with momentum; `train` moves parameters that have an average."""

    def train(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:  # a defaultdict: this adds an empty entry
                    raise NotImplementedError


def build(touch: bool) -> tuple[nn.Module, Averaging]:
    model = nn.Linear(2, 2)
    optimizer = Averaging(model.parameters(), lr=0.1, momentum=0.9)
    if touch:
        optimizer.train()
    return model, optimizer


def main() -> int:
    print(f"torch {torch.__version__}")
    restored = []
    for touch in (False, True):
        model, optimizer = build(touch)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        folder = tempfile.mkdtemp()
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
        model, optimizer = build(touch)
        state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        restored.append(sum("momentum_buffer" in entries for entries in optimizer.state.values()))
        print(f"  train() before the load: {touch}; restored momenta: {restored[-1]} of 2")
    return int(restored != [2, 2])


if __name__ == "__main__":
    sys.exit(main())
