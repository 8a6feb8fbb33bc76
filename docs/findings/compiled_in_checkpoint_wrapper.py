"""A checkpoint of a model with activation checkpointing around compiled layers, loaded by a plain model.

python compiled_in_checkpoint_wrapper.py
"""

import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict


def main() -> int:
    print(f"torch {torch.__version__}")
    wrong = 0
    orders = {
        "compile(checkpoint_wrapper(layer))": lambda layer: torch.compile(checkpoint_wrapper(layer)),
        "checkpoint_wrapper(compile(layer))": lambda layer: checkpoint_wrapper(torch.compile(layer)),
    }
    for order, wrap in orders.items():
        state = get_model_state_dict(nn.Sequential(wrap(nn.Linear(4, 4))))
        print(f"  {order}: {', '.join(state)}")
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"model": state}, checkpoint_id=folder)
            try:
                dcp.load({"model": nn.Sequential(nn.Linear(4, 4)).state_dict()}, checkpoint_id=folder)
                print("    loaded by a plain model")
            except CheckpointException as error:
                wrong += 1
                print(f"    {error.failures[0][0]}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
