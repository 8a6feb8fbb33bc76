"""The words of a sweep's cells: every combination of lists, or the blocks of an experiment.

An experiment has its blocks in `hydra.sweeper.matrix`: each maps keys to lists, of YAML or as on the command
line. The command line selects among a block's values. A block can have its own `repeats` and `matrix`.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from dcpbench.compose.cells import CellWords
from dcpbench.config.errors import ConfigError, too_small
from dcpbench.config.groups import Matrix
from dcpbench.config.overrides import of_block
from dcpbench.config.schema import is_about_the_sweep
from dcpbench.config.text import choices
from dcpbench.core.plugins import plugins, report_absent

Combined = Callable[[Sequence[Sequence[str]], str | None], Iterable[Sequence[str]]]
Covering = Callable[[Sequence[Sequence[str]]], Iterable[Sequence[str]]]

_MATRIX, _REPEATS, _NUMBERED = "matrix", "repeats", "repeat="
_PLUGIN = "plugin"
"""The key of a block that names the plug-in it needs."""


def words_of_cells(
    overrides: Sequence[Override], loader: ConfigLoader, base: DictConfig, covering: Covering
) -> list[CellWords]:
    """Return the words of all cells that a command asks for.

    Args:
        overrides: the words of the command.
        base: the composition of the sweep itself; `loader` composes its cells.
        covering: returns jobs with every two values of lists.

    Raises:
        ConfigError: an override is wrong.
    """
    hydra, sweeper = base.hydra, base.hydra.sweeper
    parse = OverridesParser.create(config_loader=loader).parse_overrides
    typed = [replace(override, config_loader=loader) for override in overrides]
    given = parse(of_block("params", sweeper.params or {})) + [
        override for override in typed if not override.is_hydra_override()
    ]
    about_all = {
        override.key_or_group: override for override in given if is_about_the_sweep(override.key_or_group)
    }
    for override in about_all.values():
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: applies to the complete sweep; pass one value")
    defaults = {f"{group}=null" for group, choice in hydra.runtime.choices.items() if choice is None}

    def combined(lists: Sequence[Sequence[str]], of_block: str | None) -> Iterable[Sequence[str]]:
        """Combine lists as their block says, unless the command line says it for all."""
        how = base.matrix
        if of_block and _MATRIX not in about_all:
            if of_block not in set(Matrix):
                raise ConfigError(f"matrix={of_block}: unknown value{choices(of_block, Matrix)}")
            how = Matrix(of_block)
        swept = [values for values in lists if len(values) > 1]
        is_covered = how is Matrix.pairwise and len(swept) > 1 and all(lists)
        rows = covering(lists) if is_covered else itertools.product(*lists)
        return [[word for word in row if word not in defaults] for row in rows]

    of_cells = [override for override in given if override.key_or_group not in about_all]
    blocks = {
        name: parse(of_block(name, {key: block[key] for key in block if key != _PLUGIN}))
        for name, block in _present(sweeper.matrix).items()
    }
    if blocks:
        cells = words_of_blocks(blocks, of_cells, combined)
    else:
        cells = [CellWords([*row]) for row in combined(override_lists(of_cells), None)]
    return with_repeats(cells, base.repeats, for_all=_REPEATS in about_all)


def words_of_blocks(
    blocks: Mapping[str, Sequence[Override]], given: Sequence[Override], combined: Combined
) -> list[CellWords]:
    """Return the jobs of all blocks, each once, in the order of the blocks.

    Args:
        blocks: the overrides of each block, by its name.
        given: the overrides of the command line, after those of `hydra.sweeper.params`; of a key that comes
            twice the last one counts. If a block sweeps the key, the override selects among the block's
            values, and drops the block if it has none of them; otherwise it applies to all jobs of the block.
            Overrides that are exactly those of one job select it alone: to run a cell again.
        combined: combines lists into jobs, given the block's own `matrix`, if it has one.

    Returns:
        the jobs; those of a block with `repeats` have it among their overrides, for `with_repeats`.

    Raises:
        ConfigError: no block has a job left, or a block has several `repeats`.
    """
    given = list({override.get_key_element(): override for override in given}.values())
    union: dict[tuple[str, ...], CellWords] = {}
    for name, block in blocks.items():
        for overrides in _block_jobs(block, given, combined):
            union.setdefault(tuple(sorted(overrides)), CellWords(overrides, name))
    if not union:
        raise ConfigError(_nothing_left(blocks.values(), given))
    exact = tuple(sorted(word for override in given for word in _items(override)))
    return [union[exact]] if exact in union else list(union.values())


def override_lists(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of each key; of a key that comes twice the last one counts.

    Raises:
        ConfigError: a sweep is not a list.
    """
    lists: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        swept = override.is_sweep_override()
        lists[key] = _items(override) if swept else [f"{key}={override.get_value_element_as_str()}"]
    return [*lists.values()]


