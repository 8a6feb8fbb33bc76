"""How many hosts can one driver have?  python bench/agents.py [--agents 1,8,64,1024] [--ranks N] [--ray N]

A sweep on simulated agents: each answers at once with the reports of a real run of the same stage, so only
the driver's work takes time. With `--ray N` the answers come through N real Ray actors, which share the
agents.
"""

# ruff: noqa: T201
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from dcpbench.config.groups import ExecutorConfig
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import RankEnd, StageEnd
from dcpbench.executors.base import Executor
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.local import LocalEngine
from dcpbench.plugins.hosts.host_agent import State
from dcpbench.plugins.hosts.hosts import Agent, HostsEngine
from dcpbench.plugins.hosts.hosts_executor import HostsExecutor
from dcpbench.rank.messages import CellSpec, WorldKind
from dcpbench.records.installation import installation

AGENTS, ACTORS = "SIMULATED_AGENTS", "SIMULATED_ACTORS"
"""Variables of the environment: how many agents, and how many actors of Ray."""
LOOK_S = 0.02
REAL = 2
"""How many ranks the real run has; all but the first report alike."""
CELL = ("parallel=fsdp2", "saves=1", "train_steps=1", "resume_steps=1", "keep_checkpoints=none", "device=cpu")


class Host:
    """What an agent is asked, and what it answers at once."""

    def __init__(self, name: str, described: dict[str, Any]) -> None:
        self.name, self.described = name, described
        self.ranks: Sequence[int] = ()

    def describe(self) -> dict[str, Any]:
        return {**self.described, "host": self.name, "gpu_count": 0}

    def state(self, _: Any, __: Any) -> State:
        return State(time.time(), time.monotonic(), True, None)

    def listen(self, _: int) -> int:
        return 1

    def start(self, _: Any, ranks: Sequence[int], *__: Any) -> None:
        self.ranks = ranks

    def run(self, _: int, __: Any, reports: list[RankReport], ___: Any) -> list[StageEnd]:
        last = len(reports) - 1
        of_rank = {rank: replace(reports[min(rank, last)], rank=rank, host=self.name) for rank in self.ranks}
        ends = [RankEnd(rank, rank, "", "report", report=one) for rank, one in of_rank.items()]
        return [StageEnd(tuple(ends))]

    def nothing(self, *_: Any) -> None:
        return None

    conclude = leave = kill = interrupt = end = nothing


@dataclass(eq=False)
class Simulated(Agent):
    """A host in this process."""

    host: Host | None = None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answered: Future[Any] = Future()
        answered.set_result(getattr(self.host, method)(*arguments))
        return answered

    def why_lost(self, error: BaseException) -> str | None:
        raise error

    def give_up(self) -> None:
        pass


class Several:
    """An actor of Ray that answers for many hosts."""

    def __init__(self, made: dict[str, Host]) -> None:
        self.hosts = made

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        return getattr(self.hosts[name], method)(*arguments)


@dataclass(eq=False)
class OfActor(Simulated):
    """A host for which an actor of Ray answers."""

    actor: Any = None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = self.actor.call.remote(self.name, method, *arguments).future()
        return answer


class SimulatedExecutor(HostsExecutor):
    """Runs each stage once on a few real ranks; what they report is what all agents answer."""

    real: Executor
    reports: dict[str, list[RankReport]]

    def run(self, kind: WorldKind, spec: CellSpec, *rest: Any) -> Any:
        stage = f"{kind.process_group} {spec.run.stage}"
        if stage not in self.reports:
            config = replace(spec.config, world_size=REAL)
            few = replace(kind, world_size=min(kind.world_size, REAL))
            end = self.real.run(few, replace(spec, config=config), *rest)
            if not end.is_complete:
                return end
            self.reports[stage] = end.reports
        return super().run(kind, _Told(spec, self.reports[stage]), *rest)

    def end(self) -> None:
        super().end()
        self.real.end()


class _Told:
    """A stage as the driver knows it, which the agents are told as what they are to answer."""

    def __init__(self, spec: CellSpec, reports: list[RankReport]) -> None:
        self.run, self.folder, self.checkpoints = spec.run, spec.folder, spec.checkpoints
        self.reports = reports

    def __reduce__(self) -> Any:
        return list, (self.reports,)

    def __len__(self) -> int:
        return len(self.reports)

    def __getitem__(self, number: int) -> RankReport:
        return self.reports[number]


