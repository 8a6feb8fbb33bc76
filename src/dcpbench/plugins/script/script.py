"""`dcpbench script -- COMMAND`: run it uninterrupted, stop it, resume it, and write a row for each stop."""

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

import psutil
from rich.console import Console

from dcpbench.code.provenance import SweepCode
from dcpbench.config.errors import ConfigError
from dcpbench.config.text import counted, listed, path_text, size_text
from dcpbench.core.cell_key import digest_of
from dcpbench.executors.stack_dumps import tail
from dcpbench.plugins.script.judge import STATUS, Verdict, judge
from dcpbench.plugins.script.record import Run
from dcpbench.plugins.script.reference import problem_of
from dcpbench.plugins.script.run import OFFLINE, OUT, Command, chosen
from dcpbench.plugins.script.words import hidden, other_hosts, secrets_of
from dcpbench.plugins.script.working_folder import WorkingFolder
from dcpbench.records import files
from dcpbench.records.row import INTERRUPTED, WRONG_CONFIGURATION, Row
from dcpbench.records.store import ENVIRONMENT_JSON, append_row, write_csv, write_json
from dcpbench.report.show import write_reports
from dcpbench.report.styles import style_of, text_of
from dcpbench.sweep.signals import Signals

_MOST_COPIED = 2 * 1024**3
_LEAST_LIMIT_S, _FACTOR = 60.0, 10.0
_MOST_SHOWN = 60
_PARALLEL = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp", "FSDPModule": "fsdp2"}


