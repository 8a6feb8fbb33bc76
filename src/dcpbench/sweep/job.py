"""Decide before a sweep starts which of its cells run, on which ranks, and which part runs here."""

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from dcpbench.code.provenance import OURS, SweepCode, file_of, package_digest
from dcpbench.code.sources import DCPBENCH, Source, is_own, joined, package_of
from dcpbench.config.errors import ConfigError, value_text
from dcpbench.config.groups import Device, Ending, StageConfig, StageWorld, Verify
from dcpbench.config.schema import Config, is_how_run
from dcpbench.config.text import counted
from dcpbench.core.axes import AXES, AxisSpec
from dcpbench.core.cell_key import CellKey, digest_of
from dcpbench.core.plugins import Plugin, plugin_names, plugins
from dcpbench.executors import shared_gpus
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.interpreters import versions_of
from dcpbench.rank.messages import Backend, WorldKind
from dcpbench.records.row import Run
from dcpbench.sweep import known_failures, validity
from dcpbench.sweep.cells import SweepCell
from dcpbench.sweep.identity import identity_of, texts_in
from dcpbench.verdict.attempt import Expected
from dcpbench.verdict.known_failures import KnownFailure


@dataclass(frozen=True)
class Job:
    """A cell with its device and world size decided, the reason to `skip` it, if any, and its known failures.
    `columns` are those of its row that are known before it runs. Its ranks use up to `gpus`, and share them
    if there are fewer; `backend` carries collectives on GPUs. `code` is the source of each package that its
    ranks run. With `has_interpreters` ranks can run under a second interpreter."""

    cell: SweepCell
    config: Config
    key: CellKey
    skip: str | None
    known_failures: tuple[KnownFailure, ...]
    columns: Mapping[str, Any]
    gpus: int = 0
    backend: Backend = Backend.nccl
    code: Mapping[str, Source] = field(default_factory=dict)
    has_interpreters: bool = False

    @property
    def run(self) -> Run:
        """The run of a cell that it is, which no other job of the sweep is."""
        return self.key.digest, self.config.repeat

    def kind(self, stage: StageConfig) -> WorldKind:
        """Return the ranks that one of its stages runs on."""
        config, variables, python = self.config, dict(stage.environment), self.config.python_of(stage.world)
        if stage.restarted and self.has_interpreters:
            python = python or sys.executable
        if stage.world is StageWorld.alone:
            return WorldKind(1, Device.cpu.value, False, tuple(sorted(variables.items())), python)
        world_size = config.world_of(stage.world)[1]
        if config.device is Device.cuda and world_size > self.gpus and self.backend is Backend.nccl:
            variables = shared_gpus.environment() | variables
        environment = tuple(sorted(variables.items()))
        meets = config.scenario.process_group
        return WorldKind(world_size, config.device.value, meets, environment, python, self.backend)

    @property
    def kinds(self) -> list[WorldKind]:
        """The kinds of ranks of all its stages."""
        return list(dict.fromkeys(map(self.kind, self.config.stages)))

    @property
    def ranks_per_gpu(self) -> int | None:
        """The largest number of ranks on one GPU; None on the CPU."""
        on_gpus = self.config.device is Device.cuda and self.gpus
        return shared_gpus.ranks_per_gpu(self.world_size, self.gpus) if on_gpus else None

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
        return max(kind.world_size for kind in self.kinds)

    @property
    def expected(self) -> Expected:
        """The expectations that the verdict needs."""
        stages = self.config.stages
        return Expected(
            worlds=[self.kind(stage).world_size for stage in stages],
            dies={at: stage.target for at, stage in enumerate(stages) if stage.ends is Ending.crash},
            known_failures=self.known_failures,
            fault=self.config.fault if self.config.fault.target else None,
        )

    def checkpoints(self, sweep: Path) -> tuple[Path, Path]:
        """Return the folders of the checkpoints of its first and its second attempt, for a sweep in this
        folder. They differ: a host that was cut off during the first attempt can still write."""
        root = self.config.storage.root
        own = Path(root).resolve() / sweep.name / self.cell.name if root else self.cell.folder / "checkpoints"
        return attempts(own)


