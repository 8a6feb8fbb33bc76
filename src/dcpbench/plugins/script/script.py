"""`dcpbench script -- COMMAND`: run it uninterrupted, stop it, resume it, and write a row for each stop."""

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from dcpbench.code.provenance import SweepCode
from dcpbench.config.errors import ConfigError
from dcpbench.config.text import counted, listed, path_text, program, size_text
from dcpbench.core.cell_key import digest_of
from dcpbench.executors.stack_dumps import tail
from dcpbench.plugins.script.compare import Stopped, family, first_noise, likely_checkpoints
from dcpbench.plugins.script.copies import Copy
from dcpbench.plugins.script.judge import STATUS, StopVerdict, judge
from dcpbench.plugins.script.record import RecordedRun, plain
from dcpbench.plugins.script.reference import problem_of
from dcpbench.plugins.script.run import OFFLINE, OUT, Freezer, ScriptCommand
from dcpbench.plugins.script.shown import PARALLEL, differing, issue, losses, seen
from dcpbench.plugins.script.stops import GENTLE, chosen
from dcpbench.plugins.script.words import hidden, other_hosts, resume_words, secrets_of
from dcpbench.records import files
from dcpbench.records.row import INTERRUPTED, WRONG_CONFIGURATION, Row
from dcpbench.records.store import (
    ENVIRONMENT_JSON,
    append_row,
    keep_lines,
    read_lines,
    stored_rows,
    write_csv,
    write_json,
)
from dcpbench.report.show import write_reports
from dcpbench.report.styles import style_of, text_of
from dcpbench.sweep.signals import Signals

_MOST_COPIED = 2 * 1024**3
_LEAST_LIMIT_S, _FACTOR = 60.0, 10.0


