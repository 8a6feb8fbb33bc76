"""The row of a stop, in the format of all rows."""

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def row(self, stop: Stop, verdict: Verdict, seconds: float, last: Ended) -> Row:
        """Return the row of a stop; `last` is its last run."""
        about, words = self.reference.about, shlex.join(self.command.words)
        parallel = [name for kind, name in _PARALLEL.items() if kind in about["classes"]]
        scripts = [Path(word) for word in self.command.words if word.endswith(".py")]
        file = next((path for path in (self.command.cwd / path for path in scripts) if path.is_file()), None)
        resume = shlex.join(self.resume_words)
        config = {"script.command": words, "--stop": str(stop)}
        options = []
        if resume:
            config["script.resume_args"] = resume
            options.append(f"--resume-args={resume}")
        if self.command.every > 1:
            options.append(f"--every={self.command.every}")
        details: dict[str, Any] = {
            "script": self._timeline(verdict),
            "likely": [verdict.cause] if verdict.cause else [],
            "hints": [*verdict.hints],
        }
        if verdict.status == "fail":
            details |= {"log_tail": tail(last.log)[-_TAIL:], "rank": verdict.rank or 0}
        return Row(
            cell=cell_name(stop),
            status=verdict.status,
            reason=None if verdict.word == "exact" else f"{verdict.word}: {verdict.reason}",
            axes={
                "scenario": "script",
                "parallel": "+".join(parallel) or "none",
                "compile": "OptimizedModule" in about["classes"],
                "save": "script",
                "model": (scripts or [Path(self.command.words[0])])[0].name,
                "storage": "script",
                "world_size": about["world_size"],
                "device": "+".join(about["devices"]) or None,
                "seed": 0,
            },
            overrides=shlex.join(["script", *options, f"--stop={stop}", "--", *self.command.words]),
            resume={"pass": True, "fail": False}.get(verdict.status),
            first_mismatch=verdict.name,
            metrics={
                **dict.fromkeys(METRICS),
                "cell_s": seconds,
                "loaded_step": verdict.loaded,
                "newest_step": verdict.newest,
                "first_step": verdict.step,
            },
            texts={"verdict": verdict.word, "first_kind": verdict.kind},
            torch_version=about["torch"],
            python_version=about["python"],
            backend=about["backend"],
            dcpbench_commit=self.dcpbench_commit,
            started_at=self.started_at,
            config_digest=digest_of(config),
            code_digest=hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file else None,
            cwd=str(self.command.cwd),
            config=config,
            details={key: value for key, value in details.items() if value},
        )

    def _timeline(self, verdict: Verdict) -> dict[str, object]:
        saves = sorted(step for step in self.reference.disk.sessions if step > 0)
        return {"steps": self.reference.length, "saves": saves, "last": verdict.last}