def with_repeats(jobs: Sequence[CellWords], repeats: int, for_all: bool) -> list[CellWords]:
    """Return all jobs, then all that run again, in rounds, so that a drift of the machine affects all of
    them. Jobs that have a `repeat` stay as they are.

    Args:
        repeats: how often jobs run whose block has no `repeats`.
        for_all: whether this applies to the others too.

    Raises:
        ConfigError: `repeats`, of the sweep or of a block, is less than 1.
    """
    counted = [_counted(job, repeats, for_all) for job in jobs]
    return [
        CellWords([*job.overrides, f"{_NUMBERED}{this}"], job.block) if number > 1 else job
        for this in range(max(number for _, number in counted))
        for job, number in counted
        if this < number
    ]


def _counted(job: CellWords, repeats: int, for_all: bool) -> tuple[CellWords, int]:
    """Return a job without its `repeats`, and how often it runs."""
    of_block = [word.partition("=")[2] for word in job.overrides if word.startswith(f"{_REPEATS}=")]
    other_words = [word for word in job.overrides if not word.startswith(f"{_REPEATS}=")]
    asked = of_block[0] if of_block and not for_all else str(repeats)
    if not asked.isdecimal() or int(asked) < 1:
        raise ConfigError(too_small(_REPEATS, asked, 1))
    numbered = any(word.startswith(_NUMBERED) for word in other_words)
    return CellWords(other_words, job.block), 1 if numbered else int(asked)


def _block_jobs(block: Sequence[Override], given: Sequence[Override], combined: Combined) -> list[list[str]]:
    swept = {override.get_key_element(): _items(override) for override in block}
    named = {override.get_key_element(): _items(override) for override in given}
    for key in (_REPEATS, _MATRIX):
        if len(swept.get(key, [])) > 1:
            raise ConfigError(f"{', '.join(swept[key])}: applies to a complete block; pass one value")
    modes = [word.partition("=")[2] for word in swept.pop(_MATRIX, [])]
    if _NUMBERED.removesuffix("=") in named:
        swept.pop(_REPEATS, None)
    lists = {key: [word for word in items if word in named.get(key, items)] for key, items in swept.items()}
    lists.update((key, items) for key, items in named.items() if key not in swept)
    return [[*job] for job in combined([*lists.values()], modes[0] if modes else None)]


def _items(override: Override) -> list[str]:
    """Return `key=value` for each value of an override, as Hydra writes values (`False`, not `false`)."""
    key = override.get_key_element()
    if override.is_discrete_sweep():
        if items := dict.fromkeys(f"{key}={choice}" for choice in override.sweep_string_iterator()):
            return [*items]
        raise ConfigError(f"{override.input_line}: matches nothing")
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: only lists can be swept")
    value: Any = override.value()
    return [f"{key}={value if isinstance(value, bool) else override.get_value_element_as_str()}"]


def _nothing_left(blocks: Iterable[Sequence[Override]], given: Sequence[Override]) -> str:
    swept: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for override in itertools.chain.from_iterable(blocks):
        swept[override.get_key_element()].update(dict.fromkeys(_items(override)))
    for override in given:
        key = override.get_key_element()
        if key in swept and not swept[key].keys() & set(_items(override)):
            may_be = ", ".join(word.partition("=")[2] for word in swept[key])
            return f"{override.input_line}: no cell of the experiment has it; its {key} is {may_be}"
    asked = " ".join(str(override.input_line) for override in given)
    return f"{asked}: the experiment has no cell with all of this"


def _present(matrix: Mapping[str, Mapping[Any, Any]]) -> dict[str, Mapping[Any, Any]]:
    """Return the blocks of an experiment whose plug-ins are installed, and report the others.

    Raises:
        ConfigError: there are blocks, and none of them is left.
    """
    here = {None, *(plugin.name for plugin in plugins())}
    for name, block in matrix.items():
        if block.get(_PLUGIN) not in here:
            report_absent(str(block[_PLUGIN]), f"block {name} of the experiment is left out")
    present = {name: block for name, block in matrix.items() if block.get(_PLUGIN) in here}
    if matrix and not present:
        raise ConfigError("the experiment has no block whose plug-in is installed")
    return present
