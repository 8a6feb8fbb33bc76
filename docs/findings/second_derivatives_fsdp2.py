"""A gradient penalty, which differentiates twice, under fully_shard and without it.

torchrun --nproc-per-node 2 second_derivatives_fsdp2.py
"""

import sys
from collections.abc import Iterator

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


def gradients(model: nn.Sequential, score_first: bool) -> Iterator[dict[str, torch.Tensor | None]]:
    """Yield the gradients of steps whose penalty needs the slope of the model by its input."""
    parameters = dict(model.named_parameters())  # which an optimizer has
    for step in range(2):
        torch.manual_seed(step)
        x = torch.rand(4, 8, requires_grad=True)
        score = model(x.detach()).mean() if score_first else 0.0
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        loss = (slope.norm(dim=1) - 1).square().mean()
        (loss + score if score_first else loss + model(x.detach()).mean()).backward()
        found = {name: one.grad for name, one in parameters.items()}
        yield {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}
        for one in parameters.values():
            one.grad = None


def wrong_ones(shards: str, score_first: bool) -> str:
    """Compare the gradients of two steps with those of a plain model."""
    (plain, next_plain), steps = gradients(build("none"), score_first), gradients(build(shards), score_first)
    try:
        first, second = steps
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"
    if lost := [name for name, one in first.items() if one is None and plain[name] is not None]:
        late = [name for name in lost if torch.equal(second[name], plain[name])]
        return f"no gradient of {', '.join(lost)}; in the next step {', '.join(late)} has that of this one"
    return "right" if all(torch.allclose(second[name], one) for name, one in next_plain.items()) else "wrong"


def main() -> int:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        print(f"torch {torch.__version__}")
    wrong = 0
    for shards in ("of the root", "of each layer"):
        for score_first in (False, True):
            says = wrong_ones(shards, score_first)
            wrong += says != "right"
            if first:
                print(f"  fully_shard {shards}, the score {'first' if score_first else 'last'}: {says}")
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
