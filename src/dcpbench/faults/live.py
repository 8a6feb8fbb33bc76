"""A save that changes what it saves: defects of the live state, right after a save has returned."""

from dcpbench.faults.targets import Site, largest


def weight_nudged(site: Site) -> None:
    """The save leaves one weight larger than it was, on one rank."""
    if site.victim:
        largest(site.parameters()).view(-1)[0].add_(0.01)


def step_taken(site: Site) -> None:
    """The save counts as a step of the optimizer."""
    for step in site.moments("step").values():
        step.add_(1)


def noise_drawn(site: Site) -> None:
    """The save draws from the training's random generator."""
    site.noise.like(site.tensor_object.data)


def lr_reset(site: Site) -> None:
    """The save leaves another learning rate."""
    site.optimizer.param_groups[0]["lr"] = 0.05
