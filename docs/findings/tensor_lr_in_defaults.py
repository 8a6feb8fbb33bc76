"""A group that is added after a resume begins at another learning rate, where that is a tensor.

python tensor_lr_in_defaults.py
"""

import sys

import torch


def optimizer(lr: float | torch.Tensor) -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=lr)


def lr_of_an_added_group(of: torch.optim.Adam) -> float:
    of.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    return float(of.param_groups[-1]["lr"])


print(f"torch {torch.__version__}")
differs = False
for kind, make in (("a number", float), ("a tensor", torch.tensor)):
    trained = optimizer(make(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(trained, step_size=1, gamma=0.5)
    trained.param_groups[0]["params"][0].grad = torch.ones(2)
    trained.step()
    scheduler.step()
    resumed = optimizer(make(0.1))
    resumed.load_state_dict(trained.state_dict())
    now = [float(each.param_groups[0]["lr"]) for each in (trained, resumed)]
    added = [lr_of_an_added_group(each) for each in (trained, resumed)]
    differs |= added[0] != added[1]
    print(f"  lr is {kind}")
    print(f"    of the group: {now[0]:g}, resumed {now[1]:g}")
    print(f"    of a group that is added: {added[0]:g}, resumed {added[1]:g}")
sys.exit(differs)
