"""Workloads that take their steps themselves, right and wrong ones."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import SAMPLES, WIDTH, inputs, net, reversed_loss

NOISE = 4

Share = Any
Optimizers = list[torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 16), nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.leaky_relu(self.first(x), 0.2))


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"generator": Net(NOISE, WIDTH), "discriminator": Net(WIDTH, 1)})


def real_and_noise(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs(generator), torch.randn(SAMPLES, NOISE, generator=generator)


def two_adams(model: Any) -> Optimizers:
    return [torch.optim.Adam(one.named_parameters(), 0.01, betas=(0.5, 0.9)) for one in model.values()]


def adversarial_step(
    model: Any, optimizers: Optimizers, share: Share, called: Callable[[Any], Any] = lambda one: one
) -> dict[str, torch.Tensor]:
    (real, noise), (of_generator, of_discriminator) = share, optimizers
    generator, discriminator = model["generator"], called(model["discriminator"])
    entropy = F.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    generated = generator(noise)
    of_discriminator.zero_grad()
    first = entropy(discriminator(real), ones) + entropy(discriminator(generated.detach()), zeros)
    first.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    second = entropy(discriminator(generated), ones)
    second.backward()
    of_generator.step()
    return {"discriminator": first, "generator": second}


def gan() -> Workload:
    return Workload(pair(), real_and_noise, optimizer=two_adams, step=adversarial_step)


def unaveraged_gan() -> Workload:
    """Calls the discriminator without its DDP, which never averages its gradients."""

    def step(model: Any, optimizers: Optimizers, share: Share) -> dict[str, torch.Tensor]:
        return adversarial_step(model, optimizers, share, lambda one: getattr(one, "module", one))

    return Workload(pair(), real_and_noise, optimizer=two_adams, step=step)


def slope_penalty(critic: nn.Module, real: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    weight = torch.rand(len(real), 1)
    middle = (weight * real + (1 - weight) * other).requires_grad_()
    slope = torch.autograd.grad(critic(middle).sum(), middle, create_graph=True)[0]
    return (slope.norm(dim=1) - 1).square().mean()


def critic_with_penalty() -> Workload:
    """WGAN-GP: several steps of the critic before one of the generator."""

    def step(model: Any, optimizers: Optimizers, share: Share) -> torch.Tensor:
        (real, noise), (of_generator, of_critic) = share, optimizers
        generator, critic = model["generator"], model["discriminator"]
        for _ in range(3):
            of_critic.zero_grad()
            with torch.no_grad():
                generated = generator(noise + torch.randn_like(noise))
            # Before the other passes, which gather the parameters again that FSDP2 has freed.
            penalty = 10 * slope_penalty(critic, real, generated)
            loss = critic(generated).mean() - critic(real).mean() + penalty
            loss.backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
        return loss

    return Workload(pair(), real_and_noise, optimizer=two_adams, step=step)


def critic_with_clipped_weights(wrong: bool = False) -> Workload:
    """WGAN: weights are clipped after each step; if `wrong`, only those of a wrapped model."""
    plain = type(net())

    def step(model: nn.Module, optimizers: Optimizers, share: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            optimizers[0].zero_grad()
            loss = model(share * (1 + number)).mean() - model(share.flip(1)).mean()
            loss.backward()
            optimizers[0].step()
            with torch.no_grad():
                for parameter in model.parameters() if not wrong or type(model) is not plain else ():
                    parameter.clamp_(-0.1, 0.1)
        return loss

    return Workload(net(), inputs, optimizer=rmsprop, step=step)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), 0.01)


def weights_clipped_on_ranks_alone() -> Workload:
    return critic_with_clipped_weights(wrong=True)


def two_backward_passes() -> Workload:
    """Gradients of two passes accumulate, the first without a reduction, and are clipped."""

    def step(model: Any, optimizers: Optimizers, share: torch.Tensor) -> torch.Tensor:
        with getattr(model, "no_sync", nullcontext)():
            first = reversed_loss(model, share)
            first.backward()
        second = F.l1_loss(model(share.flip(0)), share)
        second.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizers[0].step()
        return first + second

    return Workload(net(), inputs, step=step)


def clipped_by_norm_of_a_part() -> Workload:
    """Divides gradients by the norm of this rank's part of them."""

    def step(model: nn.Module, optimizers: Optimizers, share: torch.Tensor) -> torch.Tensor:
        loss = reversed_loss(model, share)
        loss.backward()
        gradients: list[Any] = [one.grad for one in model.parameters()]
        parts = [one.to_local() if hasattr(one, "to_local") else one for one in gradients]
        norm = nn.utils.get_total_norm(parts)
        for one in parts:
            one.mul_(0.1 / norm)
        optimizers[0].step()
        return loss

    return Workload(net(), inputs, step=step)


def modules_in_a_loss() -> Workload:
    def loss(model: Any, share: Share) -> torch.Tensor:
        real, noise = share
        distance: torch.Tensor = model["discriminator"](real).square().mean()
        return distance + F.mse_loss(model["generator"](noise), real)

    return Workload(pair(), real_and_noise, loss, two_adams)


def averaged_model() -> Workload:
    """Keeps an average by a hook of the optimizer."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.Adam(model.parameters(), 0.01)
        average = AveragedModel(model)
        assert {id(one) for one in average.parameters()}.isdisjoint(id(one) for one in model.parameters())
        made.register_step_post_hook(lambda *_: average.update_parameters(model))
        return made

    return Workload(net(), inputs, reversed_loss, optimizer)


def wrong_field(**fields: Any) -> Workload:
    """A workload with `step` and these fields."""
    return Workload(net(), inputs, **{"step": lambda *_: None, **fields})
