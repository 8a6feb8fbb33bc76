"""The steps of a cell: after which it saves, and how far each resumed run trains. Those of a user's trainer
follow from a run that never saves: how fast it is, where its epochs end, and where it ends itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from dcpbench.config.schema import FEWEST_STEPS, Config

_NEWEST = 10
"""The default step of a trainer's last regular save. The one before has fewer digits, so that a retention in
the order of names as texts removes the newest checkpoint."""
_RESUMED = 23
"""The most steps of a trainer after a load, unless its next epoch ends later."""
LONGEST = 92
"""The most steps of a trainer's uninterrupted run."""


@dataclass(frozen=True)
class Window:
    """The steps of a cell.

    >>> Window((2, 4), 3, 6).end_of(4)
    6

    Args:
        saves: the steps after which a checkpoint is written, in order.
        resume_steps: the most steps that a resumed run takes.
        last: the last step of the uninterrupted run.
    """

    saves: tuple[int, ...]
    resume_steps: int
    last: int

    @classmethod
    def of(cls, config: Config) -> "Window":
        """Return the steps that a configuration asks for."""
        return cls(tuple(config.save_steps), config.steps_after_load, config.last_step)

    def end_of(self, step: int) -> int:
        """Return the last step of a run that is resumed after a step."""
        return min(step + self.resume_steps, self.last)

    @property
    def ends(self) -> frozenset[int]:
        """The steps at which resumed runs end."""
        return frozenset(map(self.end_of, self.saves))


def window_of_trainer(config: Config, epoch_ends: Sequence[int], most: int, exactly: bool = False) -> Window:
    """Choose the steps of a trainer: as many saves as the configuration asks for, the last after step 10; one
    exactly at an epoch's end and one in the epoch that follows; and resumed runs that pass the next end.

    Args:
        epoch_ends: the steps that took the last batch of an epoch, as far as they were seen.
        most: the most steps of the uninterrupted run.
        exactly: as many saves as the configuration asks for, and no others.

    Raises:
        ValueError: the trainer takes too few steps.
    """
    saves = _regular(config, most)
    if epoch_ends and not config.train_steps:
        saves = _with_epoch(saves, epoch_ends, most, len(saves) if exactly else len(saves) + 2)
    wanted = _RESUMED
    if epoch_ends:  # from the first save on past the end that follows the last one
        length = epoch_ends[0]
        wanted = max(wanted, *((step // length + 1) * length + 1 - step for step in saves))
    last = saves[-1] + config.resume_steps if config.resume_steps else min(saves[-1] + wanted, most)
    if not saves[-1] < last <= most:
        asked = f"train_steps={config.train_steps} resume_steps={config.resume_steps} saves={config.saves}"
        raise ValueError(f"the trainer takes {most} steps, too few for {asked}")
    return Window(tuple(saves), config.resume_steps or wanted, last)


def _regular(config: Config, most: int) -> list[int]:
    """Return the steps of saves that do not depend on epochs."""
    if config.train_steps:
        return config.save_steps
    room = max(most - (config.resume_steps or FEWEST_STEPS), 1)
    count = min(config.saves, room)
    if room >= max(_NEWEST, count):
        first = max(1, _NEWEST + 1 - count)
        regular = {*range(first, first + count)}
    else:
        regular = {room // count * number or number for number in range(1, count + 1)}
    return sorted(regular | ({config.save_at} if config.save_at is not None else set()))


def _with_epoch(saves: list[int], epoch_ends: Sequence[int], most: int, count: int) -> list[int]:
    """Return the steps of at most `count` saves: one at an epoch's end, one in the epoch that follows, and
    the newest of the others. Two of the others may be these."""
    length = epoch_ends[0]
    within = [end for end in epoch_ends if end in saves and end + 1 in saves]
    end = within[0] if within else length
    following = [step for step in saves if end < step < end + length]
    chosen = [end, following[0] if following else end + min(3, max(1, length // 2))]
    chosen = [step for step in chosen if step + FEWEST_STEPS <= most]
    others = [step for step in reversed(saves) if step not in chosen]
    return sorted([*chosen, *others][:count])
