"""Decide before a sweep starts which of its cells run, on which ranks, and which part runs here."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dcpbench.analysis.differing import cell_names
from dcpbench.code.provenance import OURS, SweepCode, conf_folders, file_of, package_digest
from dcpbench.code.sources import DCPBENCH, Source, is_own, merged_commits, package_of
from dcpbench.compose import limits
from dcpbench.compose.cells import SweepCell
from dcpbench.config.errors import ConfigError, value_text
from dcpbench.config.groups import Device, Ending, StageConfig, StageWorld, Verify
from dcpbench.config.schema import Config, is_how_run
from dcpbench.config.text import counted
from dcpbench.core.axes import AXES, AxisSpec
from dcpbench.core.cell_key import CellKey, digest_of, is_code_path
from dcpbench.core.plugins import Plugin, declared_values, hooks, plugin_names, plugins
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import shared_gpus
from dcpbench.executors.machine import Machine
from dcpbench.plan import known_failures
from dcpbench.rank.messages import Backend, WorldSpec
from dcpbench.records.row import RunKey
from dcpbench.verdict.attempt import Expected, verdict_of
from dcpbench.verdict.known_failures import KnownFailure
from dcpbench.verdict.verdict import Verdict

_REPEAT = "repeat="


@dataclass(frozen=True)
class PlannedCell(SweepCell):
    """A cell with its device and world size decided, what was `requested`, the reason to `skip` it, if any,
    and its known failures.

    Args:
        columns: those of its row that are known before it runs.
        world_specs: the ranks of each of its stages.
        ranks_per_gpu: the largest number of ranks on one GPU; None on the CPU.
        code: the source of each package that its ranks run.
        retry_as: the `repeat` of its retry, after those of all planned runs of the cell.
    """

    requested: Config
    key: CellKey
    skip: str | None
    known_failures: tuple[KnownFailure, ...]
    columns: Mapping[str, Any]
    world_specs: tuple[WorldSpec, ...]
    ranks_per_gpu: int | None = None
    code: Mapping[str, Source] = field(default_factory=dict)
    retry_as: int = 1

    @property
    def run(self) -> RunKey:
        """The run of a cell that it is, which no other cell of the sweep is."""
        return self.key.digest, self.config.repeat

    @property
    def shares_gpus(self) -> bool:
        """Whether several of its ranks share a GPU."""
        return not self.skip and (self.ranks_per_gpu or 0) > 1

    @property
    def runs_own_code(self) -> bool:
        """Whether its ranks run code of the user's, and so are used for no other cell."""
        return bool(own_packages(self.config))

    @property
    def targets(self) -> dict[str, str | None]:
        """The user's targets, each with the file that defines it, None if no file does."""
        return {target: file_of(target) for target in sorted(_own_targets(self.config))}

    @property
    def world_size(self) -> int:
        """The number of ranks of its largest stage."""
        return max(kind.world_size for kind in self.world_specs)

    @property
    def expected(self) -> Expected:
        """The expectations that the verdict needs."""
        ends = ((at, stages[-1]) for at, stages in enumerate(self.config.processes))
        return Expected(
            worlds=[kind.world_size for kind in self.world_specs],
            dies={at: stage.target for at, stage in ends if stage.ends is Ending.crash},
            known_failures=self.known_failures,
        )

    def verdict(self, ends: Sequence[StageEnd]) -> Verdict:
        """Judge an attempt by the ends of its stages, also by what plug-ins expect."""
        verdict = verdict_of(self.expected, ends)
        for hook in hooks("verdict"):
            verdict = hook(self.config, verdict)
        return verdict

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        if root := self.config.storage.root:
            return Path(root).resolve() / self.folder.parent.name / self.name
        return self.folder / "checkpoints"

    @property
    def retry(self) -> "PlannedCell":
        """The retry of this run: another run of the same cell. Its folders differ too: a host that was cut
        off during the first run can still write."""
        repeat = f"{_REPEAT}{self.retry_as}"
        overrides = [word for word in self.overrides if not word.lstrip("+").startswith(_REPEAT)] + [repeat]
        name, numbered = re.subn(rf"(^|,)\+*{_REPEAT}\d+", rf"\g<1>{repeat}", self.name, count=1)
        name = name if numbered else f"{name},{repeat}"
        columns = {"cell": name, "repeat": self.retry_as, "overrides": shlex.join(overrides)}
        return replace(
            self,
            name=name,
            overrides=overrides,
            folder=self.folder.with_name(name),
            requested=replace(self.requested, repeat=self.retry_as),
            config=replace(self.config, repeat=self.retry_as),
            columns={**self.columns, **columns, "retry_of": self.config.repeat},
        )


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep that run here, and the machine on which they do."""

    cells: Sequence[PlannedCell]
    machine: Machine

    @property
    def distinct(self) -> int:
        """The number of cells; each can have several runs."""
        return len({cell.key.digest for cell in self.cells})

    @property
    def titles(self) -> dict[str, str]:
        """A short name of each cell, as reports have it, by its full name."""
        columns = {axis: [cell.columns.get(axis) for cell in self.cells] for axis in AXES}
        names = cell_names(columns, [cell.overrides for cell in self.cells])
        return {cell.name: name for cell, name in zip(self.cells, names, strict=True)}

    @property
    def environment(self) -> dict[str, Any]:
        """The content of `environment.json`: the machine, and the code of the cells."""
        code = {package: source for cell in self.cells for package, source in cell.code.items()}
        return self.machine.description | {
            "dcpbench_commit": code[DCPBENCH].commit,
            "target_commit": merged_commits(cell.columns["target_commit"] for cell in self.cells),
            "code": {package: asdict(source) for package, source in sorted(code.items())},
        }


def plan_of(
    cells: Sequence[SweepCell], machine: Machine, hosts_of: Callable[[int, str], int] = limits.one_host
) -> Plan:
    """Decide for each cell of a sweep whether it runs, and on which ranks; write nothing. `hosts_of` is that
    of the engine.

    Raises:
        ConfigError: a cell is wrong; the message names the cell if there are several.
    """
    several_sizes = limits.has_several_sizes(cell.config for cell in cells)
    code = SweepCode()
    planned = []
    for cell in cells:
        try:
            resolved = limits.resolve(cell.config, machine, hosts_of)
            planned.append(_planned(cell, resolved, machine, several_sizes, code))
        except ConfigError as error:
            where = f" (in {cell.name})" if len(cells) > 1 else ""
            raise ConfigError(f"{error}{where}") from None
    return Plan(_one_per_run(planned), machine)


def _planned(
    cell: SweepCell, resolved: Config, machine: Machine, several_sizes: bool, code: SweepCode
) -> PlannedCell:
    packages = own_packages(resolved)
    config = _with_restart(resolved, bool(packages))
    skip = limits.why_skip(cell.config, config, machine, several_sizes, cell.overrides)
    own_list = config.known_failures
    known = known_failures.read(Path(own_list)) if own_list else known_failures.default_list()
    loads = limits.loading_versions(config)
    key, world_specs = identity_of(config), world_specs_of(config, machine)
    columns = _columns(cell, config, key) | {
        "dcpbench_commit": code.dcpbench.commit,
        "target_commit": code.commits(_own_targets(config)),
        "restart": _restart(config, machine),
        "torch_version": str(machine.description["torch"]),
        "python_version": machine.description.get("python"),
        "load_torch_version": loads and loads.torch,
        "load_python_version": loads and loads.python,
        "code_digest": code_digest(config),
    }
    about = columns | {"load_world_size": config.world_of(StageWorld.load)[1]}
    expected = tuple(failure for failure in known if failure.covers(about))
    columns["expected_digest"] = expected_digest(config, expected)
    on_gpus = config.device is Device.cuda and machine.gpus
    most = max(kind.world_size for kind in world_specs)
    ranks_per_gpu = shared_gpus.ranks_per_gpu(most, machine.gpus) if on_gpus else None
    if not skip and config.scenario.process_group:
        backend = limits.backend_of(config, machine)
        columns |= {"ranks_per_gpu": ranks_per_gpu, "backend": backend.value}
    return PlannedCell(
        **{**vars(cell), "config": config},
        requested=cell.config,
        key=key,
        skip=skip,
        known_failures=expected,
        columns=columns,
        world_specs=world_specs,
        ranks_per_gpu=ranks_per_gpu,
        code=code.sources(packages),
    )


def world_specs_of(config: Config, machine: Machine) -> tuple[WorldSpec, ...]:
    """Return the ranks that the stages of a cell run on."""
    return tuple(_kind(config, first, machine) for first, *_ in config.processes)


def _kind(config: Config, stage: StageConfig, machine: Machine) -> WorldSpec:
    variables, python = dict(stage.environment), config.python_of(stage.world)
    if stage.restarted and machine.has_interpreters:
        python = python or sys.executable
    if stage.world is StageWorld.alone:
        return WorldSpec(1, Device.cpu.value, False, tuple(sorted(variables.items())), python)
    world_size, backend = config.world_of(stage.world)[1], limits.backend_of(config, machine)
    if config.device is Device.cuda and world_size > machine.gpus and backend is Backend.nccl:
        variables = shared_gpus.environment() | variables
    environment = tuple(sorted(variables.items()))
    meets = config.scenario.process_group
    return WorldSpec(world_size, config.device.value, meets, environment, python, backend)


def _one_per_run(cells: Sequence[PlannedCell]) -> list[PlannedCell]:
    """Leave out what is another spelling of an earlier cell, or a cell of a block that repeats it more often.
    Refuse other cells that differ only in how they run: they would count as repeats of one."""
    first: dict[RunKey, PlannedCell] = {}
    counts = Counter((cell.block, cell.run[0]) for cell in cells)

    def repeats(cell: PlannedCell) -> int:
        return counts[cell.block, cell.run[0]]

    for cell in cells:
        earlier = first.setdefault(cell.run, cell)
        if cell.block != earlier.block and repeats(cell) != repeats(earlier):
            first[cell.run] = max(earlier, cell, key=repeats)  # of the block that measures its costs
            continue
        pairs = zip(limits.keys_below(earlier.config), limits.keys_below(cell.config), strict=False)
        for (key, _, value), (_, _, another) in pairs if earlier is not cell else ():
            if value != another and is_how_run(key) and not is_dataclass(value):
                both = f"{key}={value_text(value)} and {key}={value_text(another)}"
                why = f"differ only in how they run ({both}), and would count as repeats of one cell"
                raise ConfigError(f"{earlier.name} and {cell.name} {why}; run a sweep for each value")
    last: dict[str, int] = {}
    for digest, repeat in first:
        last[digest] = max(repeat, last.get(digest, 0))
    return [replace(cell, retry_as=last[digest] + 1 + repeat) for (digest, repeat), cell in first.items()]


def expected_digest(config: Config, expected: Sequence[KnownFailure]) -> str:
    """Return the digest of the expected outcome of a cell: its known failures, and the checks that must
    detect its fault."""
    return digest_of([*map(asdict, expected), *map(asdict, config.fault.expects)])


def _columns(cell: SweepCell, config: Config, key: CellKey) -> dict[str, Any]:
    """Return the columns of a cell's row that its configuration decides; an axis that it has not is null."""
    axes = {name: getattr(config, name) for name in AXES}
    axes["load_parallel"] = config.loading if config.scenario.converts else None
    absent = {"fault": not config.fault.target}
    absent |= dict.fromkeys(("optimizer", "scheduler"), bool(config.workload.target))
    return {
        **{name: None if absent.get(name) else getattr(value, "name", value) for name, value in axes.items()},
        "cell": cell.name,
        "repeat": config.repeat,
        "overrides": shlex.join(cell.overrides),
        "config_dir": cell.config_dir,
        "cwd": str(Path.cwd()),
        "config": dict(key.values),
        "config_digest": key.digest,
        "train_steps": config.train_steps or None,
        "resume_steps": config.resume_steps or None,
    }


