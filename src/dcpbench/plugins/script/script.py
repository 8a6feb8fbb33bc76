"""`dcpbench script -- COMMAND`: run it uninterrupted, stop it, resume it, and write a row for each stop."""

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from dcpbench.code.provenance import SweepCode
from dcpbench.config.errors import ConfigError
from dcpbench.config.text import counted, listed, size_text
from dcpbench.plugins.script.judge import Verdict, error_line, judge
from dcpbench.plugins.script.record import Recording
from dcpbench.plugins.script.rows import Script, cell_name
from dcpbench.plugins.script.run import OFFLINE, OUT, Command, Ended, Stop
from dcpbench.plugins.script.stops import chosen
from dcpbench.records import files
from dcpbench.records.row import INTERRUPTED, WRONG_CONFIGURATION, Row
from dcpbench.records.store import ENVIRONMENT_JSON, append_row, write_csv, write_json
from dcpbench.report.document import width_of
from dcpbench.report.show import write_reports
from dcpbench.report.styles import complain, style_of, text_of, without_trailing_blanks

_LEAST_LIMIT_S, _FACTOR = 60.0, 10.0
_NAME_WIDTH, _WORD_WIDTH = len("reference"), len("diverges")


def main(
    words: Sequence[str],
    stop: Sequence[str] = (),
    resume_args: str = "",
    every: int = 1,
    timeout: int = 600,
    grace: int = 30,
    folder: str | None = None,
    as_json: bool = False,
) -> int:
    """Check a script, and return the exit status."""
    stops = [Stop.parse(text) for text in dict.fromkeys(stop)]
    name = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S_%f")
    place = Path(folder or Path("outputs", name)).resolve()
    if place.exists() and any(place.iterdir()):
        raise ConfigError(f"--dir {folder}: is not empty")
    try:
        resume_words = shlex.split(resume_args)
    except ValueError as error:
        raise ConfigError(f"--resume-args {resume_args}: {error}") from None
    command = Command([*words], Path.cwd(), every, grace)
    file = sys.stderr if as_json else sys.stdout
    checked = Check(command, resume_words, place, timeout, Console(file=file, width=width_of(file)))
    try:
        rows = [*checked.rows(stops)]
    except KeyboardInterrupt:
        complain(f"interrupted; rows so far are in {place}")
        return INTERRUPTED
    if as_json:
        print(json.dumps([row.flat() for row in rows], indent=1))
    return checked.end(rows)