def main(
    words: Sequence[str],
    stop: Sequence[str] = (),
    resume_args: Sequence[str] = (),
    every: int = 1,
    timeout: int = 600,
    grace: int = 30,
    folder: str | None = None,
    as_json: bool = False,
) -> int:
    """Check a script, and return the exit status."""
    place = Path(folder or Path("outputs", datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S_%f"))).resolve()
    if host := other_hosts(words, os.environ, Path.cwd()):
        raise ConfigError(f"{host}: dcpbench script checks commands that run on one host, which is this one")
    if place.exists() and any(place.iterdir()):
        raise ConfigError(f"--dir {folder}: is not empty")
    console = Console(file=sys.stderr if as_json else sys.stdout)
    check, signals = (
        Check(Command([*words], Path.cwd(), every, grace), resume_args, place, console),
        Signals(),
    )
    signals.obey()
    try:
        rows = [*check.rows(dict.fromkeys(stop), timeout)]
        if as_json:
            print(json.dumps([row.flat() for row in rows], indent=1))
        return check.end(rows)
    except KeyboardInterrupt:
        console.print(f"interrupted; logs and rows: {path_text(place)}", style="bold", soft_wrap=True)
        return signals.status(INTERRUPTED)


class Check:
    """The check of one script in one folder."""

    def __init__(self, command: Command, resume_words: Sequence[str], place: Path, console: Console) -> None:
        self._command, self._resume_words, self._place, self._console = command, resume_words, place, console
        self._hidden = partial(hidden, secrets=secrets_of([*command.words, *resume_words]))
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._commit = SweepCode().dcpbench.commit

    def rows(self, stops: Collection[str], limit_s: float) -> Iterator[Row]:
        """Run the reference, then each stop; yield its row when it is written."""
        if not self._command.has_out:
            size = WorkingFolder(self._command.cwd, self._place).size
            text = f"the working folder ({size_text(size)}) is copied for each stop: the command has no {OUT}"
            if size > _MOST_COPIED:
                raise ConfigError(f"{text}; that is too much: write {OUT} for the folder of its output")
            self._print(text)
        if offline := [f"{key}={value}" for key, value in OFFLINE.items() if key not in os.environ]:
            self._print(f"set for the script: {' '.join(offline)}", "dim")
        self._reference = reference = self._uninterrupted(limit_s)

        @cache
        def again(steps: int) -> Run:
            place = self._place / f"again-{steps}"
            return self._command.run(place, "again", self._limit_s, f"kill@{steps + 1}")

        for stop in stops or chosen(reference):
            began = time.monotonic()
            name = re.sub(r"[^\w@.,=+:-]", "_", f"stop={stop}")[:80]
            name = name if name == f"stop={stop}" else f"{name}-{digest_of(stop)[:4]}"
            place = self._place / re.sub(r"\W+", "-", name)  # Hydra takes no = and @ in {out}
            stopped, resumed = self._command.run(place, "stopped", self._limit_s, stop), None
            if stopped.of_kind("stop"):
                resumed = self._command.run(place, "resumed", self._limit_s, more=self._resume_words)
            verdict, log = judge(reference, stopped, resumed, again), (resumed or stopped).log
            seconds = time.monotonic() - began
            row = self._row(name, stop, verdict, seconds, tail(log))
            append_row(self._place, row)
            self._line(stop, verdict.word, style_of(row.status), verdict.reason, seconds)
            if verdict.cause:
                self._print(f"    likely: {verdict.cause}")
            if row.status == "fail":
                self._print(f"    log: {path_text(log)}", "dim")
            elif row.status == "pass":
                files.remove_tree(place / "out")
            yield row

    def end(self, rows: Sequence[Row]) -> int:
        """Write the reports, and return the exit status."""
        write_csv(self._place)
        write_reports(self._place, None)
        for place in (self._place / "reference", *self._place.glob("again-*")):
            files.remove_tree(place / "out")
        failed, exact = ([row for row in rows if row.status == status] for status in ("fail", "pass"))
        text = f"{len(exact)} of {counted(len(rows), 'stop')} exact"
        page = path_text(self._place / "report.html")
        self._print(f"{text}; page: {page}", "bold red" if failed else "bold")
        return 1 if failed else 0 if len(exact) == len(rows) else WRONG_CONFIGURATION

    def _uninterrupted(self, limit_s: float) -> Run:
        """Run the command uninterrupted, and write what it ran on."""
        began = time.monotonic()
        run = self._command.run(self._place / "reference", "reference", limit_s)
        seconds = time.monotonic() - began
        broken = listed([event["error"] for event in run.of_kind("broken")])
        saves = [str(step) for step, paths in sorted(run.disk.saves.items()) if paths]
        where = f"below {OUT}" if self._command.has_out else "in the working folder"
        problem = problem_of(run, self._command, self._place / "unrecorded", limit_s, seconds)
        if not saves:
            problem = problem or f"saved nothing {where}: there is nothing to resume from"
        if problem:
            raise ConfigError(self._hidden(f"the command {problem}; see {path_text(run.log)}"))
        machine = {"host": platform.node(), "cpu_cores": psutil.cpu_count(), "dcpbench_commit": self._commit}
        machine |= {name: run.about[name] for name in ("torch", "python")}
        write_json(self._place / ENVIRONMENT_JSON, machine)
        self._limit_s = min(limit_s, max(_LEAST_LIMIT_S, _FACTOR * seconds))
        size = f"{counted(run.length, 'step')} on {counted(len(run.ranks), 'rank')}"
        self._line("reference", "", "", f"{size}, saves after step {listed(saves, 6)}", seconds)
        if broken:
            self._print(f"    not all was recorded: {broken}")
        return run

    def _row(self, name: str, stop: str, verdict: Verdict, seconds: float, log: list[str]) -> Row:
        """Return the row of a stop."""
        about, words, every = self._reference.about, self._command.words, self._command.every
        scripts = [Path(word) for word in words if word.endswith(".py")]
        sources = [path for path in (self._command.cwd / path for path in scripts) if path.is_file()]
        parallel = [name for kind, name in _PARALLEL.items() if kind in about["classes"]]
        first, resume = verdict.first, shlex.join(self._resume_words)
        options = [f"--resume-args={resume}"] * bool(resume) + [f"--every={every}"] * (every > 1)
        config = {"script.command": self._hidden(shlex.join(words)), "--stop": stop}
        config |= {"script.resume_args": self._hidden(resume)} if resume else {}
        status = STATUS[verdict.word]
        details = {
            "run": bar(self._reference, verdict),
            "likely": [verdict.cause] if verdict.cause else [],
            "log_tail": [*map(self._hidden, log)] if status == "fail" else [],
            "rank": first.rank if first else 0,
        }
        return Row(
            cell=name,
            status=status,
            reason=None if verdict.word == "exact" else self._hidden(f"{verdict.word}: {verdict.reason}"),
            axes={
                "scenario": "script",
                "parallel": "+".join(parallel) or "none",
                "compile": "OptimizedModule" in about["classes"],
                "save": "script",
                "model": (scripts or [Path(words[0])])[0].name,
                "storage": "script",
                "world_size": about["world_size"],
                "device": "+".join(about["devices"]) or None,
                "seed": 0,
            },
            overrides=self._hidden(shlex.join(["script", *options, f"--stop={stop}", "--", *words])),
            resume={"pass": True, "fail": False}.get(status),
            first_mismatch=first.names[0] if first and first.names else None,
            metrics={
                "cell_s": seconds,
                "loaded_step": verdict.loaded,
                "newest_step": verdict.newest,
                "first_step": first.step if first else None,
            },
            texts={"verdict": verdict.word, "first_kind": first.kind if first else None},
            torch_version=about["torch"],
            python_version=about["python"],
            backend=about["backend"],
            dcpbench_commit=self._commit,
            started_at=self._started_at,
            config_digest=digest_of(config),
            code_digest=hashlib.sha256(sources[0].read_bytes()).hexdigest()[:16] if sources else None,
            cwd=str(self._command.cwd),
            config=config,
            details=details,
        )

    def _line(self, name: str, word: str, style: str, text: str, seconds: float) -> None:
        """Print what a run showed."""
        line = text_of(f"{name:9}  ").append(f"{word:8}", style).append(f"  {self._hidden(text)}", "")
        self._console.print(line.append(f"  {seconds:.1f} s", "dim"), soft_wrap=True)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text_of(self._hidden(text), style), soft_wrap=True)


def bar(reference: Run, verdict: Verdict) -> str:
    """Return a run with a character for each step, around the first difference or the load: `..|..|=X`."""
    steps = reference.length
    loaded = steps if verdict.loaded is None else verdict.loaded
    first = verdict.first.step if verdict.first else steps + 1
    begin = max(1, (first if first <= steps else loaded + 1) - _MOST_SHOWN // 2)
    text = ""
    for step in range(begin, min(steps + 1, begin + _MOST_SHOWN)):
        text += "." if step <= loaded else "=" if step < first else "X" if step == first else "x"
        text += "|" * (step in reference.saved_steps)
    return text
