"""Run the script of each finding: is the defect still in this torch?

    python scripts/findings.py [--other-python PYTHON] [NAME...]

A script fails if the defect is there. The exit status of this one is 0 if each defect that its page lists for
this torch is there, 1 if one is gone, and 2 if a script could not be run.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from findings_index import FINDINGS, TRIED, Finding, findings

_COMMAND = re.compile(
    r"^ *(?:python|torchrun --nproc-per-node (?P<ranks>\d+)) (?P<script>\w+\.py)(?P<words>[^\n#(]*)",
    re.MULTILINE,
)
_FAILED = 70
_ENDS_BY_IT = f"""
import os, sys
def hook(*error):
    sys.__excepthook__(*error)
    sys.stderr.flush()
    os._exit({_FAILED})
sys.excepthook = hook
"""
"""A sitecustomize.py that gives an exception another exit status than a defect that is there."""
_LIMIT_S = 600
_THERE, _GONE, _NOT_RUN, _UNLISTED = "there", "gone", "could not run", "not listed"
_STATUS = {_THERE: 0, _UNLISTED: 0, _GONE: 1, _NOT_RUN: 2}


@dataclass(frozen=True)
class Answer:
    """What a script showed: a word of `_STATUS`, and the last line that it printed, or why it did not run."""

    word: str
    line: str


def main(words: Sequence[str] | None = None) -> int:
    """Run the scripts of these findings, or of all, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages of docs/findings, without .md")
    parser.add_argument("--other-python", help="a Python with an older torch, which one script needs")
    given = parser.parse_args(words)
    chosen = [one for one in findings() if not given.names or one.page.removesuffix(".md") in given.names]
    if len(chosen) < len(given.names):
        parser.error(f"unknown finding; see {FINDINGS}")
    status = 0
    print(f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs")
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        answers = pool.map(partial(run, other_python=given.other_python), chosen)
        for finding, answer in zip(chosen, answers, strict=True):
            print(f"{finding.page.removesuffix('.md'):32} {answer.word:13} {answer.line}", flush=True)
            status = max(status, _STATUS[answer.word])
    return status


def run(finding: Finding, other_python: str | None = None) -> Answer:
    """Run the script of a finding as its docstring says."""
    script = FINDINGS / f"{finding.page.removesuffix('.md').replace('-', '_')}.py"
    command = _COMMAND.search(script.read_text())
    assert command, f"{script}: no command in its docstring"
    words = [word for word in command["words"].split() if word[0] != "[" and word[-1] != "]"]
    if "OTHER_PYTHON" in words and not other_python:
        return Answer(_NOT_RUN, "needs --other-python")
    words = [other_python or word if word == "OTHER_PYTHON" else word for word in words]
    is_listed, needs_gpu = listed(finding.torch, torch.__version__)
    if needs_gpu and not torch.cuda.is_available():
        return Answer(_NOT_RUN if is_listed else _UNLISTED, "needs a GPU")
    answer = _ran(script, words, int(command["ranks"] or 1))
    if is_listed or answer.word == _NOT_RUN:
        return answer
    return Answer(_UNLISTED, f"{'but there' if answer.word == _THERE else 'and not there'}: {answer.line}")


def listed(text: str, version: str) -> tuple[bool, bool]:
    """Return whether the `torch` of a page lists a version, and whether GPUs alone show it. A version that
    was not tried is taken for the closest earlier one that was."""
    number = tuple(map(int, version.split(".")[:2]))
    tried = [one for one in TRIED if tuple(map(int, one.split("."))) <= number]
    closest = tried[-1] if tried else TRIED[0]
    entries = [entry.strip() for entry in text.partition("; not")[0].split(",")]
    found = [entry for entry in entries if entry.split()[0] == closest]
    return bool(found), all("(CUDA)" in entry for entry in found or entries)


def _ran(script: Path, words: Sequence[str], ranks: int) -> Answer:
    """Run a script, on ranks as torchrun starts them, and say what their exit statuses show."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_ENDS_BY_IT)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        processes, errors = [], []
        for rank in range(ranks):
            own = {**world, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1} if ranks > 1 else {}
            variables = {
                **os.environ,
                **{name: str(value) for name, value in own.items()},
                "PYTHONPATH": path,
            }
            out, err = (Path(folder, f"{rank}.{kind}") for kind in ("out", "err"))
            with out.open("wb") as output, err.open("wb") as error:
                started = partial(subprocess.Popen, env=variables, cwd=folder, start_new_session=True)
                processes.append(started([sys.executable, script, *words], stdout=output, stderr=error))
            errors.append(err)
        try:
            statuses = [process.wait(_LIMIT_S) for process in processes]
        except subprocess.TimeoutExpired:
            return Answer(_NOT_RUN, f"took longer than {_LIMIT_S} s")
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if _FAILED in statuses:
            return Answer(_NOT_RUN, last_line(errors[statuses.index(_FAILED)]))
        if min(statuses) < 0:
            return Answer(_THERE, f"died by {signal.Signals(-min(statuses)).name}")
        return Answer(_THERE if any(statuses) else _GONE, last_line(Path(folder, "0.out")))


def last_line(path: Path) -> str:
    """Return the start of the last line in a file that is not empty."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


if __name__ == "__main__":
    sys.exit(main())
