"""The parts of the state of a run, each of which is compared separately."""

from enum import StrEnum


class StatePart(StrEnum):
    """A part of the state of a run. No checkpoint contains its flags."""

    model = "model"
    optimizer = "optimizer"
    scheduler = "scheduler"
    extra = "extra"
    random = "random"
    flags = "flags"


CHECK_OF = {
    StatePart.model: "model_equal",
    StatePart.optimizer: "optim_equal",
    StatePart.scheduler: "extra_equal",
    StatePart.extra: "extra_equal",
    StatePart.random: "random_equal",
    StatePart.flags: "flags_equal",
}
"""The check of a row that compares a part after a load."""

KEY_PREFIXES = {StatePart.model: "model.", StatePart.optimizer: "optimizer."}
"""What the flattened keys of a part begin with in a checkpoint, in addition to the names of its values."""
