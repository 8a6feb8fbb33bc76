"""A gradient penalty, which differentiates twice, under fully_shard and without it.

torchrun --nproc-per-node 2 second_derivatives_fsdp2.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(shards: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (2,))
    if shards == "of each layer":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
    if shards != "none":
        fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Sequential, score_first: bool) -> dict[str, torch.Tensor | None]:
    """The penalty needs the slope of the model by its input."""
    parameters = dict(model.named_parameters())  # which an optimizer has
    torch.manual_seed(1)
    x = torch.rand(4, 8, requires_grad=True)
    score = model(x.detach()).mean() if score_first else 0.0
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    loss = (slope.norm(dim=1) - 1).square().mean()
    (loss + score if score_first else loss + model(x.detach()).mean()).backward()
    found = {name: one.grad for name, one in parameters.items()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}


def main() -> int:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        print(f"torch {torch.__version__}")
    wrong = 0
    for shards in ("of the root", "of each layer"):
        for score_first in (False, True):
            expected, order = gradients(build("none"), score_first), "first" if score_first else "last"
            try:
                found = gradients(build(shards), score_first)
            except RuntimeError as error:
                says = f"RuntimeError: {str(error).splitlines()[0]}"
            else:
                lost = [name for name, one in found.items() if one is None and expected[name] is not None]
                says = f"no gradient of {', '.join(lost)}" if lost else "right"
            wrong += says != "right"
            if first:
                print(f"  fully_shard {shards}, the score {order}: {says}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