def code_digest(config: Config, hooks: bool = True) -> str:
    """Return a digest of the sources of dcpbench, of each package that a `target` of the configuration names,
    and of the packages of plug-ins that the cell uses.

    It is the same in a checkout and in the wheel that is built from it. Torch's targets are identified by its
    version; what packages import is not included. Without `hooks` it is as before plug-ins with hooks were
    installed.
    """
    return digest_of([package_digest(name) for name in (*OURS, *own_packages(config, hooks))])


def _with_restart(config: Config, runs_own_code: bool) -> Config:
    """Decide whether what loads is a new process: with `verify=deep`, and where the user's code runs, which
    can keep a state anywhere in its process. A fault is injected into the process that dcpbench knows."""
    wanted = config.verify is Verify.deep or (runs_own_code and config.fault.target is None)
    return replace(config, restart=wanted if config.restart is None else config.restart)


def _restart(config: Config, machine: Machine) -> str | None:
    """Return what is new of the process that loads; None if it is the one that saved."""
    new = "interpreter" if machine.has_interpreters or config.load_python else "process"
    return new if config.restarts else None


def own_packages(config: Config, hooks: bool = True) -> dict[str, list[str]]:
    """Return the user's packages whose code ranks run, sorted, with the targets and plug-ins in each."""
    by_package: dict[str, list[str]] = {}
    both = zip(plugin_names(), plugins(), strict=True)
    used = {module for module, plugin in both if _uses(config, plugin, hooks)}
    for target in sorted(_own_targets(config) | {*filter(is_own, used)}):
        by_package.setdefault(package_of(target), []).append(target)
    return dict(sorted(by_package.items()))