class Check:
    """The check of one script in one folder."""

    def __init__(
        self, command: Command, resume_words: Sequence[str], place: Path, limit_s: float, console: Console
    ) -> None:
        self._command, self._resume_words, self._place = command, resume_words, place
        self._limit_s, self._console = limit_s, console
        self._second = Recording([])

    def rows(self, stops: Sequence[Stop]) -> Iterator[Row]:
        """Run the reference, then each stop; yield its row when it is written.

        Raises:
            ConfigError: the command does not run.
        """
        self._place.mkdir(parents=True, exist_ok=True)
        write_json(self._place / ENVIRONMENT_JSON, {})
        if not self._command.has_out:
            size = size_text(self._command.copied_size())
            why = f"the command does not name {OUT}"
            self._print(text_of(f"the working folder ({size}) is copied for each stop: {why}"))
        if offline := [f"{key}={value}" for key, value in OFFLINE.items() if key not in os.environ]:
            self._print(text_of(f"set for the script: {' '.join(offline)}", "dim"))
        started, commit = datetime.now(UTC).isoformat(timespec="seconds"), SweepCode().dcpbench.commit
        reference = self._reference()
        about = {name: reference.recording.about[name] for name in ("torch", "python")}
        machine = {"host": platform.node(), "cpu_cores": psutil.cpu_count(), "dcpbench_commit": commit}
        write_json(self._place / ENVIRONMENT_JSON, about | machine)
        self._limit_s = min(self._limit_s, max(_LEAST_LIMIT_S, _FACTOR * reference.seconds))
        script = Script(self._command, self._resume_words, reference.recording, started, commit)
        for stop in stops or chosen(reference.recording):
            with self._console.status(f"{stop}"):
                began = time.monotonic()
                verdict, last = self._judged(stop, reference.recording)
                seconds = time.monotonic() - began
            row = script.row(stop, verdict, seconds, last)
            append_row(self._place, row)
            self._show(stop, verdict, seconds, last)
            if verdict.status == "pass":
                files.remove_tree(self._place / row.cell / "out")
            yield row

    def end(self, rows: Sequence[Row]) -> int:
        """Write the reports, and return the exit status."""
        write_csv(self._place)
        write_reports(self._place, None)
        for place in (self._place / "reference", *self._place.glob("again-*")):
            files.remove_tree(place / "out")
        failed, exact = ([row for row in rows if row.status == status] for status in ("fail", "pass"))
        style = "bold red" if failed else "bold"
        page = _shown(self._place / "report.html")
        self._print(text_of(f"{len(exact)} of {counted(len(rows), 'stop')} exact; page: {page}", style))
        return 1 if failed else 0 if len(exact) == len(rows) else WRONG_CONFIGURATION

    def _reference(self) -> Ended:
        with self._console.status("running the command uninterrupted"):
            self._command.prepare(self._place / "reference")
            ended = self._command.run(self._place / "reference", "reference", self._limit_s)
        recording, log = ended.recording, _shown(ended.log)
        broken = listed(recording.broken)
        saves = [str(step) for step in sorted(recording.disk.sessions)]
        if ended.status is None:
            raise ConfigError(
                f"the command hangs, or takes longer than {self._limit_s:g} s (--timeout); see {log}"
            )
        if ended.status:
            message = error_line(ended.log)
            raise ConfigError(f"the command does not run: exit status {ended.status}: {message}; see {log}")
        if not recording.length:
            why = f" ({broken})" if broken else ""
            raise ConfigError(f"the command made no optimizer step of torch{why}; see {log}")
        if not saves:
            where = f"below {OUT}" if self._command.has_out else "in the working folder"
            raise ConfigError(f"the command saved nothing {where}: there is nothing to resume from")
        steps, ranks = counted(recording.length, "step"), counted(len(recording.ranks), "rank")
        torch = f"torch {recording.about['torch']}"
        text = f"{steps} on {ranks}, saves after step {listed(saves, 6)}; {torch}"
        self._line("reference", "", "", text, ended.seconds)
        if ended.left_behind:
            self._below(f"ended {ended.left_behind} of its processes, which the command had left")
        if broken:
            self._below(f"not all was recorded: {broken}")
        return ended

    def _again(self, steps: int) -> Recording:
        """Return another uninterrupted run, which made at least these steps."""
        if self._second.length < steps:
            place = self._place / f"again-{steps}"
            self._command.prepare(place)
            self._second = self._command.run(place, "again", self._limit_s, Stop("kill", steps + 1)).recording
        return self._second

    def _judged(self, stop: Stop, reference: Recording) -> tuple[Verdict, Ended]:
        """Return the verdict on a stop, and the last run that it needed."""
        place = self._place / cell_name(stop)
        self._command.prepare(place)
        stopped = self._command.run(place, "stopped", self._limit_s, stop)
        if stopped.recording.stop is None:
            return judge(reference, stopped, None, self._again), stopped
        resumed = self._command.run(place, "resumed", self._limit_s, more=self._resume_words)
        return judge(reference, stopped, resumed, self._again), resumed

    def _show(self, stop: Stop, verdict: Verdict, seconds: float, last: Ended) -> None:
        self._line(str(stop), verdict.word, style_of(verdict.status), verdict.reason, seconds)
        if verdict.cause:
            self._below(f"likely: {verdict.cause}")
        for hint in verdict.hints:
            self._below(hint, "dim")
        if verdict.status == "fail":
            self._below(f"log: {_shown(last.log)}", "dim")

    def _line(self, name: str, word: str, style: str, text: str, seconds: float) -> None:
        """Print what a run showed."""
        start = text_of(name.ljust(_NAME_WIDTH)), text_of(word.ljust(_WORD_WIDTH), style)
        self._print(Text("  ").join([*start, text_of(text), text_of(f"{seconds:.1f} s", "dim")]))

    def _below(self, text: str, style: str = "") -> None:
        self._print(Padding(text_of(text, style), (0, 0, 0, 4)))

    def _print(self, shown: RenderableType) -> None:
        with self._console.capture() as captured:
            self._console.print(shown)
        self._console.file.write(without_trailing_blanks(captured.get()))
        self._console.file.flush()


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