def attempts(own: Path) -> tuple[Path, Path]:
    """Return the folders of the checkpoints of a cell's first and second attempt, given the first."""
    return own, own.with_name(f"{own.name}.second-try")


def plan(
    cells: Sequence[SweepCell], machine: Machine, hosts_of: Callable[[int, str], int] = validity.one_host
) -> list[Job]:
    """Decide for each cell of a sweep whether it runs, and on which ranks; write nothing. `hosts_of` is that
    of the engine.

    Raises:
        ConfigError: a cell is wrong; the message names the cell if there are several.
    """
    jobs: list[Job] = []
    several_sizes = validity.has_several_sizes(cell.config for cell in cells)
    code, here = SweepCode(), machine.description
    for cell in cells:
        try:
            config = validity.resolve(cell.config, machine, hosts_of)
            packages = own_packages(config)
            config = with_restart(config, bool(packages))
            skip = validity.why_skip(cell.config, config, machine, several_sizes, cell.overrides)
            own = config.known_failures
            known = known_failures.read(Path(own)) if own else known_failures.listed()
            loads = versions_of(config.load_python) if config.load_python else None
        except ConfigError as error:
            where = f" (in {cell.name})" if len(cells) > 1 else ""
            raise ConfigError(f"{error}{where}") from None
        key = identity_of(config)
        columns = _columns(cell, config, key) | {"dcpbench_commit": code.dcpbench.commit}
        columns["target_commit"] = code.commits(_own_targets(config))
        columns |= {"train_steps": config.train_steps or None, "resume_steps": config.resume_steps or None}
        columns["restart"] = restart_of(config, machine)
        columns |= {"torch_version": str(here["torch"]), "python_version": here.get("python")}
        if loads:
            columns |= {"load_torch_version": loads.torch, "load_python_version": loads.python}
        about = columns | {"load_world_size": config.world_of(StageWorld.load)[1]}
        expected = tuple(failure for failure in known if failure.covers(about))
        columns |= {"expected_digest": expected_digest(config, expected), "code_digest": code_digest(config)}
        gpus = machine.gpus if config.device is Device.cuda else 0
        backend = validity.backend_of(config, machine) if gpus else Backend.gloo
        ranks = gpus, backend, code.sources(packages)
        has = machine.has_interpreters
        made = Job(cell, config, key, skip, expected, columns, *ranks, has_interpreters=has)
        if not skip and config.scenario.process_group:
            columns |= {"ranks_per_gpu": made.ranks_per_gpu, "backend": backend.value}
        jobs.append(made)
    return _one_per_run(jobs)


def _one_per_run(jobs: Sequence[Job]) -> list[Job]:
    """Leave out what is another spelling of an earlier cell, and refuse cells that differ only in how they
    run: they would count as repeats of one."""
    first: dict[Run, Job] = {}
    for job in jobs:
        other = first.setdefault(job.run, job)
        pairs = zip(validity.keys_of(other.config), validity.keys_of(job.config), strict=False)
        for (key, _, value), (_, _, another) in pairs if other is not job else ():
            if value != another and is_how_run(key) and not is_dataclass(value):
                both = f"{key}={value_text(value)} and {key}={value_text(another)}"
                why = f"differ only in how they run ({both}), and would count as repeats of one cell"
                raise ConfigError(f"{other.cell.name} and {job.cell.name} {why}; run a sweep for each value")
    return [*first.values()]


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
    }