def _uses(config: Config, plugin: Plugin, hooks: bool) -> bool:
    """Return whether a cell uses a plug-in that no target names: by an axis, or by `hooks` for all cells."""
    in_every = hooks and (plugin.hooks or any(getattr(spec, "probe", None) for spec in plugin.columns))
    axes = (spec.name for spec in plugin.columns if isinstance(spec, AxisSpec))
    return bool(in_every) or any(getattr(config, name, None) is not None for name in axes)


def _own_targets(config: Config) -> set[str]:
    """Return the targets of a configuration that are neither in dcpbench nor in torch."""
    return {text for key, text in texts_in(config) if key == "target" and is_own(text)}


def part_numbers(text: str) -> tuple[int, int]:
    """Return the number of the part of a sweep that one of several drivers runs, from 1, and their count,
    given `2/4`; raise a ConfigError for anything else."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not match or int(match[1]) > int(match[2]):
        raise ConfigError(f"part={text}: must be a number and a count, as 2/4")
    return int(match[1]), int(match[2])


def cells_of_part(cells: Sequence[PlannedCell], number: int, count: int) -> list[PlannedCell]:
    """Return the cells of a part of a sweep, in their order.

    Cells are dealt out in the order of their digests, which mixes them. All repeats of a cell are in one
    part: they show the noise of one machine. Every driver deals out the same, on any machine: a cell is known
    by its configuration before device and world size are decided.

    Raises:
        ConfigError: it has none.
    """
    digests = [identity_of(cell.requested).digest for cell in cells]
    of_part = {*sorted({*digests})[number - 1 :: count]}
    if not of_part:
        raise ConfigError(f"part={number}/{count}: has none of {counted(len(cells), 'cell')}")
    return [cell for digest, cell in zip(digests, cells, strict=True) if digest in of_part]


def identity_of(config: Config) -> CellKey:
    """Return the identity of a configuration. It has the name of a value for the code of its file, and the
    first of several stages for its processes."""
    first = [stage for stage, *_ in config.scenario.processes()]
    scenario = replace(config.scenario, stages=first if len(first) > 1 else [])
    return CellKey.of(replace(config, scenario=scenario), _code_paths)


@cache
def _code_paths(key: str, name: str) -> frozenset[str]:
    """Return the code paths that a value of a group has in `conf/`, of dcpbench and of plug-ins; empty for a
    value of the user's."""
    group = AXES[key].values_in if key in AXES else key
    paths = (folder / group / f"{name}.yaml" for folder in conf_folders() if Path(name).name == name)
    contents = [yaml.safe_load(path.read_text("utf-8")) for path in paths if path.is_file()]
    values = texts_in(contents or declared_values(group).get(name))
    return frozenset(filter(is_code_path, (text for _, text in values)))


def texts_in(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a configuration, at any depth, with the key that it has or is listed under."""
    if isinstance(node, str):
        yield key, node
    items = vars(node) if is_dataclass(node) else node
    if isinstance(items, dict):
        for name, inner in items.items():
            yield from texts_in(inner, name)
    elif isinstance(items, list):
        for inner in items:
            yield from texts_in(inner, key)
