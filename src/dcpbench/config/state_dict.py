"""The group `state_dict`: in which form model and optimizer are saved and loaded."""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING


@dataclass
class StateDictConfig:
    """What torch's state-dict functions are asked for, on both ways: the fields of its `StateDictOptions`.

    A scenario that freezes parameters leaves them out by itself (`ignore_frozen_params`).
    """

    name: str = MISSING
    full_state_dict: bool = False
    cpu_offload: bool = False
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    ignore_frozen_params: bool = False
    strict: bool = True

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `StateDictOptions`."""
        return {name: value for name, value in vars(self).items() if name != "name"}