def environment_of(machine: Machine, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the content of `environment.json`: the machine, and the code of these jobs."""
    code = {package: source for job in jobs for package, source in job.code.items()}
    return machine.description | {
        "dcpbench_commit": code[DCPBENCH].commit,
        "target_commit": joined(job.columns["target_commit"] for job in jobs),
        "code": {package: asdict(source) for package, source in sorted(code.items())},
    }


def code_digest(config: Config, hooks: bool = True) -> str:
    """Return a digest of the sources of dcpbench, of each package that a `target` of the configuration names,
    and of the packages of plug-ins that the cell uses.

    It is the same in a checkout and in the wheel that is built from it. Torch's targets are identified by its
    version; what packages import is not included. Without `hooks` it is as before plug-ins with hooks were
    installed.
    """
    return digest_of([package_digest(name) for name in (*OURS, *own_packages(config, hooks))])


def titles_of(jobs: Sequence[Job]) -> dict[str, str]:
    """Return what to show for each cell, by its name: the overrides that not all cells have or, if it has no
    others, its parallelism and ranks."""
    shared = set.intersection(*(set(job.cell.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return {
        job.cell.name: " ".join(word for word in job.cell.overrides if word not in shared)
        or f"parallel={job.config.parallel.name}, {counted(job.world_size, 'rank')}"
        for job in jobs
    }


def cells_of(jobs: Sequence[Job]) -> int:
    """Return the number of cells; each can have several runs."""
    return len({job.key.digest for job in jobs})


def with_restart(config: Config, runs_own_code: bool) -> Config:
    """Decide whether what loads is a new process: with `verify=deep`, and where the user's code runs, which
    can keep a state anywhere in its process. A fault is injected into the process that dcpbench knows."""
    wanted = config.verify is Verify.deep or (runs_own_code and config.fault.target is None)
    return replace(config, restart=wanted if config.restart is None else config.restart)


def restart_of(config: Config, machine: Machine) -> str | None:
    """Return what is new of the process that loads; None if it is the one that saved."""
    new = "interpreter" if machine.has_interpreters or config.load_python else "process"
    return new if config.restarts else None


def own_packages(config: Config, hooks: bool = True) -> dict[str, list[str]]:
    """Return the user's packages whose code ranks run, sorted, with the targets and plug-ins in each."""
    found: dict[str, list[str]] = {}
    both = zip(plugin_names(), plugins(), strict=True)
    used = {module for module, plugin in both if _uses(config, plugin, hooks)}
    for target in sorted(_own_targets(config) | {*filter(is_own, used)}):
        found.setdefault(package_of(target), []).append(target)
    return dict(sorted(found.items()))


def _uses(config: Config, plugin: Plugin, hooks: bool) -> bool:
    """Return whether a cell uses a plug-in that no target names: by an axis, or by `hooks` for all cells."""
    in_every = hooks and (plugin.hooks or any(getattr(spec, "probe", None) for spec in plugin.columns))
    axes = (spec.name for spec in plugin.columns if isinstance(spec, AxisSpec))
    return bool(in_every) or any(getattr(config, name, None) is not None for name in axes)


def _own_targets(config: Config) -> set[str]:
    """Return the targets of a configuration that are neither in dcpbench nor in torch."""
    return {text for key, text in texts_in(config) if key == "target" and is_own(text)}


@dataclass(frozen=True)
class Part:
    """The part of a sweep that one of several drivers runs (`part=2/4`): its number, from 1, and their
    count."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Parse `2/4`; raise a ConfigError for anything else."""
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if not found or int(found[1]) > int(found[2]):
            raise ConfigError(f"part={text}: must be a number and a count, as 2/4")
        return cls(int(found[1]), int(found[2]))

    def jobs(self, jobs: Sequence[Job]) -> list[Job]:
        """Return its jobs of a complete sweep, in their order.

        Cells that are likely to take equally long are dealt out in turn, so that parts take equally long. All
        repeats of a cell are in one part: they show the noise of one machine. Every driver deals out the
        same, on any machine: a cell is known by its configuration before device and world size are decided.

        Raises:
            ConfigError: it has none.
        """
        cells = [identity_of(job.cell.config).digest for job in jobs]
        order = {cell: (_likeness(job), cell) for cell, job in zip(cells, jobs, strict=True)}
        mine = {*sorted(order, key=order.__getitem__)[self.number - 1 :: self.count]}
        if not mine:
            raise ConfigError(f"part={self.number}/{self.count}: has none of {counted(len(jobs), 'cell')}")
        return [job for cell, job in zip(cells, jobs, strict=True) if cell in mine]


def _likeness(job: Job) -> tuple[str, ...]:
    asked = job.cell.config
    return asked.scenario.name, str(asked.compile), str(asked.world_size), asked.parallel.name