def main(
    words: Sequence[str],
    stop: Sequence[str] = (),
    resume_args: Sequence[str] = (),
    timeout: int = 600,
    folder: str | None = None,
    as_json: bool = False,
    again: str | None = None,
    look: bool = False,
    gate: Sequence[str] = (),
    **settings: Any,
) -> int:
    """Check a script, and return the exit status. `settings` are options: fields of `ScriptCommand`."""
    name = again or folder or Path("outputs", datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S_%f"))
    place, cwd = Path(name).resolve(), Path.cwd()
    if again:
        known = next(stored_rows(place), None)
        if known is None or "script.command" not in known.config:
            raise ConfigError(f"--again {path_text(place)}: not a folder of dcpbench script")
        words = words or shlex.split(known.config["script.command"])
        resume_args = resume_args or shlex.split(known.config.get("script.resume_args", ""))
        settings["deterministic"], cwd = "script.deterministic" in known.config, Path(known.cwd or cwd)
        if any("***" in word for word in (*words, *resume_args)):
            raise ConfigError("--again: secrets are not stored; add -- and the command, and --resume-args")
    elif not words:
        raise ConfigError("-- COMMAND: is missing")
    if host := other_hosts(words, os.environ, Path.cwd()):
        raise ConfigError(f"{host}: dcpbench script checks commands that run on one host, which is this one")
    if not again and place.exists() and any(place.iterdir()):
        raise ConfigError(f"--dir {folder}: is not empty")
    console = Console(file=sys.stderr if as_json else sys.stdout)
    check, signals = Check(ScriptCommand([*words], cwd, place, resume_args, **settings), console), Signals()
    signals.obey()
    try:
        if look:
            return check.look(timeout)
        rows = [*(check.rows_again if again else check.rows)(dict.fromkeys(stop), timeout)]
        if as_json:
            print(json.dumps([row.flat() for row in rows], indent=1))
        return check.end(rows, gate)
    except KeyboardInterrupt:
        console.print(f"interrupted; logs and rows: {path_text(place)}", style="bold", soft_wrap=True)
        return signals.status(INTERRUPTED)


class Check:
    """The check of one script in one folder."""

    def __init__(self, command: ScriptCommand, console: Console) -> None:
        self._command, self._place, self._console = command, command.place, console
        self._hidden = partial(hidden, secrets=secrets_of([*command.words, *command.resume_args]))
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._commit, self._note = SweepCode().dcpbench.commit, ""
        self._reference: RecordedRun | None = None
        self._freezer = Freezer({})

    def rows(self, stops: Collection[str], limit_s: float) -> Iterator[Row]:
        """Run the command uninterrupted, resume it at each stop, and yield a row when it is written."""
        if not self._command.has_out:
            size = self._command.working.size
            text = f"the working folder ({size_text(size)}) is copied for each run: the command has no {OUT}"
            if size > _MOST_COPIED:
                raise ConfigError(f"{text}; that is too much: write {OUT} for the folder of its output")
            self._print(text)
        if self._command.deterministic:
            self._print("deterministic algorithms of torch are set in all runs")
        if offline := [f"{key}={value}" for key, value in OFFLINE.items() if key not in os.environ]:
            self._print(f"set for the script: {' '.join(offline)}", "dim")
        self._limit_s = limit_s
        if not stops:
            stops = chosen(self._uninterrupted("reference"))
            count = 1 + len(stops) + sum(stop.startswith(GENTLE) for stop in stops)
            text = f"{counted(len(stops), 'stop')}: {counted(count, 'more run')}"
            self._says(f"{text}, about {count * self._seconds:.0f} s")
        self._frozen = self._uninterrupted("frozen", [stop for stop in stops if not stop.startswith(GENTLE)])
        yield from self._rows(stops)

    def rows_again(self, stops: Collection[str], limit_s: float) -> Iterator[Row]:
        """Resume the copies that an earlier check kept, those at `stops` or all, and yield a row when it is
        written in place of the earlier one."""
        self._limit_s, self._note = limit_s, "; the saves are those of the earlier script"
        runs = [self._command.recorded(self._place / name, name) for name in ("reference", "frozen")
                if (self._place / name / f"{name}.json").exists()]  # fmt: skip
        self._reference, self._frozen = runs[0], runs[-1] if not runs[-1].status else runs[0]
        lines = [*read_lines(self._place)]
        known = [line.row.config["--stop"] for line in lines if line.row]
        copies = {stop: copy for stop in known if (copy := Copy.kept(self._folder(stop) / "out"))}
        if wrong := [stop for stop in stops if stop not in copies] or ([] if copies else ["--again"]):
            kept = f"kept: {listed([*copies])}" if copies else "none is kept"
            raise ConfigError(f"{wrong[0]}: no copy of a stop that failed; {kept}")
        stops = stops or [*copies]
        self._freezer.copies |= copies
        if not self._command.has_out:  # the script is in each copy
            frozen = json.loads((self._place / "frozen" / "frozen.json").read_text())
            for stop in stops:
                self._command.working.copy(copies[stop].folder, frozen["began"])
        text = "resumed with the script as it now is, from what the earlier one saved"
        self._print(f"{text}: {listed([*stops])}")
        old = [line for line in lines if line.row and line.row.config["--stop"] in stops]
        keep_lines(self._place, [line for line in lines if line not in old], old)
        yield from self._rows(stops)

    def _rows(self, stops: Collection[str]) -> Iterator[Row]:
        """Resume the command at each stop, and yield a row when it is written."""
        for stop in stops:
            began = time.monotonic()
            verdict, run, at = self._judged(stop)
            verdict = replace(verdict, reason=verdict.reason + self._note)
            seconds = time.monotonic() - began
            again = shlex.join([*program(), "script", "--again", path_text(self._place), f"--stop={stop}"])
            row = self._row(stop, verdict, seconds, run, at, again)
            append_row(self._place, row)
            self._line(stop, verdict.word, style_of(row.status), verdict.reason, seconds)
            if verdict.cause:
                self._print(f"    likely: {verdict.cause}")
            if row.status == "fail":
                self._print(f"    log: {path_text(run.log)}, to report it: issue.md there", "dim")
                self._print(f"    after a repair: {again}", "dim", to_copy=True)
            elif row.status == "pass":
                files.remove_tree(self._folder(stop) / "out")
                (self._folder(stop) / "issue.md").unlink(missing_ok=True)
            yield row

    def look(self, limit_s: float) -> int:
        """Run three steps of the command, and print what is seen."""
        run = self._command.run(self._place / "look", "look", limit_s, ends=4)
        if problem := problem_of(run, self._command, self._place / "unrecorded", limit_s, _LEAST_LIMIT_S):
            raise ConfigError(self._hidden(f"the command {problem}; see {path_text(run.log)}"))
        for line in seen(run):
            self._print(line)
        files.remove_tree(self._place / "run")
        return 0

    def _judged(self, stop: str) -> tuple[StopVerdict, RecordedRun, int | None]:
        """Resume a stopped run, and return the verdict with its last run, and the step at which it was
        stopped."""
        folder, frozen, ranks = self._folder(stop), self._frozen, len(self._frozen.ranks)
        if stop.startswith("rank") and int(stop[4:].partition("@")[0]) >= ranks:
            return (
                StopVerdict("not_reached", f"there is no such rank: {counted(ranks, 'rank')}, from 0"),
                frozen,
                None,
            )
        copy, run = self._freezer.copies.get(stop), frozen
        if copy and (folder / "stopped.json").exists():
            run = self._command.recorded(folder, "stopped")
        elif not copy and (stop in self._freezer.copies or stop not in self._freezer.folders):
            self._says(f"{stop}: a run of its own")
            run, copy = self._command.stop(folder, stop, self._limit_s, frozen.ends)
        if copy is None:
            ended = f"ended ({run.failure})" if run.status else "ended with exit status 0"
            how = "ran too long" if run.status is None else ended
            return StopVerdict("not_reached", f"the run {how} before this stop"), run, None
        if copy.event.get("cut") == "half" and run.synced(copy.event):
            text = "was synced before it was published, so that a power loss does not cut it"
            return StopVerdict("not_reached", f"{copy.event['path']} {text}"), run, None
        before, later = run.split(copy.event["t"])
        restarted = later if stop.startswith(GENTLE) and later.ranks else None
        run = before if restarted else run
        repeats = first_noise(run.until(copy.event["t"]), frozen) is None
        stopped = Stopped(run.until(copy.time), copy, frozen, repeats)

        def resume(name: str, text: str) -> RecordedRun:
            self._says(f"{stop}: {text}")
            newest = family(stopped, ()).newest or 0
            ends = frozen.ends and max(2, frozen.ends - newest)  # in steps of its own, from the newest one
            return self._command.run(folder, name, self._limit_s, source=copy, ends=ends)

        def restart() -> RecordedRun:
            self._says(f"{stop}: once more: does it repeat?")
            again, copy = self._command.stop(folder / "again", stop, self._limit_s, frozen.ends)
            return again.split(copy.event["t"])[1] if copy else again

        if restarted:
            self._says(f"{stop}: its launcher resumed it")
            Copy.about(copy.folder).unlink()  # it is no crash's, and cannot be resumed
        resumed = restarted or resume("resumed", "resumed")
        second = restart if restarted else lambda: resume("again", "resumed once more: does it repeat?")
        words = [
            word.replace(OUT, "")
            for word in (*self._command.words, *self._command.resume_args)
            if OUT in word
        ]
        is_given = "{newest:" in shlex.join(self._command.resume_args)
        verdict = judge(stopped, resumed, cache(second), cache(self._other), words, is_given)
        if self._command.resume_args and not resume_words(self._command.resume_args, copy, copy.folder):
            verdict = replace(verdict, reason=f"{verdict.reason}; without --resume-args, as no path fits yet")
        return verdict, resumed, copy.event["k"] + 1

    def _other(self) -> RecordedRun:
        """Return an uninterrupted run that is not the frozen one."""
        folder = self._place / "reference"
        if self._reference and self._reference is not self._frozen:
            return self._reference
        if (folder / "again.json").exists():
            return self._command.recorded(folder, "again")
        self._says("uninterrupted once more: do two runs repeat?")
        return self._command.run(folder, "again", self._limit_s, ends=self._frozen.ends)

    def _folder(self, stop: str) -> Path:
        """Return the folder of the records of a stop."""
        name = re.sub(r"[^\w-]+", "-", f"stop-{stop}")[:80]
        return self._place / f"{name}-{digest_of(stop)[:4]}"

    def _says(self, text: str) -> None:
        """Print what runs now."""
        self._print(f"    {text}", "dim")

    def end(self, rows: Sequence[Row], gate: Sequence[str] = ()) -> int:
        """Write the reports, and return the exit status, which stops of the kinds `gate` decide, or all."""
        write_csv(self._place)
        write_reports(self._place, None)
        files.remove_tree(self._place / "run")
        deciding = [row for row in rows if not gate or str(row.config["--stop"]).startswith(tuple(gate))]
        failed, exact = ([row for row in deciding if row.status == status] for status in ("fail", "pass"))
        words = Counter(row.texts["verdict"] for row in rows)
        text = f"{words['exact']} of {counted(len(rows), 'stop')} exact"
        text += f", {words['restored']} restored" if words["restored"] else ""
        text += f", {len(rows) - len(deciding)} not in --gate" if gate else ""
        page = path_text(self._place / "report.html")
        self._print(f"{text}; page: {page}", "bold red" if failed else "bold")
        return 1 if failed else 0 if exact and len(exact) == len(deciding) else WRONG_CONFIGURATION

    def _uninterrupted(self, name: str, stops: Sequence[str] = ()) -> RecordedRun:
        """Run the command to its end, perhaps frozen at stops. The first such run is the reference."""
        began, reference = time.monotonic(), self._reference
        self._says("uninterrupted" + (f", frozen and copied at {listed([*stops])}" if stops else ""))
        self._freezer = Freezer({stop: self._folder(stop) / "out" for stop in stops})
        ends = reference.ends if reference else 0
        run = self._command.run(self._place / name, name, self._limit_s, self._freezer, ends=ends)
        if run.status != 0 if reference else run.status and self._freezer.copies:
            # A collective timed out meanwhile, perhaps.
            self._says(f"it failed, so each stop has a run of its own: {run.failure}")
            self._freezer = Freezer({})
            return reference or self._uninterrupted("reference")
        if self._freezer.copies:
            self._says(f"stopped for {self._freezer.frozen_s:.1f} s to be copied")
        if not reference:
            self._reference = run
            self._describe(name, run, time.monotonic() - began)
        return run

    def _describe(self, name: str, run: RecordedRun, seconds: float) -> None:
        """Print what the reference did, and write what it ran on.

        Raises:
            ConfigError: it did nothing that can be judged.
        """
        saves = [str(member.date) for member in reversed(likely_checkpoints(run))]
        where = f"below {OUT}" if self._command.has_out else "in the working folder"
        problem = problem_of(run, self._command, self._place / "unrecorded", self._limit_s, seconds)
        if not run.disk.versions:
            path = next((path for path in self._command.out.rglob("*") if path.is_file()), None)
            seen = f", and {path.name} was written by a library" if path and self._command.has_out else ""
            problem = problem or f"saved nothing {where} through Python{seen}: there is nothing to judge"
        if problem:
            raise ConfigError(self._hidden(f"the command {problem}; see {path_text(run.log)}"))
        machine = {"host": platform.node(), "cpu_cores": psutil.cpu_count(), "dcpbench_commit": self._commit}
        machine |= {name: run.about[name] for name in ("torch", "python")}
        write_json(self._place / ENVIRONMENT_JSON, machine)
        self._seconds, self._limit_s = seconds, min(self._limit_s, max(_LEAST_LIMIT_S, _FACTOR * seconds))
        size = f"{counted(run.length, 'step')} on {counted(len(run.ranks), 'rank')}"
        saved = f"saves after step {listed(saves, 6)}" if saves else "no save was recognized"
        self._line(name, "", "", f"{size}, {saved}", seconds)
        if run.broken:
            self._print(f"    not all was recorded: {listed(run.broken)}")

    def _row(
        self, stop: str, verdict: StopVerdict, seconds: float, run: RecordedRun, at: int | None, again: str
    ) -> Row:
        """Return the row of a stop, and write the issue of one that failed."""
        about, words, first = self._frozen.about, self._command.words, verdict.first
        scripts = [Path(word) for word in words if word.endswith(".py")]
        sources = [path for path in (self._command.cwd / path for path in scripts) if path.is_file()]
        parallel = [name for kind, name in PARALLEL.items() if kind in about["classes"]]
        known = {"resume_args": self._hidden(shlex.join(self._command.resume_args))}
        known |= {name: str(getattr(self._command, name)) for name in ("every", "saves", "deterministic")}
        known = {name: of for name, of in known.items() if of and of != str(getattr(ScriptCommand, name))}
        options = [f"--{name.replace('_', '-')}={of}".removesuffix("=True") for name, of in known.items()]
        config = {"script.command": self._hidden(shlex.join(words)), "--stop": stop}
        config |= {f"script.{name}": value for name, value in known.items()}
        status = STATUS[verdict.word]
        resumed = {str(verdict.loaded): losses(run)} if verdict.loaded is not None else {}
        loaded = [verdict.loaded] * bool(verdict.loaded)
        saves = [member.date for member in reversed(likely_checkpoints(self._frozen))]
        details: dict[str, Any] = {
            "likely": [verdict.cause] if verdict.cause else [],
            "compared": verdict.compared,
            "differs": differing(verdict.differing),
            "log": str(run.log.relative_to(self._place)),
            "log_tail": [self._hidden(plain(line)) for line in tail(run.log)] if status == "fail" else [],
            "rank": first.rank if first else 0,
            "ranks": [{"losses": {"continued": losses(self._frozen)}, "resumed": resumed}],
            "marks": {"saved": saves, "stopped": [at] * bool(at), "loaded": loaded},
        }
        if status == "fail":
            details |= {"issue": f"{self._folder(stop).name}/issue.md", "after_repair": self._hidden(again)}
        row = Row(
            cell=f"stop={stop}",
            status=status,
            reason=self._hidden(f"{verdict.word}: {verdict.reason}"),
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
        if status == "fail":
            places = {str(self._place): "RESULTS", str(self._command.cwd): ".", str(Path.home()): "~"}
            text = self._hidden(issue(row, places))
            (self._place / details["issue"]).write_text(text, encoding="utf-8")
        return row

    def _line(self, name: str, word: str, style: str, text: str, seconds: float) -> None:
        """Print what a run showed."""
        line = text_of(f"{name:9}  ").append(f"{word:8}", style).append(f"  {self._hidden(text)}", "")
        line = line.append(f"  {seconds:.1f} s", "dim")
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _print(self, text: str, style: str = "", to_copy: bool = False) -> None:
        """Print a line, which a terminal breaks between words unless it is one `to_copy`."""
        is_unbroken = to_copy or not self._console.is_terminal
        self._console.print(text_of(self._hidden(text), style), soft_wrap=is_unbroken)
