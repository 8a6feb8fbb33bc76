"""The row of a stop, in the format of all rows."""

import hashlib
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dcpbench.core.cell_key import digest_of
from dcpbench.core.metrics import METRICS
from dcpbench.plugins.script.judge import Verdict, tail
from dcpbench.plugins.script.record import Recording
from dcpbench.plugins.script.run import Command, Ended, Stop
from dcpbench.records.row import Row

_PARALLEL = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp", "FSDPModule": "fsdp2"}
_TAIL = 20


def cell_name(stop: Stop) -> str:
    """Return the name of a stop's cell, which is a folder too."""
    text = f"stop={stop}"
    name = re.sub(r"[^\w@.,=+:-]", "_", text)[:80]
    return name if name == text else f"{name}-{digest_of(text)[:4]}"


@dataclass(frozen=True)
class Script:
    """What all rows of a script share."""

    command: Command
    resume_words: Sequence[str]
    reference: Recording
    started_at: str
    dcpbench_commit: str | None

    def row(self, stop: Stop, verdict: Verdict, seconds: float, logs: Sequence[Ended]) -> Row:
        """Return the row of a stop."""
        about = self.reference.about
        wrappers = about.get("wrappers", ())
        parallel = [name for kind, name in _PARALLEL.items() if kind in wrappers]
        config = self._identity(stop)
        failed = logs[-1].log if verdict.status == "fail" and logs else None
        return Row(
            cell=cell_name(stop),
            status=verdict.status,
            reason=None if verdict.word == "exact" else f"{verdict.word}: {verdict.reason}",
            axes={
                "scenario": "script",
                "parallel": "+".join(parallel) or "none",
                "compile": "OptimizedModule" in wrappers,
                "save": "script",
                "model": script_name(self.command.words),
                "storage": "script",
                "world_size": _integer(about.get("world_size")),
                "device": "+".join(map(str, about.get("devices", ()))) or None,
                "seed": 0,
            },
            overrides=self._words(stop),
            repeat=0,
            resume={"pass": True, "fail": False}.get(verdict.status),
            powered=None,
            first_mismatch=verdict.name,
            metrics={
                **dict.fromkeys(METRICS),
                "cell_s": seconds,
                "loaded_step": verdict.loaded,
                "newest_step": verdict.newest,
                "first_step": verdict.step,
            },
            texts={"verdict": verdict.word, "first_kind": verdict.kind},
            torch_version=_text(about.get("torch")),
            python_version=_text(about.get("python")),
            backend=_text(about.get("backend")),
            dcpbench_commit=self.dcpbench_commit,
            started_at=self.started_at,
            config_digest=digest_of(config),
            code_digest=self._code_digest(),
            cwd=str(self.command.cwd),
            config=config,
            details={
                "script": self._timeline(verdict),
                **({"likely": [verdict.cause]} if verdict.cause else {}),
                **({"hints": [*verdict.hints]} if verdict.hints else {}),
                **({"log_tail": tail(failed)[-_TAIL:], "rank": verdict.rank or 0} if failed else {}),
            },
        )

    def _identity(self, stop: Stop) -> dict[str, Any]:
        resume = {"script.resume_args": shlex.join(self.resume_words)} if self.resume_words else {}
        return {"script.command": shlex.join(self.command.words), **resume, "--stop": str(stop)}

    def _words(self, stop: Stop) -> str:
        resume = [f"--resume-args={shlex.join(self.resume_words)}"] if self.resume_words else []
        every = [f"--every={self.command.every}"] if self.command.every > 1 else []
        return shlex.join(["script", *resume, *every, f"--stop={stop}", "--", *self.command.words])

    def _code_digest(self) -> str | None:
        file = script_file(self.command)
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file else None

    def _timeline(self, verdict: Verdict) -> dict[str, Any]:
        saves = sorted(step for step in self.reference.disk.sessions if step > 0)
        return {"steps": self.reference.length, "saves": saves, "last": verdict.last}


def script_file(command: Command) -> Path | None:
    """Return the script: the first word that is a Python file."""
    paths = (command.cwd / word for word in command.words if word.endswith(".py"))
    return next((path for path in paths if path.is_file()), None)


def script_name(words: Sequence[str]) -> str:
    """Return the name of the script, or of the command."""
    return next((Path(word).name for word in words if word.endswith(".py")), Path(words[0]).name)


def environment(reference: Recording, commit: str | None) -> Mapping[str, Any]:
    """Return what a sweep's folder says about the machine."""
    about = reference.about
    return {
        "torch": about.get("torch"),
        "python": about.get("python"),
        "host": platform.node(),
        "cpu_cores": psutil.cpu_count(),
        "dcpbench_commit": commit,
    }


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
