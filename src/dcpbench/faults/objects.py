"""Defects of what is saved beside model and optimizer, after a load."""

import math

import torch

from dcpbench.faults.targets import Site, flip


def noise_seeded_again(site: Site) -> None:
    """The random generator starts over, on one rank."""
    if site.victim:
        site.noise.generator.manual_seed(0)


def noise_one_draw_ahead(site: Site) -> None:
    """The random generator has drawn once more than it had, on one rank."""
    if site.victim:
        torch.randn(8, generator=site.noise.generator)


def scheduler_one_epoch_behind(site: Site) -> None:
    """The scheduler's epoch."""
    site.scheduler.last_epoch -= 1


def scheduler_gamma(site: Site) -> None:
    """A constant of the scheduler, on one rank."""
    if site.victim:
        site.scheduler.gamma = 0.5


def scheduler_type(site: Site) -> None:
    """An integer of the scheduler is a float of the same value, on one rank."""
    if site.victim:
        site.scheduler.step_size = float(site.scheduler.step_size)


def scheduler_base_lr(site: Site) -> None:
    """One of the scheduler's base learning rates."""
    site.scheduler.base_lrs[-1] *= 2


def train_step(site: Site) -> None:
    """The training's own step counter."""
    site.train_state.step += 1


def loss_next_float(site: Site) -> None:
    """One loss in the history, by one unit in the last place, on one rank."""
    if site.victim:
        site.train_state.losses[0] = math.nextafter(site.train_state.losses[0], math.inf)


def losses_forgotten(site: Site) -> None:
    """The history of losses is empty."""
    site.train_state.losses = []


def current_loss(site: Site) -> None:
    """The last loss is NaN."""
    site.train_state.current_loss = math.nan


def tensor_zeroed(site: Site) -> None:
    """The stateful object's tensor."""
    site.tensor_object.data.zero_()


def tensor_bit(site: Site, number: int) -> None:
    """One bit of the stateful object's tensor on one rank."""
    if site.victim:
        flip(site.tensor_object.data, number)


def tensor_dtype(site: Site) -> None:
    """The stateful object's tensor has the same values in a wider dtype."""
    site.tensor_object.data = site.tensor_object.data.double()


def tensor_shape(site: Site) -> None:
    """The stateful object's tensor has the same elements in another shape."""
    site.tensor_object.data = site.tensor_object.data.reshape(-1)