class SimulatedEngine(HostsEngine):
    """As many agents as the environment says."""

    def begin(self, modules: Sequence[str]) -> None:
        self.local = LocalEngine(ExecutorConfig())
        self.local.begin(modules)

    def probe(self) -> Machine:
        described = {**self.local.probe().description, **installation()}
        made = [Host(f"host{number:04}", described) for number in range(int(os.environ[AGENTS]))]
        actors = int(os.environ[ACTORS])
        if actors:
            import ray

            ray.init(
                "local", include_dashboard=False, logging_level="error", num_cpus=actors, log_to_driver=False
            )
            here = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            made_remote = ray.remote(Several).options(runtime_env={"env_vars": {"PYTHONPATH": here}})
            parts = [{host.name: host for host in made[number::actors]} for number in range(actors)]
            several = [made_remote.remote(part) for part in parts]
            self.agents = [
                OfActor(host.name, "127.0.0.1", (), actor=several[number % actors])
                for number, host in enumerate(made)
            ]
        else:
            self.agents = [Simulated(host.name, "127.0.0.1", (), host=host) for host in made]
        return super().probe()

    def refresh(self) -> None:
        pass

    def executor(self, gpus: tuple[int, ...]) -> SimulatedExecutor:
        made = SimulatedExecutor(self, self.next_number(), gpus)
        made.real, made.reports = self.local.executor(gpus), {}
        return made

    def end(self) -> None:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()  # else it would be ended as what ranks have left behind
        self.local.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", default="1,8,64,256,1024")
    parser.add_argument("--ranks", type=int, default=8, help="of each agent (default: %(default)s)")
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--ray", type=int, default=0, metavar="ACTORS")
    arguments = parser.parse_args()
    print(f"{'agents':>6} {'ranks':>6} {'start s':>8} {'cell s':>7} {'row kB':>7} {'most MB':>8}", flush=True)
    for agents in (int(one) for one in arguments.agents.split(",")):
        with tempfile.TemporaryDirectory() as parent:
            if not measure(Path(parent) / "sweep", agents, arguments):
                return 1
    return 0


def measure(folder: Path, agents: int, arguments: argparse.Namespace) -> bool:
    """Run a sweep and print a line; whether it went as it should."""
    ranks = agents * arguments.ranks
    places = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    variables = {AGENTS: str(agents), ACTORS: str(arguments.ray)}
    asked = (
        f"world_size={ranks}",
        f"model.batch_size={max(ranks, REAL)}",
        f"seed=range(0,{arguments.cells})",
    )
    words = (*asked, f"hydra.sweep.dir={folder}", "executor.target=agents.SimulatedEngine")
    words += (f"executor.ranks_per_host={arguments.ranks}",)
    command = (sys.executable, "-m", "dcpbench", "-m", *CELL, *words, "timeouts.cell_s=600")
    started = time.monotonic()
    with folder.with_suffix(".log").open("wb") as log:
        environment = {**os.environ, **variables, "PYTHONPATH": places}
        driver = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        most, path = 0, folder / "results.jsonl"
        seen: list[tuple[int, float]] = []
        while driver.poll() is None:
            with suppress(psutil.Error):
                most = max(most, driver.memory_info().rss)
            count = path.read_bytes().count(b"\n") if path.exists() else 0
            if count > (seen[-1][0] if seen else 0):
                seen.append((count, time.monotonic()))
            time.sleep(LOOK_S)
    took_s = time.monotonic() - started
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    if len(rows) != arguments.cells or any(row["status"] != "pass" for row in rows):
        print(f"exit status {driver.returncode}", [row["reason"] for row in rows][:2])
        print(folder.with_suffix(".log").read_text()[-1500:])
        return False
    (first, first_at), (last, last_at) = seen[0], seen[-1]
    cell_s = (last_at - first_at) / (last - first)
    start_s, row_kb = took_s - cell_s * len(rows), len(lines[-1]) / 1e3
    print(f"{agents:6} {ranks:6} {start_s:8.1f} {cell_s:7.3f} {row_kb:7.0f} {most / 1e6:8.0f}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
