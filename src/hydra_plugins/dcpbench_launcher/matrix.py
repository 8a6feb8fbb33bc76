"""A sweep that is more than one product of lists: a union of products, each with a name.

An experiment writes it as `hydra.sweeper.matrix`: block by block, each a mapping from keys to lists as
they stand on the command line. What the command line itself names chooses among a block's values.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from dcpbench.config import ConfigError

Job = list[str]


def jobs(blocks: Mapping[str, Sequence[Override]], given: Sequence[Override]) -> list[Job]:
    """Every job of the union, each once, in the order of the blocks.

    Args:
        blocks: the overrides that make up each block.
        given: the overrides of the command line, after those of `hydra.sweeper.params`, the last of which
            holds where a key comes twice. One whose key a block sweeps keeps of the block's
            values those that it names, and leaves the block out if it names none of them. One whose
            key a block does not sweep holds for all its jobs. If one job is made of exactly these
            overrides, it alone is meant: so a cell of a sweep is asked for again.

    Raises:
        ConfigError: no block has a job left.
    """
    given = list({override.get_key_element(): override for override in given}.values())
    union: dict[tuple[str, ...], Job] = {}
    for block in blocks.values():
        for job in _block_jobs(block, given):
            union.setdefault(tuple(sorted(job)), job)
    if not union:
        raise ConfigError(_nothing_left(blocks, given))
    exact = tuple(sorted(item for override in given for item in _items(override)))
    return [union[exact]] if exact in union else list(union.values())


def repeated(jobs: Sequence[Job], repeats: int) -> list[Job]:
    """All of the jobs, and then all of them again; those that say which `repeat` they are stay as they are.

    Raises:
        ConfigError: `repeats` is less than 1.
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: must be at least 1")
    if repeats < 2 or any(item.startswith("repeat=") for job in jobs for item in job):
        return list(jobs)
    return [[*job, f"repeat={number}"] for number in range(repeats) for job in jobs]


def _block_jobs(block: Sequence[Override], given: Sequence[Override]) -> list[Job]:
    swept = {override.get_key_element(): _items(override) for override in block}
    named = {override.get_key_element(): _items(override) for override in given}
    lists = {key: [item for item in items if item in named.get(key, items)] for key, items in swept.items()}
    lists.update((key, items) for key, items in named.items() if key not in swept)
    return [list(job) for job in itertools.product(*lists.values())]


def _items(override: Override) -> list[str]:
    """`key=value` for each value of an override, values as Hydra writes them (`False`, not `false`)."""
    key = override.get_key_element()
    if override.is_discrete_sweep():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: only lists can be swept")
    value: Any = override.value()
    if isinstance(value, bool):
        return [f"{key}={value}"]
    return [f"{key}={override.get_value_element_as_str()}"]


def _nothing_left(blocks: Mapping[str, Sequence[Override]], given: Sequence[Override]) -> str:
    swept: dict[str, list[str]] = {}
    for block in blocks.values():
        for override in block:
            values = [item.partition("=")[2] for item in _items(override)]
            known = swept.setdefault(override.get_key_element(), [])
            known.extend(value for value in values if value not in known)
    for override in given:
        key = override.get_key_element()
        if key in swept and not {item.partition("=")[2] for item in _items(override)} & set(swept[key]):
            may_be = ", ".join(swept[key])
            return f"{override.input_line}: the experiment has no such cell; its {key} is {may_be}"
    asked = " ".join(str(override.input_line) for override in given)
    return f"{asked}: the experiment has no cell with all of this"
